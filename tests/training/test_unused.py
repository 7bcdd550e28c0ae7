"""Parameters and outputs that are not used, on all ranks or on some."""

import itertools

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    WAYS,
    Record,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    loss_of,
    shard,
    train,
    variants,
    ways,
)
from tests.harness.models import VOCABULARY, seeded
from tests.harness.ours import COUNTED
from tests.harness.reference import Sharding, assert_same_gradients


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
@pytest.mark.parametrize(
    ("reshard_after_forward", "way"),
    variants(itertools.product([True, False], COUNTED), (True, "eager"), (False, "eager"), (True, "compiled_fsdp")),
)
def test_unused_on_one_rank(rank, world_size, way, reshard_after_forward):
    """Ranks that use different parameters of a unit; what nobody used has a gradient of zeros."""
    model = fully_shard(Experts(rank), reshard_after_forward=reshard_after_forward)
    model.set_reduce_scatter_unused_params(True)
    reference = DistributedDataParallel(Experts(rank), find_unused_parameters=True)
    run = COUNTED[way]
    assert_same(train(run(model)), train(reference))
    for graph in explain(model).graphs if way == "by unit" else ():
        assert graph.count("gather") == (3 if reshard_after_forward or graph.phase == "forward" else 0)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_on_one_rank_by_inductor(rank, world_size, reshard_after_forward):
    """A rank that does not use a parameter gathers it all the same, and Inductor has code for its zero gradient."""
    model = fully_shard(Experts(rank), reshard_after_forward=reshard_after_forward)
    model.set_reduce_scatter_unused_params(True)
    reference = DistributedDataParallel(Experts(rank), find_unused_parameters=True)
    assert_same(train(compiled(model, codegen="inductor")), train(reference), rtol=1e-5)


class BrokenExperts(Experts):
    def forward(self, tokens):
        x = self.embedding(tokens)
        torch._dynamo.graph_break()
        return self.head(self.experts[self.choice](x))


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_unused_behind_a_graph_break_with_symbolic_sizes(rank, world_size, codegen):
    """The full parameters go from one graph to the next, which knows their sizes as symbols."""
    model = fully_shard(BrokenExperts(rank))
    model.set_reduce_scatter_unused_params(True)
    reference = DistributedDataParallel(BrokenExperts(rank), find_unused_parameters=True)
    run = torch.compile(model, backend="compiled_fsdp", options={"codegen": codegen}, dynamic=True)
    assert_same(train(run), train(reference), rtol=1e-5)


class Uneven(nn.Module):
    """Has three rows, and breaks the graph behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(3, 8)

    def forward(self, x):
        y = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return x + self.b(y)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_unused_and_kept_behind_a_graph_break_with_symbolic_sizes(rank, world_size, codegen):
    """How many rows are missing to an even shard is computed in the graph, where the size is a symbol."""

    def build() -> nn.Module:
        model = seeded(lambda: nn.Sequential(Uneven(), nn.Linear(8, 8), nn.Linear(8, 8)))
        fully_shard([model[0], model[1]])
        fully_shard(model).set_reduce_scatter_unused_params(True)
        model.set_reshard_after_backward(False)
        return model

    model, reference = build(), build()
    run = torch.compile(model, backend="compiled_fsdp", options={"codegen": codegen}, dynamic=True)
    for micro in range(3):
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(10 * micro + rank))
        for each, forward in (model, run), (reference, reference):
            each.set_requires_gradient_sync(micro == 2)
            forward(x).square().mean().backward()
    for each in (model, model[0], reference, reference[0]):
        each.reshard()
    assert_same_gradients(model, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.more
@distributed(world_size=2)
def test_unused_with_symbolic_sizes_and_reshard(rank, world_size):
    """How many ranks gather in backward is no symbol, though other numbers are."""
    model = fully_shard(Experts(rank), reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    reference = DistributedDataParallel(Experts(rank), find_unused_parameters=True)
    run = torch.compile(model, backend="compiled_fsdp", options={"codegen": "aot_eager"}, dynamic=True)
    assert_same(train(run), train(reference), rtol=1e-5)


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
@pytest.mark.parametrize(
    ("unit", "way"),
    variants(
        itertools.product(["root", "experts"], WAYS),
        ("root", "eager"),
        ("experts", "eager"),
        ("experts", "compiled_fsdp"),
    ),
)
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


class Spare(nn.Module):
    """Some layers are never called, and one's output is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare, self.aside = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = torch.tanh(self.blocks[0](x))  # the second block is a unit that is never called
        self.aside(x)
        y = self.blocks[2](x)
        del y  # a unit whose output nobody uses
        return self.head(x)


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("root_only", [False, pytest.param(True, marks=pytest.mark.more)])
def test_unused_modules_have_no_gradient(rank, world_size, way, root_only):
    """None, as FSDP2, in units of their own and in the root's."""

    def build(function: Sharding) -> nn.Module:
        return function(seeded(Spare)) if root_only else shard(seeded(Spare), function)

    expected = train(build(torch_fully_shard))
    unused = {name for name, grad in expected.gradients[0].items() if grad is None}
    assert {name.rsplit(".", 1)[0] for name in unused} == {"blocks.1", "blocks.2", "spare", "aside"}
    assert_same(train(WAYS[way](build(fully_shard))), expected)


class TwoHeads(nn.Module):
    """Returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(x))
        return self.heads[0](x), self.heads[1](x)


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("units", [True, pytest.param(False, marks=pytest.mark.more)])
def test_unused_outputs(rank, world_size, way, units):
    """The head whose output is not in the loss has no gradient. Compiled it has zeros, as with torch.compile of any
    model."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def build(function: Sharding) -> nn.Module:
        model = seeded(TwoHeads)
        for head in model.heads if units else ():
            function(head)
        return function(model)

    def step(run: nn.Module, index: int) -> torch.Tensor:
        loss = run(x)[index % 2].square().mean()
        loss.backward()
        return loss.detach()

    expected = train(build(torch_fully_shard), step, steps=1)
    assert expected.gradients[0]["heads.1.weight"] is None
    if way == "compiled_fsdp":
        plain = seeded(TwoHeads)
        step(torch.compile(plain, backend="aot_eager"), 0)
        for name, param in plain.heads[1].named_parameters():
            expected.gradients[0][f"heads.1.{name}"] = param.grad
            assert not param.grad.any()
    actual = train(WAYS[way](build(fully_shard)), step, steps=1)
    assert_same(Record(actual.losses, actual.gradients, [{}]), Record(expected.losses, expected.gradients, [{}]))


class TwoOutputs(nn.Module):
    """The sum of one head's results is a loss; the other head's are looked at."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


@distributed(world_size=2)
def test_gradients_of_an_output_that_is_not_used(rank, world_size):
    """None as FSDP2's, but zeros where one compiled graph has both outputs, as plain models have them under
    torch.compile."""

    def unused_gradients(model, run):
        run(torch.ones(2, 8) + rank)[0].sum().backward()
        assert model.used.weight.grad is not None
        return [param.grad for param in model.unused.parameters()]

    theirs, plain = torch.distributed.fsdp.fully_shard(TwoOutputs()), TwoOutputs()
    eager, sharded = fully_shard(TwoOutputs()), fully_shard(TwoOutputs())
    assert unused_gradients(theirs, theirs) == unused_gradients(eager, eager) == [None, None]
    for model, run in ((plain, torch.compile(plain, backend="aot_eager")), (sharded, compiled(sharded))):
        assert all(grad is not None and not grad.any() for grad in unused_gradients(model, run))
