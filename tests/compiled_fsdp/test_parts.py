"""A model compiled part by part: block by block, in either order with sharding, and beside other models."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compiler import backend
from tests.harness import (
    Transformer,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
)
from tests.harness.models import small, without_attention

Sharding = Callable[..., nn.Module]

Backend = dict[str, Any]

BACKEND: Backend = {"backend": "compiled_fsdp", "options": {"codegen": "aot_eager"}}
BY_UNIT: Backend = {"backend": "compiled_fsdp", "options": {"codegen": "aot_eager", "bucket": "module"}}  # for counting


def compile_then_shard(block: nn.Module, function: Sharding, backend: Backend = BY_UNIT) -> nn.Module:
    block.compile(**backend)
    return function(block)


def shard_then_compile(block: nn.Module, function: Sharding, backend: Backend = BY_UNIT) -> nn.Module:
    function(block).compile(**backend)
    return block


# What becomes of each block. Torch's own FSDP2 is not compiled: it is what the results are compared with.
ORDERS: dict[str, Callable[[nn.Module, Sharding], nn.Module]] = {
    "block.compile(), fully_shard(block)": compile_then_shard,
    "fully_shard(block), block.compile()": shard_then_compile,
    "fully_shard(torch.compile(block))": lambda block, function: function(torch.compile(block, **BY_UNIT)),
    "torch.compile(fully_shard(block))": lambda block, function: torch.compile(function(block), **BY_UNIT),
    "fully_shard(wrapper(block)).compile()": lambda block, function: shard_then_compile(
        checkpoint_wrapper(block), function
    ),
    "wrapper(block).compile(), fully_shard": lambda block, function: compile_then_shard(
        checkpoint_wrapper(block), function
    ),
    "wrapper(fully_shard(block)).compile()": lambda block, function: compile_then_shard(
        checkpoint_wrapper(function(block)), lambda module: module
    ),
    "fully_shard(wrapper(torch.compile(block)))": lambda block, function: function(
        checkpoint_wrapper(torch.compile(block, **BY_UNIT))
    ),
    "wrapper(fully_shard(torch.compile(block)))": lambda block, function: checkpoint_wrapper(
        function(torch.compile(block, **BY_UNIT))
    ),
    "fully_shard(torch.compile(wrapper(block)))": lambda block, function: function(
        torch.compile(checkpoint_wrapper(block), **BY_UNIT)
    ),
}


def by_block(order: str, function: Sharding) -> nn.Module:
    model = small(blocks=2)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = ORDERS[order](block, function)
    return function(model)


def assert_blocks_communicate_in_their_graphs(model: nn.Module, blocks: int = 2) -> None:
    """Every parameter of a block is gathered and reduced by a compiled graph, and no graph gathers more than once."""
    graphs = explain(model).graphs
    assert graphs
    read = {read.name.split("blocks.")[-1] for graph in graphs for read in graph.reads}
    names = {name.removeprefix("blocks.0.") for name, _ in small().named_parameters() if "blocks.0." in name}
    seen = {next((name for name in names if got.endswith(name)), got) for got in read}
    assert seen == names, seen ^ names
    for graph in graphs:
        assert graph.count("gather") == 1, str(explain(model))
        assert graph.count("reduce") == (graph.phase == "backward"), str(explain(model))
    phases = [graph.phase for graph in graphs]
    assert phases.count("forward") == phases.count("backward") <= blocks


@distributed(world_size=2)
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_compiled_one_by_one(rank, world_size, order):
    model = by_block(order, fully_shard)
    assert_same(train(model, steps=2), fsdp2_record(small(blocks=2), steps=2))
    assert_blocks_communicate_in_their_graphs(model)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("order", [compile_then_shard, shard_then_compile])
@pytest.mark.parametrize("backend", [BACKEND, BY_UNIT], ids=["auto", "module"])
def test_equal_blocks_share_their_code(rank, world_size, order, backend):
    """The number of compiles does not grow with the number of layers. The first layer's is one more, as its input
    comes from the embedding."""
    counters.clear()
    model = small(blocks=5)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = order(block, fully_shard, backend)
    fully_shard(model)
    assert_same(train(model, steps=1), fsdp2_record(small(blocks=5), steps=1))
    assert counters["stats"]["unique_graphs"] <= 2
    assert len(explain(model).graphs) <= 4


@distributed(world_size=2, reset=True)
def test_a_few_blocks_compiled(rank, world_size):
    """The others, and the root, run uncompiled beside them."""
    model = shard(small(blocks=3), fully_shard)
    model.blocks[1].compile(**BACKEND)
    assert_same(train(model), fsdp2_record(small(blocks=3)))
    graphs = explain(model).graphs
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    assert {read.name.rsplit("blocks.", 1)[1][0] for graph in graphs for read in graph.reads} == {"1"}


@distributed(world_size=2)
def test_blocks_compiled_in_a_compiled_model(rank, world_size):
    """Compiled twice over is compiled once."""
    model = by_block("block.compile(), fully_shard(block)", fully_shard)
    assert_same(train(compiled(model, bucket="module")), fsdp2_record(small(blocks=2)))
    assert [graph.phase for graph in explain(model).graphs] == ["forward", "backward"]
    assert [graph.count("gather") for graph in explain(model).graphs] == [3, 2]


@distributed(world_size=2)
def test_blocks_compiled_with_the_root_alone_sharded(rank, world_size):
    """A compiled block of a unit that is larger."""
    model = small(blocks=2)
    for block in model.blocks:
        block.compile(**BY_UNIT)
    fully_shard(model, reshard_after_forward=True)
    assert_same(train(model, steps=2), train(torch_fully_shard(small(blocks=2)), steps=2))
    assert_blocks_communicate_in_their_graphs(model)


class Numbered(nn.Linear):
    """A layer that knows its number, and computes with it, behind a graph break."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(8, 8)
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.layer_idx + 1)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Numbered(i) for i in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


