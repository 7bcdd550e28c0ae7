"""A model compiled block by block, in either order with sharding."""

from collections.abc import Callable
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.base import logs as once
from compiled_fsdp.compiler import unintended
from tests.harness import (
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    shard,
    train,
    variants,
)
from tests.harness.models import small
from tests.harness.reference import Sharding, assert_same_gradients

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


QUICK = [
    *(order for order in ORDERS if "wrapper" not in order),
    "wrapper(block).compile(), fully_shard",
    "wrapper(fully_shard(torch.compile(block)))",
]


@distributed(world_size=2)
@pytest.mark.parametrize("order", variants(ORDERS, *QUICK))
def test_blocks_compiled_one_by_one(rank, world_size, order):
    model = by_block(order, fully_shard)
    assert_same(train(model, steps=2), fsdp2_record(small(blocks=2), steps=2))
    assert_blocks_communicate_in_their_graphs(model)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("order", variants([compile_then_shard, shard_then_compile], compile_then_shard))
@pytest.mark.parametrize("backend", variants([BACKEND, BY_UNIT], BACKEND), ids=["auto", "module"])
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
    """A layer that knows its number, and computes with it, after a graph break."""

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
    with mock.patch.object(once, "_logged", set()), TestCase().assertLogs(unintended.log, "WARNING") as logs:
        compiled(fully_shard(Layers()))(x).sum().backward()
    assert len(logs.output) == 1, logs.output
    assert "layer_idx" in logs.output[0]
    assert "allow_unspec_int_on_nn_module" in logs.output[0]

    torch.compiler.reset()
    model = fully_shard(Layers())
    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
        TestCase().assertNoLogs(unintended.log, "WARNING"),
    ):
        compiled(model)(x).sum().backward()
    assert len(explain(model).graphs) <= 4


@pytest.mark.more
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
        assert_same_gradients(block, theirs)
    assert model.head.weight.grad is None
    forward_backward(compiled(model), 0)
