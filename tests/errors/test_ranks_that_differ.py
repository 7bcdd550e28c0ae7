"""Ranks with different models, options or layers: an error on every rank that names the first difference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp import fully_shard
from compiled_fsdp.ranks.failures import RanksDiffer
from tests.harness import compiled, distributed
from tests.harness.ours import new_group, two_layers


# Each test compiles anew: code that raises what ranks differed in stays Dynamo's code for such models.
def frozen(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    return fully_shard(model, mesh=mesh)


DIFFERENT: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], str, str]] = {
    "model": (partial(two_layers, rows=6), {}, r"float32\[6, 4\]", r"float32\[4, 4\]"),
    "layers": (partial(two_layers, layers=3), {}, r"read 4: 2\.weight float32\[4, 4\]", "read 4: nothing more"),
    "reshard": (partial(two_layers, reshard_after_forward=True), {}, "resharded", "kept"),
    "frozen": (frozen, {}, r"read 3: 1\.bias .*frozen", r"read 3: 1\.bias .*"),
    "budget": (two_layers, {"memory_budget": 10**9}, "option memory_budget=1000000000", "option memory_budget=None"),
    "options": (two_layers, {"bucket": "parameter"}, "bucket='parameter'", "bucket='auto'"),
    "inductor": (two_layers, {"inductor": {"max_autotune": True}}, "'max_autotune': True", r"inductor=\{\}"),
}  # fmt: skip


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_models_or_options(rank, world_size, what):
    """Nor does `suppress_errors` hide it."""
    make, options, odd, usual = DIFFERENT[what]
    mesh = new_group()
    run = compiled(make(mesh=mesh), **options) if rank == 1 else compiled(two_layers(mesh=mesh))
    with (
        torch._dynamo.config.patch(suppress_errors=what in ("model", "options")),
        pytest.raises(RanksDiffer, match=f"Rank 1 of the group has: .*{odd}.*; rank 0 has: .*{usual}"),
    ):
        run(torch.ones(2, 4))


class Block(nn.Module):
    """A linear layer after a graph break: equal ones share compiled code."""

    def __init__(self, inner: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.down(self.up(x))


def blocks(number: int = 4, **change: Any) -> nn.Module:
    """Blocks, each a unit; `change` is of the last one."""
    layers = [Block(change.get("inner", 4) if i == number - 1 else 4) for i in range(number)]
    layers[-1].down.weight.requires_grad_(not change.get("frozen", False))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=change.get("reshard") if layer is layers[-1] else None)
    return fully_shard(nn.Sequential(*layers))


IN_PARTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "fewer": (lambda: blocks(3), {}, r"no 3\.down\.bias", r"3\.down\.bias: float32\[4\]"),
    "more": (lambda: blocks(5), {}, r"4\.down\.bias: float32\[4\]", r"no 4\.down\.bias"),
    "size": (lambda: blocks(inner=6), {}, r"3\.down\.weight: float32\[4, 6\]", r"3\.down\.weight: float32\[4, 4\]"),
    "frozen": (lambda: blocks(frozen=True), {}, r"3\.down\.weight: .*frozen", r"3\.down\.weight: .*trained"),
    "reshard": (lambda: blocks(reshard=False), {}, "forward=False", "forward=None"),
    "budget": (blocks, {"memory_budget": 10**9}, "option memory_budget=1000000000", "option memory_budget=None"),
}  # fmt: skip


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.more)])
@pytest.mark.parametrize("what", IN_PARTS)
def test_ranks_with_different_models_in_parts(rank, world_size, what, odd):
    """Before any collective, and so before one waits for another."""
    make, options, theirs, usual = IN_PARTS[what]
    run = compiled(make(), **options) if rank == odd else compiled(blocks())
    one, zero = (theirs, usual) if odd == 1 else (usual, theirs)
    with pytest.raises(RanksDiffer, match=f"Rank 1 of the group has: .*{one}.*; rank 0 has: .*{zero}"):
        run(torch.ones(2, 4)).sum().backward()


@distributed(world_size=2, reset=True)
def test_an_error_is_not_kept_for_equal_models(rank, world_size):
    """Dynamo would give the code that raises to the next model of the same shape, on the rank whose model was the usual
    one."""
    mesh = new_group()
    with pytest.raises(RanksDiffer):
        compiled(two_layers(rows=5 + rank, mesh=mesh))(torch.ones(2, 4))
    model = two_layers(rows=5, mesh=mesh)
    compiled(model)(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(world_size=2, reset=True)
def test_ranks_that_run_different_layers(rank, world_size):
    """Their collectives would fit each other, and give each rank half of the other's layer."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.layers[rank](x)

    with pytest.raises(RanksDiffer, match=r"layers\.1\.weight .*; rank 0 has: read 0: layers\.0\.weight"):
        compiled(fully_shard(Either()))(torch.ones(2, 4))


@distributed(world_size=2, reset=True)
def test_one_rank_evaluates_while_the_other_trains(rank, world_size):
    run = compiled(two_layers(mesh=new_group()))
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(RanksDiffer, match=r"Rank 1 of the group has: .*inference, .*; rank 0 has: "),
    ):
        run(torch.ones(2, 4))
