"""FSDPModule's methods about reductions: what they divide by, their group, when they end; and how much is counted."""

import gc
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from compiled_fsdp import count_communication, explain, fully_shard
from tests.harness import (
    WAYS,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
    ways_and,
)
from tests.harness.models import broken, small


def units_of(model: nn.Module) -> list[nn.Module]:
    return [model, *model.blocks]


DIVISORS = {
    "a factor": (MixedPrecisionPolicy(), 3.0),
    "a sum": (MixedPrecisionPolicy(), None),
    "a factor in fp16": (MixedPrecisionPolicy(torch.float16, torch.float16), 3.0),
}


@ways_and("divisor", DIVISORS, compiled=["a factor"])
@distributed(world_size=2)
def test_divisors(rank, world_size, way, divisor):
    """A factor of 3 and a forced sum, in fp32 and fp16; FSDP2 with gloo needs the sum for a factor."""
    mp, factor = DIVISORS[divisor]
    model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)
    for m in (model, reference):
        for unit in units_of(m):
            unit.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                unit.set_gradient_divide_factor(factor)
    assert_same(train(WAYS[way](model)), train(reference))


@distributed(world_size=2)
def test_a_divisor_changed_later_compiles_again(rank, world_size):
    model, plain = shard(small(), fully_shard), shard(small(), fully_shard)
    run = compiled(model)
    forward_backward(run, 0)
    model.zero_grad()
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1)
    forward_backward(run, 0)
    forward_backward(plain, 0)
    for summed, mean in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(summed.grad.full_tensor(), 2 * mean.grad.full_tensor())


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_reductions_in_a_group_of_their_own(rank, world_size, run):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    model.set_separate_reduce_scatter_group()
    assert_same(train(WAYS[run](model)), train(reference))
    groups = {parameter.group for unit in units_of(model) for parameter in unit._fsdp_unit.parameters}
    (group,) = groups
    assert group.reduce_scatter_name != group.name
    if run == "compiled_fsdp":
        streams = {channel.stream for graph in explain(model).graphs for channel in graph.tasks.channels.values()}
        assert streams == {0, -1}
    model.set_separate_reduce_scatter_group(False)
    assert {p.group.reduce_scatter_name for unit in units_of(model) for p in unit._fsdp_unit.parameters} == {group.name}


@pytest.mark.more
@distributed(world_size=2)
def test_resetting_drops_what_waits(rank, world_size):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss_of(run, rank, 5).backward()
    model.reset_iter_state()
    parameters = [p for unit in units_of(model) for p in unit._fsdp_unit.parameters]
    assert not any(p.grads.waits or p.retained is not None for p in parameters)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    assert_same(train(run), train(reference))


@pytest.mark.parametrize(
    "build", [partial(small, blocks=2), pytest.param(broken, marks=pytest.mark.more)], ids=["whole", "broken"]
)
@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_what_is_counted(rank, world_size, run, build):
    """Every parameter is reduced once however many microbatches wait, and gathered once if it stays."""
    model = shard(build(), fully_shard)
    call = WAYS[run](model)
    full = sum(4 * p.numel() + 4 * (p.shape[0] % 2) * p[0].numel() for p in model.parameters())  # padded to even rows

    def step(waits: bool) -> None:
        for micro in range(4):
            model.set_requires_gradient_sync(not waits or micro == 3)
            model.set_reshard_after_backward(not waits or micro == 3)
            loss_of(call, rank, micro).backward()

    for waits in (True, False):
        step(waits)
        gc.collect()
        with count_communication() as volume:
            step(waits)
        times = 1 if waits else 4
        assert (volume["reduce"].tensors, volume["reduce"].bytes) == (13 * times, full * times)
        if waits:
            assert (volume["gather"].tensors, volume["gather"].bytes) == (13, full)
        else:  # forwards, and backwards where they need it
            assert 13 * 4 < volume["gather"].tensors <= 13 * 8
        assert volume.sent == (volume["gather"].bytes + volume["reduce"].bytes) // 2
        assert f"reduce: {volume['reduce'].launches} collectives, {13 * times} tensors" in str(volume)
    with count_communication() as idle:
        pass
    assert str(idle) == "no communication"


@distributed(world_size=2)
def test_what_is_accepted_and_changes_nothing(rank, world_size):
    model = shard(small(blocks=2), fully_shard, offload_policy=OffloadPolicy())

    def step(model, index):
        model.set_is_last_backward(index == 1)
        loss = forward_backward(model, index)
        model.set_is_last_backward(True)
        return loss

    assert_same(train(model, step, steps=2), fsdp2_record(small(blocks=2), steps=2))
