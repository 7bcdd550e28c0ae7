"""Parameters that a forward does not use, on all ranks or on some."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from compiled_fsdp import explain, fully_shard
from tests.harness import assert_same, compiled, distributed, forward_backward, train

WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
ways = pytest.mark.parametrize("way", WAYS)


class Experts(nn.Module):
    """One of two experts is used: the one that ``choice`` says, which may differ between ranks."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self.choice = choice
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, tokens):
        return self.head(self.experts[self.choice](self.embedding(tokens)))


def sharded(choice, function, *, units=True):
    model = Experts(choice)
    if units:
        for expert in model.experts:
            function(expert)
    return function(model)


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("units", [True, False])
def test_unused_on_every_rank(rank, world_size, way, units):
    """K4: gradients stay None, as with FSDP2."""
    mine = train(WAYS[way](sharded(0, fully_shard, units=units)))
    assert_same(mine, train(sharded(0, torch_fully_shard, units=units)))
    assert mine.gradients[0]["experts.1.0.weight"] is None


@distributed(world_size=2)
@pytest.mark.parametrize("way", [*WAYS, "by unit"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_on_one_rank(rank, world_size, way, reshard_after_forward):
    """K4: ranks that use different parameters of a unit; what nobody used has a gradient of zeros."""
    model = fully_shard(Experts(rank), reshard_after_forward=reshard_after_forward)
    model.set_reduce_scatter_unused_params(True)
    reference = DistributedDataParallel(Experts(rank), find_unused_parameters=True)
    run = partial(compiled, bucket="module") if way == "by unit" else WAYS[way]
    assert_same(train(run(model)), train(reference))
    for graph in explain(model).graphs if way == "by unit" else ():
        assert graph.count("gather") == (3 if reshard_after_forward or graph.phase == "forward" else 0)


@distributed(world_size=2)
@ways
def test_zeros_where_nobody_uses_a_parameter(rank, world_size, way):
    model = fully_shard(Experts(0))
    model.set_reduce_scatter_unused_params(True)
    forward_backward(WAYS[way](model), 0)
    grad = model.experts[1][0].weight.grad.full_tensor()
    assert torch.equal(grad, torch.zeros_like(grad))
    with torch.no_grad():
        assert not WAYS[way](model)(torch.zeros(1, 4, dtype=torch.int64)).requires_grad
    model.set_reduce_scatter_unused_params(False)
    model.zero_grad()
    forward_backward(WAYS[way](model), 0)
    assert model.experts[1][0].weight.grad is None
