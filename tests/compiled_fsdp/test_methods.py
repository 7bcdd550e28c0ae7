"""FSDPModule's methods about reductions and memory, clipping, CPU offload, and what is counted. Rows K12, K13, O1; `communication`."""

import gc
import math
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import communication, explain, fully_shard
from tests.compiled_fsdp.runtime.test_boundary import broken
from tests.compiled_fsdp.test_accumulation import accumulate
from tests.harness import (
    RUN,
    assert_same,
    collectives_of,
    compiled,
    ddp,
    distributed,
    forward_backward,
    fsdp2,
    loss_of,
    shard,
    train,
)
from tests.harness.models import small


def units_of(model: nn.Module) -> list[nn.Module]:
    return [model, *model.blocks]


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_divisors(rank, world_size, run):
    """K13: a factor of 3 and a forced sum, in fp32 and fp16; FSDP2 with gloo needs the sum for a factor."""
    fp16 = MixedPrecisionPolicy(torch.float16, torch.float16)
    for mp, factor in ((MixedPrecisionPolicy(), 3.0), (MixedPrecisionPolicy(), None), (fp16, 3.0)):
        model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)
        for m in (model, reference):
            for unit in units_of(m):
                unit.set_force_sum_reduction_for_comms(True)
                if factor is not None:
                    unit.set_gradient_divide_factor(factor)
        assert_same(train(RUN[run](model)), train(reference))


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


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_reductions_in_a_group_of_their_own(rank, world_size, run):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    model.set_separate_reduce_scatter_group()
    assert_same(train(RUN[run](model)), train(reference))
    groups = {parameter.group for unit in units_of(model) for parameter in unit._fsdp_unit.parameters}
    (group,) = groups
    assert group.reduce_name != group.name
    if run == "aot_eager":
        streams = {channel.stream for graph in explain(model).graphs for channel in graph.tasks.channels.values()}
        assert streams == {0, -1}
    model.set_separate_reduce_scatter_group(False)
    assert {p.group.reduce_name for unit in units_of(model) for p in unit._fsdp_unit.parameters} == {group.name}


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_offload(rank, world_size, run):
    """O1: equal; parameters, gradients and optimizer state on the CPU, with accumulation and activation checkpointing too."""
    options = {
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    model, reference = shard(small(), fully_shard, **options), fsdp2(small(), **options)
    call = RUN[run](model)
    ours = train(call, lambda c, step: accumulate(c, model, rank, step, 2))
    assert_same(ours, train(reference, lambda c, step: accumulate(c, reference, rank, step, 2)))
    assert {t.device.type for p in model.parameters() for t in (p, p.grad)} == {"cpu"}


@distributed(world_size=4)
def test_clipping(rank, world_size):
    """K12: on four ranks and with replicas the norm is DDP's, for one all-reduce of a number; of torch's two for the maximum."""
    reference = ddp(small())
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))):
        model = shard(small(), fully_shard, mesh=mesh)
        run = compiled(model)
        for norm in (1.0, 2.0, math.inf):
            for m, call in ((reference, reference), (model, run)):
                m.zero_grad()
                forward_backward(call, 0)
            expected = clip_grad_norm_(reference.parameters(), 1e-2, norm_type=norm)
            norms = []
            reductions = collectives_of(
                lambda norm=norm, norms=norms, model=model: norms.append(
                    clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm).full_tensor()
                ),
                "_c10d_functional::all_reduce",
            )
            assert len(reductions) == (2 if norm == math.inf else 1)
            torch.testing.assert_close(norms[0], expected, rtol=1e-6, atol=0)
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-8)


@distributed(world_size=2)
def test_finalizing_a_backward(rank, world_size):
    """What waits is reduced and published, of units that sync."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    model.set_requires_gradient_sync(False)
    loss_of(run, rank, 0).backward()
    model.finalize_backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    handle.wait()
    forward_backward(reference, 0)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@distributed(world_size=2)
def test_resetting_drops_what_waits(rank, world_size):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss_of(run, rank, 5).backward()
    model.reset_iter_state()
    parameters = [p for unit in units_of(model) for p in unit._fsdp_unit.parameters]
    assert all(p.waiting is None and p.retained is None for p in parameters)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    assert_same(train(run), train(reference))


@pytest.mark.parametrize(
    "build", [partial(small, blocks=2), pytest.param(broken, marks=pytest.mark.more)], ids=["whole", "broken"]
)
@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_what_is_counted(rank, world_size, run, build):
    """Every parameter is reduced once however many microbatches wait, and gathered once if it stays."""
    model = shard(build(), fully_shard)
    call = RUN[run](model)
    full = sum(4 * p.numel() + 4 * (p.shape[0] % 2) * p[0].numel() for p in model.parameters())  # padded to even rows

    def step(waits: bool) -> None:
        for micro in range(4):
            model.set_requires_gradient_sync(not waits or micro == 3)
            model.set_reshard_after_backward(not waits or micro == 3)
            loss_of(call, rank, micro).backward()

    for waits in (True, False):
        step(waits)
        gc.collect()
        with communication() as volume:
            step(waits)
        times = 1 if waits else 4
        assert (volume["reduce"].tensors, volume["reduce"].bytes) == (13 * times, full * times)
        if waits:
            assert (volume["gather"].tensors, volume["gather"].bytes) == (13, full)
        else:  # forwards, and backwards where they need it
            assert 13 * 4 < volume["gather"].tensors <= 13 * 8
        assert volume.sent == (volume["gather"].bytes + volume["reduce"].bytes) // 2
        assert f"reduce: {volume['reduce'].launches} collectives, {13 * times} tensors" in str(volume)
    with communication() as idle:
        pass
    assert str(idle) == "no communication"
