"""`torch.compiler.nested_compile_region`: a repeated layer is traced once, and the plan is that of the whole graph."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions
from torch.compiler import nested_compile_region
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import compiled_autograd, explain, fully_shard
from compiled_fsdp.compiler.backend import compiled_fsdp
from tests.harness import assert_same, compiled, distributed, forward_backward, fsdp2_record, shard, train, variants
from tests.harness.models import Mlp, Transformer, batch, loss_of, small
from tests.harness.reference import assert_same_gradients

TRACED_ONCE = torch.__version__ >= "2.13"  # before, torch traces each call and compares the graphs


@nested_compile_region
def one(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


@nested_compile_region
def two(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return second(first(x))


@nested_compile_region
def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


@nested_compile_region
def outer(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return one(block, x)


class Whole(Mlp):
    """The region is all that the unit computes."""

    forward = nested_compile_region(Mlp.forward)


class Half(Mlp):
    """The region is a part of what the unit computes."""

    @nested_compile_region
    def think(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.think(self.norm2(x))


Layers = Callable[[Any, torch.Tensor], torch.Tensor]


def each(call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Layers:
    def layers(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = call(block, x)
        return x

    return layers


def pairs(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index in range(0, len(blocks), 2):
        x = two(blocks[index], blocks[index + 1], x)
    return x


plain = each(lambda block, x: block(x))
# Of what the blocks are, and how they are called.
REGIONS: dict[str, tuple[type[Mlp], Layers]] = {
    "around a unit": (Mlp, each(one)),
    "around two units": (Mlp, pairs),
    "all of a unit": (Whole, plain),
    "inside of a unit": (Half, plain),
    "in a region": (Mlp, each(outer)),
    "around a checkpoint": (Mlp, each(checkpointed)),
    "in a checkpoint": (Mlp, each(lambda block, x: checkpoint(one, block, x, use_reentrant=False))),
    "in a checkpointed unit": (Whole, each(lambda block, x: checkpoint(block, x, use_reentrant=False))),
}


class Nested(Transformer):
    """The transformer with one of the ``REGIONS``."""

    region = "around a unit"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(REGIONS[self.region][1](self.blocks, x)))


class Called(Transformer):
    """Two layers, called by a given function."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(dim=16)
        self.call = call

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def nested(region: str = "around a unit", blocks: int = 4) -> Nested:
    model = small(blocks=blocks, cls=Nested)
    model.region = region
    for block in model.blocks:
        block.__class__ = REGIONS[region][0]
    return model


def regions_called(model: nn.Module, **options: Any) -> tuple[nn.Module, list[str]]:
    """The compiled model, and a list to which a compile adds the name of each region that Dynamo's graph calls."""
    called: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                calls = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
                called.extend(str(call.args[1]) for call in calls)
        return compiled_fsdp(gm, inputs, options={"codegen": "aot_eager", **options})

    return torch.compile(model, backend=backend, fullgraph=True), called


def plans(model: nn.Module) -> list[tuple[str, str]]:
    return [(graph.phase, graph.plan.to_json()) for graph in explain(model).graphs]


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("region", variants(REGIONS, "around a unit", "in a checkpoint"))
def test_regions_and_units(rank, world_size, region):
    """One graph of a layer in Dynamo's graph, and FSDP2's results."""
    blocks = 4 if region == "around two units" else 2
    run, called = regions_called(shard(nested(region, blocks), fully_shard))
    assert_same(train(run, steps=2), fsdp2_record(small(blocks=blocks), steps=2))
    if "checkpoint" not in region:
        assert len(set(called)) < len(called)


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("units", [True, False], ids=["a unit for each layer", "the root alone"])
def test_the_plan_is_that_of_the_whole_graph(rank, world_size, units):
    records, found = [], []
    for build in (nested, small):
        model = build(blocks=2)
        model = shard(model, fully_shard) if units else fully_shard(model)
        records.append(train(compiled(model, fullgraph=True), steps=2))
        found.append([(graph.phase, graph.plan, graph.param_ids) for graph in explain(model).graphs])
    assert_same(*records)
    for (phase, plan, ids), (flat_phase, flat_plan, flat_ids) in zip(*found, strict=True):
        assert (phase, plan) == (flat_phase, flat_plan)
        assert len(ids) == len(flat_ids)


