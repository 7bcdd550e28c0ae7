"""Parameters that a forward does not use, on all ranks or on some."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from compiled_fsdp import explain, fully_shard
from tests.harness import assert_same, compiled, distributed, forward_backward, loss_of, train

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
    """Gradients stay None, as with FSDP2."""
    mine = train(WAYS[way](sharded(0, fully_shard, units=units)))
    assert_same(mine, train(sharded(0, torch_fully_shard, units=units)))
    assert mine.gradients[0]["experts.1.0.weight"] is None


@distributed(world_size=2)
@pytest.mark.parametrize("way", [*WAYS, "by unit"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_on_one_rank(rank, world_size, way, reshard_after_forward):
    """Ranks that use different parameters of a unit; what nobody used has a gradient of zeros."""
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


class ParallelExperts(Experts):
    def forward(self, tokens):
        return self.head(self.experts[self.choice](self.embedding(tokens)).full_tensor())


def parallel_experts(choice: int, tp: int, unit: str) -> nn.Module:
    """Experts split over mesh["tp"], whose outputs are DTensors, and sharded over mesh["dp"]."""
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
    model = ParallelExperts(choice)
    for expert in model.experts:
        parallelize_module(expert, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    if unit == "experts":
        fully_shard(list(model.experts), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"]).set_reduce_scatter_unused_params(True)
    return model


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("unit", ["root", "experts"])
def test_tensor_parallel_parameters(rank, world_size, way, unit):
    """Parameters that are DTensors in forward; the experts' unit has an output that is one, too."""
    model = parallel_experts(rank, 1, unit)
    reference = DistributedDataParallel(Experts(rank), find_unused_parameters=True)
    assert_same(train(WAYS[way](model)), train(reference))


@pytest.mark.more
@distributed(world_size=4)
@ways
@pytest.mark.parametrize("unit", ["root", "experts"])
def test_tensor_parallel_parameters_on_two_ranks_each(rank, world_size, way, unit):
    def step(model, index):
        loss = loss_of(model, rank // 2, index)
        loss.backward()
        return loss.detach()

    model = parallel_experts(rank // 2, 2, unit)
    reference = DistributedDataParallel(Experts(rank // 2), find_unused_parameters=True)
    assert_same(train(WAYS[way](model), step), train(reference, step), rtol=1e-5)
