"""`torch.func.functional_call` in a forward: what is put back after it is what was read, and not the shard."""

import itertools

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from tests.harness import compiled, distributed, variants
from tests.harness.reference import assert_same_gradients

WAYS = {
    "uncompiled": lambda model: model,
    "compiled": lambda model: compiled(model, fullgraph=True),
    "torch's aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
}


class Adapted(nn.Module):
    """Calls a layer with its own weight and a correction to it, with zeros, and as it is."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.delta = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 8)
        self.recompute = recompute

    def adapted(self, x):
        own = dict(self.inner.named_parameters())
        y = functional_call(self.inner, {"weight": own["weight"] + self.delta, "bias": own["bias"]}, (x,))
        return torch.tanh(y) + functional_call(self.inner, {"bias": torch.zeros(8)}, (x,))

    def forward(self, x):
        y = checkpoint(self.adapted, x, use_reentrant=False) if self.recompute else self.adapted(x)
        return self.inner(y)


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.adapted, self.recompute = Adapted(recompute), not recompute

    def forward(self, x):
        return checkpoint(self.adapted, x, use_reentrant=False) if self.recompute else self.adapted(x)


def steps(model: nn.Module, run: nn.Module, rank: int, before=lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        before()
        run(torch.full((4, 8), 0.1 + step + rank)).square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters()), f"step {step}"
        optimizer.step()


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize(
    ("reshard_after_forward", "way"),
    variants(
        itertools.product([True, False], WAYS),
        (True, "uncompiled"),
        (False, "uncompiled"),
        (True, "compiled"),
        (False, "torch's aot_eager"),
    ),
)
def test_in_a_forward(rank, world_size, way, reshard_after_forward):
    """What it puts back is the full parameter that it found; after the forward the DTensor is there again."""
    mine, theirs = Adapted(), Adapted()
    fully_shard(mine, reshard_after_forward=reshard_after_forward)
    torchs_fully_shard(theirs, reshard_after_forward=reshard_after_forward)
    counters.clear()
    steps(mine, WAYS[way](mine), rank)
    assert counters["stats"]["unique_graphs"] == (way != "uncompiled"), "compiled again for what the first step left"
    steps(theirs, theirs, rank)
    # Dynamo's graph adds three gradients of one weight in an order of its own
    assert_same_gradients(mine, theirs, **({} if way == "uncompiled" else {"rtol": 1e-5, "atol": 1e-6}))


@distributed(world_size=2)
def test_in_what_is_run_again(rank, world_size):
    """In a checkpoint's body, which backward runs again when no forward is there to end."""
    mine, theirs = fully_shard(Adapted(recompute=True)), torchs_fully_shard(Adapted(recompute=True))
    steps(mine, mine, rank)
    steps(theirs, theirs, rank)
    assert_same_gradients(mine, theirs)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("unit", ["around the checkpoint", "in the checkpoint"])
def test_in_a_compiled_checkpoint(rank, world_size, unit):
    """Of a unit that goes on after the checkpoint, what its body has gathered cannot be stored: the graph breaks."""
    mine, theirs = (nn.Sequential(Checkpointed(unit == "around the checkpoint"), nn.Linear(8, 8)) for _ in range(2))
    for model, function in (mine, fully_shard), (theirs, torchs_fully_shard):
        torch.manual_seed(1)
        nn.init.normal_(model[1].weight)
        function(model[0].adapted if unit == "in the checkpoint" else model[0])
        function(model)
    steps(mine, compiled(mine), rank)
    steps(theirs, theirs, rank)
    assert_same_gradients(mine, theirs, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["uncompiled", "compiled"])
def test_of_an_unsharded_module(rank, world_size, way):
    """Outside of a forward, where `unshard()` shows full parameters."""
    model = fully_shard(Adapted(), reshard_after_forward=False)
    model.unshard()
    with torch.no_grad():
        functional_call(model, {"inner.bias": torch.zeros(8)}, (torch.ones(4, 8),))
    model.reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    theirs = torchs_fully_shard(Adapted())
    steps(model, WAYS[way](model), rank)
    steps(theirs, theirs, rank)
    assert_same_gradients(model, theirs)
