"""A part of a unit called by itself: the error names the parameter, and both ways out work."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp import fully_shard, register_fsdp_forward_method
from tests.harness import assert_same, compiled, distributed, train


class Model(nn.Module):
    """An encoder in front of it, which trainers call by itself."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
            self.unit = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            self.head = nn.Linear(8, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.unit(x))


def sharded(*more: str, by=fully_shard) -> Model:
    model = Model()
    for name in ("unit", *more):
        by(getattr(model, name))
    return by(model)


X = torch.arange(8.0).reshape(2, 4)
H = torch.arange(16.0).reshape(2, 8)
ALONE = {
    "encoder": (
        lambda model: model.encoder,
        X,
        r"'encoder\.0\.\w+' is sharded here, because model\.encoder was called",
    ),
    "method": (lambda model: model.encode, X, r"'encoder\.0\.\w+' is sharded here, because model\.encoder was called"),
    "layer": (lambda model: model.encoder[2], H, r"'encoder\.2\.\w+' .* model\.encoder\[2\] was called by itself"),
    "of a unit": (lambda model: model.unit[1], H, r"'unit\.1\.\w+' .* model\.unit\[1\] .* a forward of Sequential"),
}


@distributed(world_size=2)
@pytest.mark.parametrize("part", ALONE)
def test_the_error(rank, world_size, part):
    choose, x, says = ALONE[part]
    says = rf"{says}.*fully_shard\(model.*register_fsdp_forward_method\("
    model = sharded()
    choices = {
        "eager": choose(model),
        "compiled": torch.compile(choose(model), backend="compiled_fsdp", options={"codegen": "aot_eager"}),
        "whole": torch.compile(
            choose(model), backend="compiled_fsdp", fullgraph=True, options={"codegen": "aot_eager"}
        ),
    }
    for way, called in choices.items():
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(Exception, match=says) as error:
                called(x)
            assert isinstance(error.value, RuntimeError), way
    # the model is as it was
    assert_same(train(compiled(model), step, steps=1), train(sharded(by=torch_fully_shard), step, steps=1))


class HasPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


class CallsFeatures(nn.Module):
    def __init__(self, model: HasPosition) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.features(x)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_method_that_reads_the_units_own_parameter(rank, world_size, way):
    """No unit of its own could help: the module is one."""
    outer = CallsFeatures(fully_shard(HasPosition()))
    run = compiled(outer) if way == "compiled" else outer
    says = r"'position' is sharded here, because a method of HasPosition was called outside of its forward"
    with pytest.raises(RuntimeError, match=rf"{says}.*register_fsdp_forward_method\(") as error:
        run(X)
    assert "fully_shard(" not in str(error.value).partition("Torch says")[0]
    register_fsdp_forward_method(outer.model, "features")
    assert torch.equal(run(X), X + 1)


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(H + index).square().mean()
    loss.backward()
    return loss.detach()


def step_of_both(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(model.encode(X + index)).square().mean()
    loss.backward()
    return loss.detach()


@distributed(world_size=2)
@pytest.mark.parametrize("way_out", ["unit", "method", "unshard"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_ways_out(rank, world_size, way, way_out):
    """As the model without sharding: FSDP2 wants the root's forward first."""
    options = {"backend": "compiled_fsdp", "options": {"codegen": "aot_eager"}}
    model = sharded(*["encoder"] * (way_out == "unit"))
    if way_out == "method":
        register_fsdp_forward_method(model, "encode")
    if way == "compiled":
        model.compile(**options)
        model.encode = torch.compile(model.encode, **options)

    def run(each, index):
        if way_out == "unshard":
            each.unshard()
        return step_of_both(each, index)

    assert_same(train(model, run, steps=2), train(Model(), step_of_both, steps=2))


class Looks(nn.Linear):
    """Its forward looks at its DTensors, and computes with them as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, DTensor):
            assert self.weight.shape == (8, 4)
            assert self.weight.placements == (Shard(0),)
            assert self.bias.requires_grad
            assert self.bias.dtype is x.dtype
            assert self.weight.device == x.device
            penalty = self.weight.square().sum() + self.bias.square().sum()
            full = self.weight.full_tensor()
            return x @ full.t() + self.bias.full_tensor() + penalty.full_tensor()
        return super().forward(x)


@distributed(world_size=2)
def test_looks_are_no_mistake(rank, world_size):
    """Whoever computes with DTensors may, with gradients and in place, in a forward and outside."""
    grads = []
    for by in (torch_fully_shard, fully_shard):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = by(nn.Sequential(Looks(4, 8), nn.Linear(8, 2)))
        out = model[0](X)
        out.sum().backward()
        with torch.no_grad():
            model[0].weight.mul_(2)
            average = model[0].weight.clone().lerp_(model[0].weight, 0.5)
            nn.init.ones_(model[0].bias)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inputs = DTensor.from_local(torch.ones(2, 8), model[1].weight.device_mesh, run_check=False)
        grads.append([out, average.full_tensor(), model[1](inputs).full_tensor()])
        grads[-1] += [p.grad.full_tensor() for p in model[0].parameters()] + [
            p.full_tensor() for p in model.parameters()
        ]
        assert type(model[0].weight) is DTensor
        assert any(p is model[0].weight for p in model.parameters())
    for mine, theirs in zip(*reversed(grads), strict=True):
        assert torch.equal(mine, theirs)


@distributed(world_size=2)
def test_in_steps_of_the_model_nobody_asks(
    rank,
    world_size,
):
    """It costs nothing where the model's own forward runs, or none: the stack is looked through by nobody."""
    from unittest import mock

    from compiled_fsdp.frontend import called_alone

    class Outer(Model):
        def forward(self, x):
            return super().forward(x.to(self.unit[0].weight.dtype))  # of another unit, which is closed

    model = Outer()
    fully_shard(model.unit)
    fully_shard(model)
    with mock.patch.object(called_alone, "_is_in", side_effect=AssertionError("asked")):
        for run in (model, compiled(model)):
            train(run, step, steps=1)
    assert type(model.unit[0].weight) is DTensor
