"""`set_requires_gradient_sync` and `no_sync`: set back, changed between forward and backward, and for parts of a
model."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters

from compiled_fsdp import compiled_autograd, fully_shard
from tests.harness import WAYS, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, variants, ways_and
from tests.harness.accumulation import Branching
from tests.harness.logs import warnings_about_sync
from tests.harness.models import Hidden, batch, small
from tests.harness.reference import assert_same_gradients

SAME_AGAIN = {
    "sync": lambda m: (m.set_requires_gradient_sync(False), m.set_requires_gradient_sync(True)),
    "all-reduce": lambda m: (m.set_requires_all_reduce(False), m.set_requires_all_reduce(True)),
    "finalization": lambda m: (m.set_manual_backward_finalization(True), m.set_manual_backward_finalization(False)),
    "kept after forward": lambda m: [b.set_reshard_after_forward(kept) for b in m.blocks for kept in (False, True)],
    "kept after backward": lambda m: (m.set_reshard_after_backward(False), m.set_reshard_after_backward(True)),
    "the default, by name": lambda m: m.set_reshard_after_forward(False, recurse=False),
}


@distributed(world_size=2, reset=True)
def test_flags_that_are_set_back_compile_nothing(rank, world_size):
    """The same settings are the same code, whatever was set before."""
    counters.clear()
    model = shard(small(), fully_shard)
    run = compiled(model)
    for change, flags in {"none": lambda m: None, **SAME_AGAIN}.items():
        flags(model)
        loss_of(run, rank, 0).backward()
        assert counters["stats"]["unique_graphs"] == 1, change


def chunked_step(run, model, rank: int, index: int, count: int = 3) -> torch.Tensor:
    """A forward, and the head and the loss by chunks of it, each with its backward, as torchtitan's chunked loss does
    it."""
    tokens, targets = batch(rank, index)
    hidden, head = run(tokens), model.head
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(count, 1)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    total = torch.zeros(())
    for number, (chunk, target) in enumerate(zip(chunks, targets.chunk(count, 1), strict=True), start=1):
        if number == count:
            head.set_requires_gradient_sync(True, recurse=False)
        loss = (
            nn.functional.cross_entropy(head(chunk).flatten(0, 1), target.flatten(), reduction="sum") / targets.numel()
        )
        total += loss.detach()
        loss.backward()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    hidden.backward(torch.cat([chunk.grad for chunk in chunks], 1))
    return total


@distributed(world_size=2, reset=True)
def test_a_chunked_loss(rank, world_size):
    """Its flags are those of a unit that the compiled model reads, too: one code all the same, and equal to FSDP2."""
    counters.clear()
    records, graphs = [], []
    for shard_by in (fully_shard, torch.distributed.fsdp.fully_shard):
        model = small(cls=Hidden)
        for unit in (*model.blocks, [model.norm, model.head], model):
            shard_by(unit)
        run = compiled(model) if shard_by is fully_shard else model

        def step(call, index, model=model):
            loss = chunked_step(call, model, rank, index)
            graphs.append(counters["stats"]["unique_graphs"])
            return loss

        records.append(train(run, step))
    assert_same(*records)
    assert set(graphs) == {1}


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_no_sync(rank, world_size, run):
    """The context, nested, by an exception, and over flags that differ."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    call = WAYS[run](model)
    model.blocks[0].set_requires_gradient_sync(False)

    def interrupted():
        with model.no_sync(), model.no_sync():
            loss_of(call, rank, 0).backward()
            assert not any(unit._fsdp_unit.policy.requires_gradient_sync for unit in (model, *model.blocks))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    flags = [unit._fsdp_unit.policy.requires_gradient_sync for unit in (model, *model.blocks)]
    assert flags == [True, False]
    model.set_requires_gradient_sync(True)
    loss_of(call, rank, 1).backward()
    for micro in range(2):
        reference.set_requires_gradient_sync(micro == 1)
        loss_of(reference, rank, micro).backward()
    assert_same_gradients(model, reference)


