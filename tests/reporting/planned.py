"""A model whose plan is worth advice, on the meta device among 64 ranks of which one is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.tools.explanation import Explanation
from tests.harness.fake import fake_group


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """A table, some layers, a head."""

    def __init__(self, dim: int = 2048, layers: int = 3, words: int = 32000) -> None:
        super().__init__()
        self.table = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum(dtype=torch.float32)


@contextmanager
def ranks(world_size: int = 64) -> Iterator[Any]:
    """Be one of so many ranks; gives their mesh."""
    with fake_group(world_size):
        yield init_device_mesh("cpu", (world_size,))


def sharded(
    mesh: Any, *, own: tuple[str, ...] = (), kept: tuple[str, ...] = (), model: Any = Model, **given: Any
) -> nn.Module:
    """A unit for each layer, for the modules of the names `own`, and for the root; `kept` ones stay unsharded."""
    with torch.device("meta"):
        built = model().bfloat16()
    for name, module in built.named_modules():
        if isinstance(module, Layer) or name in own:
            fully_shard(module, mesh=mesh, reshard_after_forward=name not in kept, **given)
    return fully_shard(built, mesh=mesh, reshard_after_forward=True, **given)


def plan(model: nn.Module, *, batch: int = 2, length: int = 1024, **options: Any) -> Explanation:
    """What `explain` says of a call with so many sequences on H100s."""
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return explain(model, tokens, options={"codegen": "aot_eager", "hardware": "h100", **options})


def seconds(explanation: Explanation) -> float:
    """Of forward and backward."""
    return sum(graph.simulation.seconds for graph in explanation.graphs)