@distributed(world_size=1, reset=True)
def test_layers_that_differ_in_an_integer(rank, world_size):
    """A warning names the attribute, once, and what it says helps."""
    x = torch.ones(2, 8, requires_grad=True)
    with mock.patch.object(backend, "_warned_attributes", set()), TestCase().assertLogs(backend.log, "WARNING") as logs:
        compiled(fully_shard(Layers()))(x).sum().backward()
    assert len(logs.output) == 1, logs.output
    assert "layer_idx" in logs.output[0]
    assert "allow_unspec_int_on_nn_module" in logs.output[0]

    torch.compiler.reset()
    model = fully_shard(Layers())
    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
        TestCase().assertNoLogs(backend.log, "WARNING"),
    ):
        compiled(model)(x).sum().backward()
    assert len(explain(model).graphs) <= 4


# ---- several models --------------------------------------------------------------------------------------------------
@distributed(world_size=2)
def test_models_that_take_turns(rank, world_size):
    """Two of one class, one of another shape, one by block; each keeps its own parameters, gradients and plan."""
    group = DeviceMesh.from_group(dist.new_group(), "cpu")
    builds: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], dict]] = [
        (small, compiled, {}),
        (partial(small, seed=1), compiled, {"reshard_after_forward": False}),
        (partial(small, blocks=2), partial(compiled, bucket="none"), {}),
        (partial(small, seed=2), compiled, {"mesh": group}),
        (partial(small, seed=3), lambda model: model, {}),
    ]
    ours, theirs = [], []
    for build, way, options in builds:
        model = shard(build(), fully_shard, **options)
        ours.append((way(model), torch.optim.AdamW(model.parameters(), lr=0.01)))
        reference = fsdp2(build(), **options)
        theirs.append((reference, torch.optim.AdamW(reference.parameters(), lr=0.01)))
    for _ in range(2):
        for (mine, step), (reference, their_step) in zip(ours, theirs, strict=True):
            assert_same(train(mine, steps=1, optimizer=step), train(reference, steps=1, optimizer=their_step))


