"""torchao on sharded models: optimizers of few bits, fake quantization, float8, frozen weights in int8."""

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.clients import recipe
from tests.harness import WAYS, Transformer, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, ways
from tests.harness.extensions import assert_all_equal, train_locally

pytestmark = pytest.mark.more
torchao = pytest.importorskip("torchao")
from tests.clients import quantized  # noqa: E402


def run(number: int, *, replaced: tuple[str, str] | None = None, **names: object) -> dict[str, object]:
    """The page's block of that number, in a namespace of these names, which is returned."""
    text = recipe("torchao", number)
    if replaced is not None:
        assert replaced[0] in text
        text = text.replace(*replaced)
    exec(compile(text, "ecosystem.md", "exec"), names)
    return names


def assert_planned(model: nn.Module) -> None:
    assert len(explain(model).graphs) == 2, explain(model)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@distributed(world_size=2)
def test_optimizers(rank, world_size, name):
    """Their states are DTensors of few bits where a shard is large enough for it."""

    import torchao.optim

    def build(shard_by: Callable) -> nn.Module:
        return shard(Transformer(dim=64, blocks=1), shard_by)

    model, theirs = build(fully_shard), build(torch_fully_shard)
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, options={"codegen": "aot_eager"})):
        names = run(0, replaced=("AdamW8bit", name), model=model, torch=torch)
    optimizer = names["optimizer"]
    assert type(optimizer).__name__ == name
    expected = train(theirs, optimizer=getattr(torchao.optim, name)(theirs.parameters(), lr=1e-3))
    assert_same(train(names["compiled"], optimizer=optimizer), expected)
    states = {type(state["exp_avg"].to_local()).__name__ for state in optimizer.state.values()}
    assert len(states) == 2, states
    assert_planned(model)


@distributed(world_size=2)
def test_fake_quantization(rank, world_size):
    model = shard(run(1, model=Transformer())["model"], fully_shard)
    assert sum(type(module).__name__ == "FakeQuantizedLinear" for module in model.modules()) == 13
    assert_same(train(compiled(model)), train(fsdp2(run(1, model=Transformer())["model"])))
    if torch.__version__ >= "2.13":  # before, Dynamo breaks the graph in torchao's fake quantization
        assert_planned(model)


@pytest.mark.parametrize("recipe_name", ["tensorwise", "rowwise"])
@distributed(world_size=2, reset=True)  # what broke the graph before is remembered
def test_float8(rank, world_size, recipe_name):
    """Emulated, since the CPU has no matrix products in float8."""
    config = "dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe_name), emulate=True)"

    def build(shard_by: Callable) -> nn.Module:
        given = {"model": Transformer().to(torch.bfloat16), "dataclasses": dataclasses, "recipe_name": recipe_name}
        model = run(2, replaced=("Float8LinearConfig()", config), **given)["model"]
        assert type(model.blocks[0].up).__name__ == "Float8Linear"
        return shard(model, shard_by)

    model = build(fully_shard)
    assert_same(train(compiled(model)), train(build(torch_fully_shard)))
    assert_planned(model)


@ways
@pytest.mark.parametrize("precomputed", [False, True])
@distributed(world_size=2, reset=True)
def test_float8_gathers(rank, world_size, precomputed, way):
    """Each unit has something in bfloat16, too, so FSDP2 sends bytes: gloo knows no float8. Rows have to divide."""

    def trained(shard_by: Callable, make: Callable = lambda model: model) -> tuple[nn.Module, list[torch.Tensor]]:
        given = {"model": Transformer(blocks=1, vocabulary=64).to(torch.bfloat16)}
        names = run(3, replaced=("gather=True", "gather=True, emulate=True"), **given)
        model, scales = shard(names["model"], shard_by), names["precompute_float8_dynamic_scale_for_fsdp"]
        after = (lambda: scales(model)) if precomputed else lambda: None
        return model, train_locally(model, make(model), after=after)

    model, ours = trained(fully_shard, WAYS[way])
    assert_all_equal(ours, trained(torch_fully_shard)[1])
    assert type(model.head.weight.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
    if way == "compiled_fsdp":
        graph = explain(model).graphs[0]
        assert explain(model).graph_breaks == ()
        assert "torch.uint8" in graph.planned


@ways
@pytest.mark.parametrize("kind", quantized.KINDS)
@distributed(world_size=2)
def test_quantized_weights_are_sharded(rank, world_size, kind, way):
    def trained(model: nn.Module, run: nn.Module) -> list[torch.Tensor]:
        # that of int8 weights knows a few operations, and rounds at random
        adam = functools.partial(torch.optim.Adam, foreach=False) if "Int8Q" in kind else torch.optim.AdamW
        optimizer = adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
        found = []
        for step in range(3):
            found.append(quantized.step_of(run, optimizer, step))
            found += [tensor for param in model.parameters() for tensor in quantized.held(param)]
        return found

    model, theirs = (quantized.sharded(kind, shard_by) for shard_by in (fully_shard, torch_fully_shard))
    assert any(type(param.to_local()).__name__ == kind for param in model.parameters())
    assert_all_equal(trained(model, WAYS[way](model)), trained(theirs, theirs))
    if way == "compiled_fsdp":
        assert_planned(model)


@distributed(world_size=2)
def test_frozen_int8_weights(rank, world_size):
    """Whole on each rank; what trains is sharded. Without ignored_params they are refused, by FSDP2 as well."""

    def build(shard_by: Callable) -> nn.Module:
        return run(4, model=Transformer(), fully_shard=shard_by, nn=nn)["model"]

    def trained(model: nn.Module, outer: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        losses = []
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for step in range(3):
            losses.append(loss_of(outer, rank, step))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses], [parameter.full_tensor() for parameter in parameters]

    model, theirs = build(fully_shard), build(torch_fully_shard)
    assert type(model.head.weight.data).__name__ == "Int8Tensor"
    for ours, expected in zip(trained(model, compiled(model)), trained(theirs, theirs), strict=True):
        assert len(ours) == len(expected) > 2
        assert all(map(torch.equal, ours, expected))
    assert_planned(model)

    with pytest.raises(NotImplementedError, match=r"is a Int8Tensor, a tensor that is made.*ignored_params"):
        build(lambda model, ignored_params: fully_shard(model))
    with pytest.raises(NotImplementedError, match="Int8Tensor dispatch"):
        build(lambda model, ignored_params: torch_fully_shard(model))