def late_on(model, loss):
    losses = [loss(0, False)]
    model.set_requires_gradient_sync(True)
    losses[0].backward()


def late_off(model, loss):
    first = loss(0, True)
    model.set_requires_gradient_sync(False)
    first.backward()
    loss(1, True).backward()


def both_in_one(model, loss):
    (loss(0, False) + loss(1, True)).backward()


def both_in_one_the_other_way(model, loss):
    first = loss(0, True)
    (first + loss(1, False)).backward()
    loss(0, True).backward()


def only_before(model, loss):
    """The second microbatch, with sync, does not use the layer of the first."""
    loss(0, False).backward()
    loss(1, True).backward()


def twice_before(model, loss):
    (loss(0, False) + loss(0, False) + loss(1, False)).backward()
    loss(1, True).backward()


def both_in_one_later(model, loss):
    """After steps with sync alone: code that adds nothing that waits is there."""
    for which in (0, 1):
        loss(which, True).backward()
    both_in_one(model, loss)


SCENARIOS = [
    late_on,
    late_off,
    both_in_one,
    both_in_one_the_other_way,
    both_in_one_later,
    only_before,
    twice_before,
]


@ways_and("scenario", SCENARIOS, compiled=[late_on, only_before])
@distributed(world_size=2)
def test_flags_that_change_and_parameters_of_one_microbatch(rank, world_size, way, scenario):
    """After the last backward gradients are FSDP2's, one hook call a parameter in a backward."""
    grads, hooks = [], []
    for shard_by in (fully_shard, torch.distributed.fsdp.fully_shard):
        model = shard(Branching(), shard_by)
        call = WAYS[way](model) if shard_by is fully_shard else model
        calls = Counter()
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda p, name=name, calls=calls: calls.update([name]))

        def loss(which, sync, model=model, call=call):
            model.set_requires_gradient_sync(sync)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank * 7 + which))
            return call(x, which).square().sum()

        scenario(model, loss)
        hooks.append(calls)
        grads.append([None if p.grad is None else p.grad.full_tensor() for p in model.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=scenario.__name__)
    if scenario not in (late_off, both_in_one_the_other_way):  # there this one reduces more often, and says so
        assert hooks[0] == hooks[1], scenario.__name__


@distributed(world_size=2)
def test_a_flag_turned_off_too_late_is_told(rank, world_size):
    """A warning where more was communicated."""
    model = shard(small(), fully_shard)
    call = compiled(model)
    with warnings_about_sync() as said:
        for index in range(3):
            model.set_requires_gradient_sync(True)
            loss = loss_of(call, rank, index)
            model.set_requires_gradient_sync(False)
            loss.backward()
    assert len(said) == 1
    assert "set_requires_gradient_sync(False) before the forward" in said[0]


@pytest.mark.more
@distributed(world_size=2)
def test_compiled_autograd_reduces_what_it_does_not_reach(rank, world_size):
    """Also where no gradient of the backward is reduced by itself, since sync was turned on after the forward."""
    for late in (False, True):
        grads = []
        for shard_by in (fully_shard, torch.distributed.fsdp.fully_shard):
            model = shard(Branching(), shard_by)
            ours = shard_by is fully_shard
            call = compiled(model) if ours else model
            for which in (0, 1):
                model.set_requires_gradient_sync(which == 1 and not late)
                loss = call(torch.ones(4, 8) + rank, which).square().sum()
                model.set_requires_gradient_sync(which == 1)
                with compiled_autograd(codegen="aot_eager") if ours else contextlib.nullcontext():
                    loss.backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs)


@distributed(world_size=2)
def test_gradients_asked_for_leave_nothing_waiting(rank, world_size):
    """`torch.autograd.grad` of something else adds to no parameter."""
    model = shard(Branching(), fully_shard)
    call = compiled(model)
    model.set_requires_gradient_sync(False)
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(call(x, 0).sum(), x)
    assert grad.shape == x.shape
    assert not any(p.grads.waits for block in (model, *model.blocks) for p in block._fsdp_unit.parameters)