class Counted(Mlp):
    """A layer that counts how often Dynamo traces it."""

    traced = 0

    @staticmethod
    @torch.compiler.assume_constant_result
    def count() -> bool:
        Counted.traced += 1
        return True

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.count()
        return super().forward(x)


@distributed(world_size=1, reset=True)
@pytest.mark.parametrize("units", variants([True, False], False), ids=["a unit for each layer", "the root alone"])
def test_a_layer_is_traced_once(rank, world_size, units):
    model = small(blocks=6)
    for block in model.blocks:
        block.__class__ = Counted
    model = shard(model, fully_shard) if units else fully_shard(model)
    Counted.traced = 0
    forward_backward(compiled(model, fullgraph=True), 0)
    assert Counted.traced == (1 if TRACED_ONCE else 6)


def nothing(model: nn.Module) -> None:
    pass


def synchronized(model: nn.Module) -> None:
    model.set_requires_gradient_sync(True)


def freeze(model: nn.Module) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def not_synchronized(model: nn.Module) -> None:
    model.blocks[1].set_requires_gradient_sync(False)


# What makes the second of three layers another one, once the model is sharded.
DIFFERENCES: dict[str, Callable[[nn.Module], Any]] = {
    "a frozen parameter": freeze,
    "no gradient sync": not_synchronized,
    "unsharded": lambda model: model.blocks[1].unshard(),
    "a divisor": lambda model: model.blocks[1].set_gradient_divide_factor(4.0),
    "kept from forward to backward": lambda model: model.blocks[1].set_reshard_after_forward(False),
    "kept over microbatches": lambda model: model.blocks[1].set_reshard_after_backward(False, recurse=False),
    "evaluated": lambda model: model.blocks[1].eval(),
}


def trained(model: nn.Module, changes: Sequence[Callable[[nn.Module], Any]]) -> nn.Module:
    shard(model, fully_shard, reshard_after_forward=True)
    run = compiled(model, fullgraph=True)
    for step, change in enumerate(changes):
        change(model)
        forward_backward(run, step)
    return model


# The steps that are trained, by when the layer begins to differ. "For a step": then all layers reduce gradients again.
STEPS: dict[str, Callable[[Callable], list[Callable]]] = {
    "from the first step on": lambda change: [change],
    "later": lambda change: [nothing, change],
    "for a step": lambda change: [nothing, change, synchronized],
}


@distributed(world_size=1, reset=True)
@pytest.mark.parametrize(
    ("difference", "when"), variants(itertools.product(DIFFERENCES, STEPS), ("a frozen parameter", "later"))
)
def test_layers_that_differ(rank, world_size, difference, when):
    """A layer that differs, from the first step on or later, is traced anew: gradients are those without regions."""
    changes = STEPS[when](DIFFERENCES[difference])
    assert_same_gradients(*(trained(build(blocks=3), changes) for build in (nested, small)))


# How units are sharded, where that changes what is in a region.
SHARDED: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept": {"reshard_after_forward": False},
    "replicas": {"mesh": (2, 1)},
}


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("how", SHARDED)
def test_ways_to_shard(rank, world_size, how):
    options = dict(SHARDED[how])
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
    run, called = regions_called(shard(nested(blocks=2), fully_shard, **options))
    assert_same(train(run, steps=2), fsdp2_record(small(blocks=2), steps=2, **options))
    assert called == ["subgraph_0"] * 2


