"""Copies of modules inside of a unit: what FSDP2 gives, a module that belongs to no unit."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compiled_fsdp import fully_shard
from tests.harness import assert_same, compiled, distributed, train
from tests.harness.reference import full


class Model(nn.Module):
    """A body with tied layers, buffers and a parametrization, and a head that knows it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.body = nn.Sequential(self.first, nn.BatchNorm1d(5), self.second)
            self.norm = parametrizations.weight_norm(nn.Linear(5, 5))
            self.unit, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.head.of = [self]  # a list, so that it is no module inside
        self.head.itself = [self.head]
        self.head.table = dict.fromkeys(range(1000), "entry")
        self.head.register_state_dict_post_hook(lambda *_: None)
        self.head.n_hooks, self.head._fsdp_wrap = 2, True  # names that are the user's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.unit(self.norm(self.body(x))).tanh())


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.arange(20.0).reshape(4, 5) / (index + 1)).square().mean()
    loss.backward()
    return loss.detach()


def sharded(by) -> Model:
    model = Model()
    del model.head.of
    by(model.unit)
    return by(model)


def described(module: nn.Module) -> list:
    return [
        (name, type(tensor), getattr(tensor, "placements", None), tensor.shape, tensor.requires_grad, tensor.is_leaf)
        for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    ]


def assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    """Classes, tensors and what state_dict() gives."""
    # parametrize makes a class for each module
    assert [type(m).__qualname__ for m in mine.modules()] == [type(m).__qualname__ for m in theirs.modules()]
    assert described(mine) == described(theirs), (described(mine), described(theirs))
    state, other = mine.state_dict(), theirs.state_dict()
    assert list(state) == list(other)
    for name, value in state.items():
        assert torch.equal(full(value), full(other[name])), name


INSIDE = ["head", "body", "norm", "first"]


@distributed(world_size=2)
@pytest.mark.parametrize("state", ["sharded", "unshard()"])
def test_deepcopy(rank, world_size, state):
    """With DTensors, or, where parameters are full, with full ones: then it is a module that runs."""
    model, other = sharded(fully_shard), sharded(torch_fully_shard)
    x = torch.arange(10.0).reshape(2, 5)
    for name in INSIDE:
        for each in (model, other) if state == "unshard()" else ():
            each.unshard()  # state_dict() has resharded: FSDP2's copies have its hooks, and reshard the original
        mine, theirs = (copy.deepcopy(each.get_submodule(name)) for each in (model, other))
        assert_equal(mine, theirs)
        if name == "body":
            assert mine[0].weight is mine[2].weight
        if name == "head":
            assert mine.itself == [mine]
            assert mine.table == model.head.table
            assert len(mine._state_dict_hooks) == 1
        if state == "unshard()":
            results = mine(x), theirs(x)
            for result in results:
                result.sum().backward()
            assert torch.equal(*results)
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
            assert_same(train(fully_shard(mine), step, steps=1), train(torch_fully_shard(theirs), step, steps=1))
        before = {key: full(value).clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for p in mine.parameters():
                p.zero_()
        for key, value in model.state_dict().items():
            assert torch.equal(full(value), before[key]), key
    for each in (model, other):
        each.reshard()
    assert_same(train(model, step, steps=1), train(other, step, steps=1))


@distributed(world_size=2)
def test_deepcopy_after_a_step(rank, world_size):
    """Without gradients, as plain modules are copied; FSDP2's DTensors with gradients cannot be copied (torch 2.13)."""
    model, plain = sharded(fully_shard), Model()
    for each in (model, plain):
        train(each, step, steps=1)
    made = copy.deepcopy(model.body)
    assert all(isinstance(p, DTensor) and p.grad is None for p in made.parameters())
    for mine, other in zip(made.state_dict().values(), plain.body.state_dict().values(), strict=True):
        assert torch.equal(full(mine), other)
    made.load_state_dict(model.body.state_dict())


@distributed(world_size=2)
def test_averaged_model(rank, world_size):
    averages = []
    for by in (fully_shard, torch_fully_shard):
        model = sharded(by)
        average = AveragedModel(model.body, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            train(model, step, steps=1, optimizer=optimizer)
            model.reshard()
            average.update_parameters(model.body)
        averages.append(average)
    assert_equal(*averages)


@distributed(world_size=2)
def test_copies_that_refer_to_units(rank, world_size):
    model = Model()
    fully_shard(model)
    with pytest.raises(RuntimeError, match="sharded Model cannot be deep-copied"):
        copy.deepcopy(model.head)  # which has the model in a list


@distributed(world_size=2)
def test_a_class_that_was_changed_since(rank, world_size):
    model = sharded(fully_shard)
    parametrize.register_parametrization(model.head, "weight", nn.Identity())
    for copying in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match=r"ParametrizedLinear cannot be .* changed after fully_shard"):
            copying(model.head)
    parametrize.remove_parametrizations(model.head, "weight")
    assert type(copy.deepcopy(model.head)) is nn.Linear


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
def test_shallow_copy(rank, world_size, way):
    """Another module with the same parameters, which is told of what changes."""
    results = []
    for by in (torch_fully_shard, fully_shard):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = by(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
        model[2] = copy.copy(model[2])
        assert model[2].weight.placements == model[0].weight.placements
        run = compiled(model) if way == "compiled_fsdp" and by is fully_shard else model
        for index, syncs in enumerate([True, False, True]):
            model.set_requires_gradient_sync(syncs)
            step(run, index)
        results.append({name: full(p.grad) for name, p in model.named_parameters()})
    for name, grad in results[0].items():
        assert torch.equal(results[1][name], grad), name


@distributed(world_size=2)
def test_values_in_the_place_of_parameters(rank, world_size):
    """A parameter that the user has deleted, and an attribute of a parameter that refers to its module."""
    model = sharded(fully_shard)
    del model.head.bias
    model.head.bias = torch.arange(3.0)
    model.head.weight.owner = model.head
    made = copy.deepcopy(model.head)
    assert (made.n_hooks, made._fsdp_wrap) == (2, True)
    assert torch.equal(made.bias, torch.arange(3.0))
    assert not any(name.startswith("_fsdp_other") for name in vars(made))
    assert made.weight.owner is made


@distributed(world_size=2)
def test_copies_that_are_gone_leave_nothing_behind(rank, world_size):
    model = sharded(fully_shard)
    for _ in range(5):
        copy.copy(model.head)
    parameter = model.head._fsdp_reads["weight"]
    assert len(parameter.places) <= 2
