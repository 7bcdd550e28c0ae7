"""A model that is hard to save: trained with AdamW under FSDP2 or compiled_fsdp, saved, loaded, and trained further."""

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import fully_shard, replicate
from tests.harness import shard, train
from tests.harness.checkpoints import Odd, everyone_alike, state_of

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LIBRARIES = {"ours": fully_shard, "FSDP2": torch_fully_shard, "replicated": replicate}
Tensors = dict[str, torch.Tensor]
After = tuple[Tensors, torch.Tensor, Tensors]  # the restored state, the next step's loss, the state after that step


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def trained(library: str = "ours") -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model and its optimizer after two steps."""
    model = shard(Odd(), LIBRARIES[library])
    optimizer = adamw(model)
    train(model, optimizer=optimizer, steps=2)
    return model, optimizer


def empty(library: str = "ours") -> nn.Module:
    """Return a sharded model on the meta device."""
    with torch.device("meta"):
        model = Odd()
    return shard(model, LIBRARIES[library])


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, run: nn.Module | None = None) -> After:
    """Train one more step; return the state before it, its loss, and the state after it."""
    state = state_of(model, optimizer)
    loss = train(model if run is None else run, everyone_alike, optimizer=optimizer, steps=1).losses[0]
    return state, loss, state_of(model, optimizer)
