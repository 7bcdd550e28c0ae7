"""``TrainStep(compile_update=True)``: the numbers of torch's compiled optimizer on plain tensors, in few graphs."""

import copy
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from compiled_fsdp import Muon, TrainStep, explain, fully_shard
from compiled_fsdp.optim import compiled
from compiled_fsdp.optim.compiled import CompiledUpdate
from compiled_fsdp.optim.local import BY_ELEMENT, local
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.tools.words import count, milliseconds
from tests.harness import distributed, shard
from tests.harness.checkpoints import state_of
from tests.harness.models import BUILD, batch, small
from tests.harness.reference import assert_equal, full
from tests.optim.test_train_step import AOT, OPTIMIZERS, Optimizer, cross_entropy, eager, two_groups


def compiled_by_torch(made: Optimizer) -> tuple[Optimizer, Callable[[], object]]:
    """An optimizer like ``made`` of its shards as plain tensors, with its state, and torch's compiled step of it."""
    plain = {param: local(param).detach() for group in made.param_groups for param in group["params"]}
    with_tensors = {"foreach": True, "fused": None, "capturable": True}
    groups = [
        {name: with_tensors.get(name, value) for name, value in group.items()}
        | {"params": [plain[param] for param in group["params"]]}
        for group in made.param_groups
    ]
    optimizer = type(made)(groups)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)
    for param, state in made.state.items():
        optimizer.state[plain[param]] = {name: local(value).clone() for name, value in state.items()}
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")

    def update() -> None:
        for group, given in zip(optimizer.param_groups, made.param_groups, strict=True):
            group["lr"].fill_(given["lr"])
        for param, tensor in plain.items():
            tensor.grad = local(param.grad)
        step()
        for param in plain:
            param.grad = None

    return optimizer, update


def assert_same_states(mine: Optimizer, other: Optimizer) -> None:
    """Compare the bits of this rank's shards and of their state."""
    pairs = zip(*([p for group in of.param_groups for p in group["params"]] for of in (mine, other)), strict=True)
    for one, two in pairs:
        assert torch.equal(local(one), two)
        for name, value in mine.state[one].items():
            assert isinstance(value, DTensor) == (isinstance(one, DTensor) and value.ndim > 0), name
            assert torch.equal(local(value), other.state[two][name]), name


def assert_same_steps(
    model: nn.Module,
    optimizer_of: Callable[[nn.Module], Optimizer],
    reference: nn.Module,
    *,
    steps: int,
    by_loop: int = 0,
) -> None:
    """Train ``model`` by a TrainStep, ``reference`` by FSDP2 and torch's compiled optimizer, and compare all bits.

    ``by_loop``: how many steps the usual loop has trained both before.
    """
    mine, like = optimizer_of(model), optimizer_of(reference)
    for number in range(by_loop):
        for each, optimizer in ((model, mine), (reference, like)):
            eager(each, optimizer, *batch(dist.get_rank(), number))
    other, update = compiled_by_torch(like)
    step = TrainStep(model, mine, cross_entropy, max_norm=0.5, compile_update=True, options=AOT)
    schedulers = [torch.optim.lr_scheduler.LinearLR(of, 0.5, 1.0, 10) for of in (mine, like)]
    graphs, known = step._update.compiled._graphs, {}
    for number in range(steps):
        data = batch(dist.get_rank(), number)
        cross_entropy(reference, *data).backward()
        norm = full(clip_grad_norm_(reference.parameters(), 0.5))
        update()
        step(*data)
        assert torch.equal(step.norm, norm)
        assert_same_states(mine, other)
        assert all(isinstance(group["lr"], float) for group in mine.param_groups)
        for scheduler in schedulers:
            scheduler.step()
        known = known if number > 1 else dict(graphs)
    assert graphs == known  # nothing is compiled after the second step
    assert len(graphs) == (4 if isinstance(mine, torch.optim.SGD) and not by_loop else 2)  # each in two parts


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@distributed(world_size=2)
def test_bits_are_those_of_torchs_compiled_optimizer(rank, world_size, name):
    """Twenty steps with clipping, two parameter groups and a scheduler."""
    before = RUNTIME.prefetcher.counts.copy()
    assert_same_steps(shard(small(), fully_shard), OPTIMIZERS[name], shard(small(), torch_fully_shard), steps=20)
    counts = RUNTIME.prefetcher.counts - before
    assert counts["taken"] >= 17, counts  # the next step's first gather is launched between both parts of the update