class Pair(nn.Module):
    """Two sharded models in one graph, one behind the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens).argmax(-1)) + self.first(tokens)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp", pytest.param("by unit", marks=pytest.mark.more)])
def test_a_model_of_models(rank, world_size, way):
    """Two roots, neither inside a sharded module, in one compiled graph; the first one runs twice."""

    def build(function: Sharding) -> nn.Module:
        return Pair(shard(small(blocks=2), function), shard(small(1), function))

    model = build(fully_shard)
    run = {
        "eager": lambda: model,
        "compiled_fsdp": lambda: compiled(model),
        "by unit": lambda: compiled(model, bucket="module"),
    }
    assert_same(train(run[way](), steps=2), train(build(torch_fully_shard), steps=2), rtol=1e-5)
    if way == "by unit":
        assert explain(model).graphs[0].count("gather") == 5


@pytest.mark.more
@distributed(world_size=2)
def test_teacher_and_student(rank, world_size):
    """A frozen model under no_grad inside another one's training step."""

    def step(teacher: nn.Module, student: nn.Module, index: int) -> torch.Tensor:
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(rank + 10 * index))
        with torch.no_grad():
            target = teacher(tokens).softmax(-1)
        loss = nn.functional.cross_entropy(student(tokens).flatten(0, 1), target.flatten(0, 1))
        loss.backward()
        return loss.detach()

    records = []
    for function, way in ((fully_shard, compiled), (torch_fully_shard, lambda model: model)):
        teacher = way(shard(small(1, blocks=2), function))
        student = shard(small(blocks=2), function)
        records.append(train(way(student), partial(step, teacher), steps=3))
        assert all(param.grad is None for param in teacher.parameters())
    assert_same(*records)


# ---- graph breaks between units --------------------------------------------------------------------------------------
class Breaking(Transformer):
    """A graph break before each block, behind the last one, or both, of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__(dim=16, blocks=3)
        self.kind = kind
        without_attention(self)

    def step_aside(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "graph_break":
            torch._dynamo.graph_break()
        elif self.kind == "item" and x.detach().abs().max().item() > 1e9:
            x = x / 2
        elif self.kind == "disabled":
            x = aside(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(self.step_aside(x))
        return self.head(self.norm(self.step_aside(x)))


@torch.compiler.disable
def aside(x: torch.Tensor) -> torch.Tensor:
    return x * 1


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "reshard_after_forward"),
    [("graph_break", True), ("graph_break", False), ("item", None), ("disabled", None)],
)
def test_breaks_between_units(rank, world_size, kind, reshard_after_forward):
    """The results, and that each break has its line. Of equal blocks at most two graphs each way are compiled."""
    options = {"reshard_after_forward": reshard_after_forward}
    model = shard(Breaking(kind), fully_shard, **options)
    assert_same(train(compiled(model), steps=2), fsdp2_record(Breaking(kind), **options, steps=2))
    explanation = explain(model)
    assert explanation.graph_breaks
    assert all(__file__ in where for _, where in explanation.graph_breaks)
    of_blocks = [g for g in explanation.graphs if any("down" in read.name for read in g.reads)]
    assert 2 <= len(of_blocks) <= 4, str(explanation)


@distributed(world_size=2)
def test_two_forwards_of_broken_graphs_and_one_backward(rank, world_size):
    """Each forward's gradients are reduced, then added; FSDP2 adds first, so rounding differs."""

    def step(model, index):
        loss = loss_of(model, rank, index) * loss_of(model, rank, index + 7)
        loss.backward()
        return loss.detach()

    def sgd(model):  # AdamW makes much of the rounding of a gradient that is nearly zero
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, reference = shard(Breaking("graph_break"), fully_shard), fsdp2(Breaking("graph_break"))
    expected = train(reference, step, steps=2, optimizer=sgd(reference))
    assert_same(train(compiled(model), step, steps=2, optimizer=sgd(model)), expected, rtol=1e-5)
    assert explain(model).graph_breaks


@distributed(world_size=2)
def test_a_block_that_does_not_compile(rank, world_size):
    """The compiler is off for one of three."""

    class Disabled(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
            x = torch.compiler.disable(self.blocks[1])(self.blocks[0](x))
            return self.head(self.norm(self.blocks[2](x)))

    model = shard(small(blocks=3, cls=Disabled), fully_shard)
    assert_same(train(compiled(model), steps=2), fsdp2_record(small(blocks=3, cls=Disabled), steps=2))
    assert {read.name.split(".")[1] for g in explain(model).graphs for read in g.reads if "block" in read.name} == {
        "0",
        "2",
    }


@distributed(world_size=2)
def test_forward_of_a_part_alone(rank, world_size):
    """A block's own forward under `torch.compile`, outside of the model's."""
    model, reference = shard(small(blocks=2), fully_shard), fsdp2(small(blocks=2))
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(rank))
    for block, theirs in zip(model.blocks, reference.blocks, strict=True):
        out = torch.compile(block, **BACKEND)(x)
        expected = theirs(x)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        for (name, param), other in zip(block.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), other.grad.full_tensor()), name
    assert model.head.weight.grad is None
    forward_backward(compiled(model), 0)
