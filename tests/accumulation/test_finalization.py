"""Backwards that are finalized by hand (`set_manual_backward_finalization`, `finalize_backward`), and how they are used
wrongly: with the errors of torch 2.15's FSDP2."""

import pytest
import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import fully_shard
from tests.harness import WAYS, compiled, distributed, forward_backward, fsdp2, loss_of, shard
from tests.harness.meshes import mesh_2d
from tests.harness.models import small
from tests.harness.reference import assert_same_gradients

FSDP2_HAS_IT = torch.__version__ >= "2.15"


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("async_op", [False, True])
@distributed(world_size=2)
def test_gradients_of_several_backwards(rank, world_size, run, async_op):
    """What waits is reduced and published once it is finalized, of units that sync."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    assert model.finalize_backward() is None  # before the first forward
    call = WAYS[run](model)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    reference.set_requires_gradient_sync(False)
    for number in range(2):
        forward_backward(call, number)
        reference.set_requires_gradient_sync(number == 1)
        forward_backward(reference, number)
    model.finalize_backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        assert isinstance(handle, getattr(torch.distributed.fsdp, "GradientReductionHandle", object))
        assert all(p.grad is None for p in model.parameters())
        handle.wait()
        handle.wait()
    assert_same_gradients(model, reference)
    model.set_manual_backward_finalization(False)
    for each in (model, reference):
        each.zero_grad()
    forward_backward(call, 2)
    forward_backward(reference, 2)
    assert_same_gradients(model, reference)


def prepared(shard_by, *, manual: bool = True, sync: bool = False, **options) -> nn.Module:
    """A model that has run a forward and a backward."""
    model = shard(small(), shard_by, **options)
    model.set_manual_backward_finalization(manual)
    model.set_requires_gradient_sync(sync)
    forward_backward(model, 0)
    return model


def on_a_module_inside(shard_by):
    model = shard(small(), shard_by)
    model.blocks[0].set_manual_backward_finalization(True)
    forward_backward(model, 0)


def finalized_on_a_module_inside(shard_by):
    prepared(shard_by).blocks[0].finalize_backward()


def finalized_automatically(shard_by):
    prepared(shard_by, manual=False, sync=True).finalize_backward()


def finalized_twice(shard_by):
    model = prepared(shard_by)
    model.finalize_backward(async_op=True)
    model.finalize_backward()


def finalized_in_backward(shard_by):
    model = prepared(shard_by)
    model.head.register_full_backward_hook(lambda *_: model.finalize_backward())
    forward_backward(model, 1)


def changed_in_backward(shard_by):
    model = prepared(shard_by)
    model.head.register_full_backward_hook(lambda *_: model.set_manual_backward_finalization(False))
    forward_backward(model, 1)


def changed_after_a_backward(shard_by):
    prepared(shard_by).set_manual_backward_finalization(False)


def changed_before_the_wait(shard_by):
    model = prepared(shard_by)
    model.finalize_backward(async_op=True)
    model.set_manual_backward_finalization(False)


def forward_before_the_wait(shard_by, run=lambda model: model):
    model = prepared(shard_by)
    call = run(model)
    model.finalize_backward(async_op=True)
    loss_of(call, 0, 1)


def waited_for_after_a_reset(shard_by):
    model = prepared(shard_by)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    forward_backward(model, 1)
    handle.wait()


def without_all_reduce(shard_by):
    model = shard(small(), shard_by, mesh=mesh_2d("replicas", "shards"))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    forward_backward(model, 0)
    model.finalize_backward()


MISUSES = {
    on_a_module_inside: "set_manual_backward_finalization must be called on the root FSDP module",
    finalized_on_a_module_inside: "finalize_backward must be called on the root FSDP module",
    finalized_automatically: "finalize_backward requires manual backward finalization. Call set_manual_",
    finalized_twice: "previous gradient reduction must be waited on before finalizing backward again",
    finalized_in_backward: "finalize_backward must be called after backward completes",
    changed_in_backward: "set_manual_backward_finalization cannot change mode during backward",
    changed_after_a_backward: "set_manual_backward_finalization cannot change mode after backward starts",
    changed_before_the_wait: "set_manual_backward_finalization cannot change mode after backward starts",
    forward_before_the_wait: "previous gradient reduction must be waited on before forward",
    waited_for_after_a_reset: "This gradient reduction handle was invalidated",
}


@distributed(world_size=2)
def test_misuses(rank, world_size):
    for misuse, message in MISUSES.items():
        for by in (fully_shard, torch_fully_shard) if FSDP2_HAS_IT else (fully_shard,):
            with pytest.raises(RuntimeError) as error:
                misuse(by)
            assert message in str(error.value), (misuse.__name__, by.__module__, error.value)


@distributed(world_size=2)
def test_a_compiled_forward_before_the_wait(rank, world_size):
    """It looks at the handle, too, and where it is a part of a larger compiled function as well; afterwards it runs."""
    for call_of in (compiled, lambda model: compiled(model.forward_)):
        model = shard(small(), fully_shard)
        model.forward_ = lambda tokens, model=model: model(tokens)
        call = call_of(model)
        model.set_manual_backward_finalization(True)
        forward_backward(call, 0)
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(Exception, match="must be waited on before forward"):
            forward_backward(call, 1)
        handle.wait()
        forward_backward(call, 1)
        model.finalize_backward()


@distributed(world_size=4)
def test_replicas_that_are_left_out(rank, world_size):
    for by in (fully_shard, torch_fully_shard) if FSDP2_HAS_IT else (fully_shard,):
        with pytest.raises(RuntimeError, match=r"manual backward finalization (requires all-reduce|does not support)"):
            without_all_reduce(by)


def test_sharded_around_a_module_that_finalizes_by_hand():
    """Before anything is changed."""
    from tests.harness.fake import fake_group

    with fake_group(2):
        model = nn.Sequential(fully_shard(nn.Linear(4, 4)))
        model[0].set_manual_backward_finalization(True)
        with pytest.raises(
            RuntimeError, match=r"on the root FSDP module, but it was called on module '0'\. Call it on S"
        ):
            fully_shard(model)
        model[0].set_manual_backward_finalization(False)
        fully_shard(model)