@pytest.mark.more
@pytest.mark.parametrize("kind", BUILD)
@distributed(world_size=2)
def test_bits_of_larger_models(rank, world_size, kind):
    """In one graph, and with graph breaks; after steps of the loop, whose state goes on."""
    build = BUILD[kind]
    ours, theirs = shard(build(), fully_shard), shard(build(), torch_fully_shard)
    assert_same_steps(ours, OPTIMIZERS["AdamW, foreach"], theirs, steps=4, by_loop=2)


SHAPES = ((4, 5), (7,), (0, 3), (8, 2))
"""Shards of several shapes; one is empty."""


def with_gradients(number: int, *like: list[nn.Parameter]) -> None:
    """Give equal gradients to several lists of parameters."""
    generator = torch.Generator().manual_seed(number)
    for params in zip(*like, strict=True):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.to(param.dtype)


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for dtype in dtypes for shape in SHAPES]


@pytest.mark.parametrize("kind", sorted(BY_ELEMENT, key=lambda kind: kind.__name__))
def test_every_optimizer(kind):
    """Its steps on plain tensors in two groups, the second one without a gradient in the first step."""
    params = parameters()
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]
    mine = kind(groups, lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    like = copy.deepcopy(mine)
    other, update = compiled_by_torch(like)
    theirs = [p for group in like.param_groups for p in group["params"]]
    own = CompiledUpdate(mine, "aot_eager")
    for number in range(4):
        with_gradients(number, params[::2] + params[1::2], theirs)
        if number == 0:
            for param in params[1::2] + theirs[2:]:
                param.grad = None
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        norm = get_total_norm([g for g in grads if g is not None])
        mine.param_groups[0]["lr"] = like.param_groups[0]["lr"] = 0.01 * (number + 1)
        own.step(params, (0.5, norm))
        assert all(g is p.grad is None or torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
        clip_grads_with_norm_(theirs, 0.5, norm)
        update()
        assert_same_states(mine, other)
    assert len(own._graphs) == (3 if kind is torch.optim.SGD else 2)


def test_several_dtypes_and_options():
    """bfloat16 beside float32 in a group, gradients of another dtype, and implementations that count for nothing."""
    for options in ({}, {"fused": True}, {"foreach": False}, {"maximize": True, "amsgrad": True}):
        params = parameters((torch.float32, torch.bfloat16))
        mine = torch.optim.AdamW(params, lr=0.01, **options)
        like = copy.deepcopy(mine)
        other, update = compiled_by_torch(like)
        own = CompiledUpdate(mine, "aot_eager")
        for number in range(2):
            with_gradients(number, params, like.param_groups[0]["params"])
            own.step(params)
            update()
            assert_same_states(mine, other)


def assert_explained(model: nn.Module) -> None:
    """``explain`` counts each shard once, and adds the update to the step and to its bound."""
    found = explain(model)
    updates = found.to_dict()["updates"]
    assert {update["optimizer"] for update in updates} == {"AdamW"}
    assert sum(update["parameters"] for update in updates) == found.parameters
    elements = sum(p.to_local().numel() for p in model.parameters())
    moved = sum(update["moved_bytes"] for update in updates)
    assert 0 < moved - 7 * 4 * elements < 1000  # shard and state read and written, gradient read; counts and rates
    (call,) = found.calls
    seconds = sum(update["step_s"] for update in updates)
    graphs = count(len(updates), "graph")
    text = " ".join(str(found).split())
    assert f"the update, AdamW in {graphs} of {found.parameters} parameters: {milliseconds(seconds)}" in text
    assert f"{milliseconds(call.seconds + seconds)}, bound {milliseconds(call.bound + seconds)}" in text


@distributed(world_size=2)
def test_state_dicts_are_those_of_the_loop(rank, world_size):
    """In types, dtypes and placements. The loop goes on with the state of compiled updates, as a step on shards."""
    models = [shard(small(), fully_shard) for _ in range(3)]
    optimizers = [OPTIMIZERS["AdamW"](model) for model in models]
    step = TrainStep(models[0], optimizers[0], cross_entropy, compile_update=True, options=AOT)
    on_shards = TrainStep(models[1], optimizers[1], cross_entropy, options=AOT)
    for number in range(4):
        data = batch(rank, number)
        if number < 2:
            step(*data)
            eager(models[2], optimizers[2], *data, max_norm=None)
            continue
        if number == 2:
            assert_explained(models[0])
            kinds = [
                [
                    (name, type(value), value.dtype, getattr(value, "placements", None))
                    for state in optimizer.state_dict()["state"].values()
                    for name, value in state.items()
                ]
                for optimizer in (optimizers[0], optimizers[2])
            ]
            assert kinds[0] == kinds[1]
            assert optimizers[0].state_dict()["param_groups"] == optimizers[2].state_dict()["param_groups"]
            for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
                model.load_state_dict(models[0].state_dict())
                optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        on_shards(*data)
        eager(models[2], optimizers[2], *data, max_norm=None)
        assert_equal(state_of(models[1], optimizers[1]), state_of(models[2], optimizers[2]))


@distributed(world_size=2)
def test_the_scaler_leaves_out_a_compiled_update(rank, world_size):
    model = shard(small(), fully_shard)
    optimizer = OPTIMIZERS["AdamW"](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def loss_fn(model, tokens, targets, factor):
        return cross_entropy(model, tokens, targets) * factor

    how = {"max_norm": 0.5, "scaler": scaler, "compile_update": True, "options": AOT}
    step = TrainStep(model, optimizer, loss_fn, **how)
    for number, factor in enumerate((1.0, float("inf") if rank else 1.0, 1.0)):
        before = copy.deepcopy(state_of(model, optimizer))
        step(*batch(rank, number), torch.tensor(factor))
        if number == 1:
            assert_equal(state_of(model, optimizer), before)
            assert scaler.get_scale() == 8.0
        else:
            with pytest.raises(AssertionError):
                assert_equal(state_of(model, optimizer), before)


def test_values_that_change_in_each_step(monkeypatch, caplog):
    """Each is a graph more. After some graphs the update is no longer compiled, and the log says why."""
    monkeypatch.setattr(compiled, "MOST_COMPILES", 3)
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    own = CompiledUpdate(optimizer, "aot_eager")
    for number in range(3):
        assert not own.has_too_many_graphs
        optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * number, 0.999)
        with_gradients(number, params)
        own.step(params)
    with caplog.at_level(logging.WARNING, "compiled_fsdp"):
        assert own.has_too_many_graphs
    assert "OneCycleLR changes momentum unless it has cycle_momentum=False" in caplog.text


@distributed(world_size=2)
def test_too_many_graphs_in_a_step(rank, world_size):
    """The update goes on without being compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "MOST_COMPILES", 0)
        ours, theirs = shard(small(), fully_shard), shard(small(), torch_fully_shard)
        optimizers = [OPTIMIZERS["AdamW"](model) for model in (ours, theirs)]
        step = TrainStep(ours, optimizers[0], cross_entropy, max_norm=0.5, compile_update=True, options=AOT)
        for number in range(2):
            step(*batch(rank, number))
            eager(theirs, optimizers[1], *batch(rank, number))
    assert_equal(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))


@distributed(world_size=2)
def test_errors(rank, world_size):
    model = shard(small(), fully_shard)
    muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    with pytest.raises(ValueError, match=r"but Muon may not do so\. Leave 'compile_update' out"):
        TrainStep(model, muon, cross_entropy, compile_update=True)
    optimizer = two_groups(torch.optim.AdamW, model, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True)
    with pytest.raises(ValueError, match=r"'betas' has tensors\. Give numbers, or leave 'compile_update' out"):
        TrainStep(model, optimizer, cross_entropy, compile_update=True)


@pytest.mark.more
def test_inductors_code_of_a_graph_is_one_function():
    """It reads and writes each shard once; its numbers are near those of the loop."""
    params = parameters()
    like = copy.deepcopy(params)
    one, two = (
        torch.optim.AdamW([{"params": of[::2]}, {"params": of[1::2], "lr": 0.02}], lr=0.01) for of in (params, like)
    )
    own = CompiledUpdate(one)
    for number in range(10):
        with_gradients(number, params, like)
        norm = get_total_norm([p.grad for p in params])
        step = partial(own.step, params, (0.5, norm))
        if number == 0:
            for code in run_and_get_code(step)[1]:
                calls = [line for line in code.split("def call(self, args)")[1].splitlines() if "cpp_fused" in line]
                assert len(calls) == 1, calls
        else:
            step()
        clip_grads_with_norm_(like, 0.5, norm)
        two.step()
    for param, other in zip(params, like, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-5)
