"""Programs of accelerate, transformers and peft, once with ours and once with FSDP2."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn as nn

import compiled_fsdp
from tests.harness.models import VOCABULARY
from tests.harness.reference import full


def llama(**options: Any) -> nn.Module:
    """A small one, the same whenever it is made."""
    import transformers

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**size, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """A data set of token sequences, to be predicted one from the other; [length] each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCABULARY, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def full_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, gathered where they are sharded; names without the prefix of `torch.compile`'s wrapper."""
    return {name.removeprefix("_orig_mod."): full(tensor) for name, tensor in tensors.items()}


def without_ours(code: str) -> str:
    """The same program with FSDP2: a recipe whose lines that name us do nothing."""
    changed = re.sub(r"^( *).*compiled_fsdp.*$", r"\1pass", code, flags=re.MULTILINE)
    assert changed != code
    return changed


@contextlib.contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """What torchrun tells a process. What is compiled in between is compiled quickly, and an `install()` taken back."""
    installations, install, compile_in_place = [], compiled_fsdp.install, nn.Module.compile

    def installs() -> Any:
        installations.append(install())
        return installations[-1]

    def compiles(self: nn.Module, **options: Any) -> None:
        compile_in_place(self, **options, options={"codegen": "aot_eager"})

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # of nobody: the process group is there already
    try:
        with (
            mock.patch.dict(os.environ, {name: str(value) for name, value in ranks.items()} | address),
            mock.patch.object(compiled_fsdp, "install", installs),
            mock.patch.object(nn.Module, "compile", compiles),
        ):
            yield
    finally:
        for installation in reversed(installations):
            installation.uninstall()


def accelerated() -> None:
    """accelerate shards on accelerators alone, and on a CPU takes DDP, whatever its plugin says: tell it this is
    one."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    assert PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def graphs(model: nn.Module) -> int:
    """How many of the model's graphs our backend has compiled. Raises AssertionError where Dynamo has broken one."""
    explained = compiled_fsdp.explain(model)
    assert not explained.graph_breaks, explained
    return len(explained.graphs)
