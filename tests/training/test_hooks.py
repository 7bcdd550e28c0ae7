"""Hooks of forwards and gradients, and optimizers in backward: whole graph, graph breaks, compiled autograd."""

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

from compiled_fsdp import compiled_autograd, explain, fully_shard
from compiled_fsdp.runtime import accumulate_grad, reducer
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import WAYS, compiled, distributed, forward_backward, fsdp2, loss_of, shard, variants, ways
from tests.harness.models import broken, small

BACKWARDS = ["eager", "whole", "broken", "whole, compiled autograd", "broken, compiled autograd"]


def built(way: str, blocks: int = 2) -> nn.Module:
    return broken(blocks=blocks) if "broken" in way else small(blocks=blocks)


def running(way: str, model: nn.Module, **options):
    """The model as `way` runs it, and what its backwards run in."""
    run = model if way == "eager" else compiled(model, **options)
    around = (
        (lambda: compiled_autograd(codegen="aot_eager", **options)) if "autograd" in way else contextlib.nullcontext
    )
    return run, around


def in_backward(model: nn.Module, make, calls: list[str], scheduler: bool = False) -> None:
    """An optimizer for each parameter that steps in its hook."""
    for name, param in model.named_parameters():
        optimizer = make([param])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if scheduler else None

        def step(p, optimizer=optimizer, schedule=schedule, name=name):
            assert isinstance(p, DTensor)
            assert p.grad.placements == p.placements
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            calls.append(name)

        param.register_post_accumulate_grad_hook(step)


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(BACKWARDS, *BACKWARDS[:3]))
def test_optimizer_in_backward(rank, world_size, way):
    """Ten steps as FSDP2's, a call for each parameter and step, the last block's before the first one's."""
    makes = {
        "schedule": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
        "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    }
    for kind, make in makes.items():
        ours, theirs = shard(built(way), fully_shard), fsdp2(built(way))
        calls: list[str] = []
        in_backward(ours, make, calls, scheduler=kind == "schedule")
        in_backward(theirs, make, [], scheduler=kind == "schedule")
        run, around = running(way, ours)
        for index in range(10 if kind == "schedule" else 2):
            calls.clear()
            loss = loss_of(run, rank, index)
            with around():
                loss.backward()
            expected = forward_backward(theirs, index)
            if kind == "schedule":
                assert torch.equal(loss.detach(), expected), index
            else:  # where the kernel's vectors begin depends on the memory's alignment
                torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
            assert sorted(calls) == sorted(name for name, _ in ours.named_parameters())
            assert all(param.grad is None for param in ours.parameters())
            place = {name: i for i, name in enumerate(calls)}
            if way != "eager":
                last = max(i for name, i in place.items() if "blocks.1" in name)
                assert last < min(i for name, i in place.items() if "blocks.0" in name)
        backwards = [graph for graph in explain(ours).graphs if graph.phase == "backward"] if way != "eager" else []
        if "autograd" in way:
            assert len(backwards) <= 4  # one capture beside the forwards' own backwards


@distributed(world_size=2)
def test_hooks_come_and_go(rank, world_size):
    """Added and removed after the first compiled call, of both kinds; `register_hook` on a sharded parameter does not
    fire."""
    for way in ("whole", "broken", "broken, compiled autograd"):
        model = shard(built(way), fully_shard)
        run, around = running(way, model)
        calls: list[object] = []

        def step(index, run=run, around=around, model=model, calls=calls):
            calls.clear()
            loss = loss_of(run, rank, index)
            with around():
                loss.backward()
            model.zero_grad()
            return list(calls)

        assert step(0) == []
        weight = model.blocks[0].up.weight
        weight.register_hook(lambda grad, calls=calls: calls.append("never"))
        one = weight.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p))
        grouped = model.register_post_backward_hook(lambda params, calls=calls: calls.append(params))
        of_block = model.blocks[0].register_post_backward_hook(lambda params, calls=calls: calls.append((params,)))
        seen = step(1)
        assert sum(thing is weight for thing in seen) == 1
        lists = [thing for thing in seen if isinstance(thing, list)]
        assert sorted(id(param) for params in lists for param in params) == sorted(map(id, model.parameters()))
        if way == "broken":
            assert len(lists) == 3  # the root's and two blocks'
        blocks = [param for thing in seen if isinstance(thing, tuple) for param in thing[0]]
        assert sorted(map(id, blocks)) == sorted(map(id, model.blocks[0].parameters()))
        one.remove()
        assert not any(thing is weight for thing in step(2))
        grouped.remove()
        of_block.remove()
        assert step(3) == []