class Regions(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return each(one)(self, x)


@distributed(world_size=2, reset=True)
def test_a_region_that_comes_before_all_other_reads(rank, world_size):
    """Its trace asks whether a checkpoint runs the forward again, and that guard belongs to the whole frame."""
    torch.manual_seed(0)
    model = Regions(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.full((2, 4), 1.0 + rank)
    expected = model(x)
    assert torch.equal(compiled(model, fullgraph=True)(x), expected)


@pytest.mark.more
@distributed(world_size=1, reset=True)
def test_tied_layers(rank, world_size):
    """A parameter of two layers is gathered once, and its gradients are added."""
    models = [build(blocks=3) for build in (nested, small)]
    for model in models:
        for block in model.blocks[1:]:
            block.up.weight = model.blocks[0].up.weight
        forward_backward(compiled(fully_shard(model), fullgraph=True, collectives_at_world_size_1=True), 0)
    assert_same_gradients(*models)
    (forward, flat_forward) = (next(g for g in explain(m).graphs if g.phase == "forward") for m in models)
    assert len(forward.reads) == len(flat_forward.reads) == len(list(models[0].parameters()))


@pytest.mark.more
@distributed(world_size=1, reset=True)
def test_without_gradients_and_other_batch_sizes(rank, world_size):
    model, plain_model = shard(nested(blocks=3), fully_shard), small(blocks=3)
    run = compiled(model, fullgraph=True)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for size in (4, 3, 5):
            tokens, _ = batch(rank, size, size=size)
            with context():
                torch.testing.assert_close(run(tokens), plain_model(tokens), rtol=0, atol=0)


@pytest.mark.more
@distributed(world_size=1, reset=True)
def test_buffers_and_dropout(rank, world_size):
    """What a region writes, and the random numbers that it draws, are those of the graph without regions."""

    class Noisy(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return F.dropout(super().forward(x), 0.5) * self.calls

    models = [build(blocks=2) for build in (nested, small)]
    for model in models:
        for block in model.blocks:
            block.__class__ = Noisy
            block.register_buffer("calls", torch.zeros(()))
        run = compiled(shard(model, fully_shard), fullgraph=True)
        for step in range(2):
            torch.manual_seed(step)
            forward_backward(run, step)
        assert [block.calls.item() for block in model.blocks] == [2, 2]
    assert_same_gradients(*models)


@pytest.mark.more
@distributed(world_size=1, reset=True)
def test_compiled_autograd(rank, world_size):
    models = [shard(build(blocks=2), fully_shard) for build in (nested, small)]
    for model in models:
        loss = loss_of(compiled(model, fullgraph=True), rank, 0)
        with compiled_autograd(codegen="aot_eager"):
            loss.backward()
    assert_same_gradients(*models)


@distributed(world_size=1, reset=True)
def test_torchs_own_backend(rank, world_size):
    """It keeps the region's graph, reads and all. (Its Inductor's gradients are wrong, of the model unsharded, too.)"""
    model, plain_model = shard(nested(blocks=2), fully_shard), small(blocks=2)
    forward_backward(torch.compile(model, backend="aot_eager", fullgraph=True), 0)
    forward_backward(plain_model, 0)
    assert_same_gradients(model, plain_model)


@pytest.mark.more
@distributed(world_size=1, reset=True)
def test_inductor(rank, world_size):
    model, plain_model = shard(nested(blocks=2), fully_shard), small(blocks=2)
    forward_backward(compiled(model, codegen="inductor", fullgraph=True), 0)
    forward_backward(plain_model, 0)
    assert_same_gradients(model, plain_model, rtol=1e-4, atol=1e-6)


@distributed(world_size=1, reset=True)
def test_options_of_a_region_are_refused(rank, world_size):
    with torch._dynamo.config.patch(enable_invoke_subgraph_regional_compile=True):  # experimental
        region = nested_compile_region(lambda block, x: block(x), options=NestedCompileRegionOptions())
        run = compiled(fully_shard(Called(region)))
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="Leave its options out"):
                forward_backward(run, 0)