@pytest.mark.more
@distributed(world_size=2)
def test_a_foreach_optimizer_in_a_grouped_hook(rank, world_size):
    """The same as FSDP2 with one step after backward."""
    for way in ("whole", "broken, compiled autograd"):
        ours, theirs = shard(built(way), fully_shard), fsdp2(built(way))
        optimizers: dict[tuple[int, ...], torch.optim.Optimizer] = {}

        def step(params, optimizers=optimizers):
            key = tuple(map(id, params))
            if key not in optimizers:
                optimizers[key] = torch.optim.AdamW(params, lr=0.01, foreach=True)
            optimizers[key].step()
            optimizers[key].zero_grad()

        ours.register_post_backward_hook(step)
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, foreach=True)
        run, around = running(way, ours)
        for index in range(4):
            loss = loss_of(run, rank, index)
            with around():
                loss.backward()
            assert torch.equal(loss.detach(), forward_backward(theirs, index)), (way, index)
            optimizer.step()
            optimizer.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(BACKWARDS[2:], BACKWARDS[2]))
def test_gradients_that_live_at_a_time(rank, world_size, way):
    """With an optimizer in backward at most two of the plan's buckets: the memory of everything that was published and
    is alive, and of what is reduced and not yet published."""
    model = shard(built(way, blocks=4), fully_shard, reshard_after_forward=True)
    run, around = running(way, model, bucket="module")
    reduced: list[weakref.ref[torch.UntypedStorage]] = []
    add_to_grad, peaks = reducer.add_to_grad, []

    def adding(parameter, grad, *rest):
        reduced.append(weakref.ref(grad.untyped_storage()))
        add_to_grad(parameter, grad, *rest)

    def update(p):
        reduced.append(weakref.ref(p.grad.to_local().untyped_storage()))
        living = {storage.data_ptr(): storage.nbytes() for ref in reduced if (storage := ref()) is not None}
        waiting = [queued for state in RUNTIME.reducer._backwards.values() for queued in state.queue]
        peaks.append(sum(living.values()) + sum(len(q.pieces) * q.parameter.shard.nbytes for q in waiting))
        with torch.no_grad():
            p.to_local().sub_(p.grad.to_local(), alpha=0.01)
        p.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    with mock.patch.object(reducer, "add_to_grad", adding), mock.patch.object(accumulate_grad, "add_to_grad", adding):
        for index in range(2):
            loss = loss_of(run, rank, index)
            with around():
                loss.backward()
    graph = explain(model).graphs[-1]
    bucket = max(launch.bytes for launch in graph.plan.launches) // world_size
    assert len(peaks) == 2 * len(list(model.parameters()))
    assert max(peaks) <= 2 * bucket
    # in one graph: no third reduction is launched before the first one's gradients are published
    launches = [timing.launch for timing in graph.simulation.timings if not timing.launch.kind.supplies]
    for first, third in zip(launches, launches[2:], strict=False):
        assert first.wait <= third.at


@distributed(world_size=2)
def test_hooks_see_sharded_gradients_once(rank, world_size):
    """Post-accumulate-grad hooks: once a parameter and backward, with .grad in place."""
    model = shard(small(), fully_shard)
    calls: dict[str, int] = {}
    for name, param in model.named_parameters():

        def hook(p, name=name):
            assert p.grad is not None
            assert p.grad.placements == p.placements
            calls[name] = calls.get(name, 0) + 1

        param.register_post_accumulate_grad_hook(hook)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    assert set(calls.values()) == {2}
    assert len(calls) == 9


@distributed(world_size=1)
@ways
def test_hooks_of_the_user(rank, world_size, way):
    """Pre-hooks and hooks from before sharding see full parameters; full ones are plain tensors."""
    seen = []

    def see(module, *_):
        seen.append(type(module.weight) is torch.Tensor)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(see)
    model[0].register_forward_hook(see)
    fully_shard(model[0])
    fully_shard(model)
    model[0].register_forward_pre_hook(see, prepend=False)
    WAYS[way](model)(torch.ones(2, 4)).sum().backward()
    assert seen == [True] * 3
