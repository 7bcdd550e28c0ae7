"""Gradient accumulation with and without communication."""

from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import compiled_autograd, count_communication, explain, fully_shard
from tests.harness import WAYS, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, variants, ways_and
from tests.harness.accumulation import accumulate, accumulating
from tests.harness.models import BUILD, small
from tests.harness.ours import counted


@pytest.mark.parametrize("build", ["whole", pytest.param("broken", marks=pytest.mark.more)])
@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_without_communication(rank, world_size, run, build):
    """No reduction and no `.grad` until the last microbatch; equal to FSDP2."""
    model, reference = shard(BUILD[build](), fully_shard), fsdp2(BUILD[build]())
    ours = train(WAYS[run](model), accumulating(model, rank))
    assert_same(ours, train(reference, accumulating(reference, rank)))


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_collectives_of_each_microbatch(rank, world_size, run):
    """Reductions 0, 0, 3; 3, 3, 3; one block alone without sync 2 then 3."""
    model = shard(small(blocks=2), fully_shard)
    call = model if run == "eager" else compiled(model, bucket="module")

    def step(index: int) -> int:
        return counted(lambda: loss_of(call, rank, index).backward())["RS"]

    for sync in ((False, False, True), (False, False, True), (True, True, True)):
        for flag in dict.fromkeys(sync):  # code for it, whose making has collectives of its own in a profile
            model.set_requires_gradient_sync(flag)
            loss_of(call, rank, 0).backward()
        found = []
        for micro, flag in enumerate(sync):
            model.set_requires_gradient_sync(flag)
            found.append(step(micro))
        assert found == [3 if flag else 0 for flag in sync], sync
    model.zero_grad()
    model.blocks[0].set_requires_gradient_sync(False)
    loss_of(call, rank, 0).backward()
    assert step(0) == 2
    assert all(p.grad is None for p in model.blocks[0].parameters())
    model.blocks[0].set_requires_gradient_sync(True)
    assert step(1) == 3


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_accumulating_reduced_gradients(rank, world_size, run):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    ours = train(WAYS[run](model), accumulating(model, rank, sync=True))
    assert_same(ours, train(reference, accumulating(reference, rank, sync=True)))


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=pytest.mark.more), True])
@distributed(world_size=2)
def test_compiled_variants(rank, world_size, keeps):
    """Six steps of two microbatches, from the first step on, are two variants, or two for each kept state."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)

    def step(m, call, index):
        for micro in range(2):
            m.set_requires_gradient_sync(micro == 1)
            if keeps:
                m.set_reshard_after_backward(micro == 1)
            loss = loss_of(call, rank, index * 2 + micro)
            loss.backward()
        return loss.detach()

    ours = train(run, lambda call, index: step(model, call, index), steps=6)
    assert_same(ours, train(reference, lambda call, index: step(reference, call, index), steps=6))
    graphs = explain(model).graphs
    assert len([graph for graph in graphs if graph.phase == "forward"]) == 2


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2, reset=True)
def test_steps_that_accumulate_and_steps_that_do_not(rank, world_size, run):
    """Three codes: of a step that reduces, of a microbatch that does not, and of one that reduces what waits, too."""
    counters.clear()
    model, reference = shard(small(), fully_shard), fsdp2(small())
    found = []

    def step(m, call, index):
        loss = accumulate(call, m, rank, index, 1 + index % 2)
        if m is model:
            found.append(counters["stats"]["unique_graphs"])
            texts = {p.read_spec.reduce for block in (m, *m.blocks) for p in block._fsdp_unit.parameters}
            assert texts == {"float32 avg"}, "nothing waits any more"
        return loss

    ours = train(WAYS[run](model), lambda call, index: step(model, call, index), steps=5)
    assert_same(ours, train(reference, lambda call, index: step(reference, call, index), steps=5))
    assert found == ([1, 3, 3, 3, 3] if run != "eager" else [0] * 5)


bf16, fp32 = torch.bfloat16, torch.float32
# The dtypes of parameters and of reductions, and the dtype of the gradients that wait.
WAITING = {
    "bf16 fp32": (bf16, fp32, fp32),
    "bf16 none": (bf16, None, fp32),
    "none bf16": (None, bf16, bf16),
    "bf16 bf16": (bf16, bf16, bf16),
}


@ways_and("dtypes", WAITING, compiled=["bf16 none"])
@distributed(world_size=2)
def test_dtypes_of_accumulation(rank, world_size, way, dtypes):
    """What waits has the dtype in which it will be reduced."""
    param_dtype, reduce_dtype, waits = WAITING[dtypes]
    mp = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    theirs = MixedPrecisionPolicy(param_dtype, reduce_dtype or fp32)
    model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=theirs)
    call = WAYS[way](model)
    model.set_requires_gradient_sync(False)
    loss_of(call, rank, 0).backward()
    for block in (model, *model.blocks):
        for parameter in block._fsdp_unit.parameters:
            assert parameter.grads.unsharded_accumulated_grad.dtype == waits
            assert parameter.grads.unsharded_accumulated_grad.shape == parameter.read_spec.size
    model.reset_iter_state()
    records = []
    for m, run_it in ((model, call), (reference, reference)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
        records.append(train(run_it, accumulating(m, rank), steps=2, optimizer=optimizer))
    assert_same(*records)  # from torch 2.15 on each gradient is rounded before it is added


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_hooks_come_with_the_reduction(rank, world_size, run):
    """None without sync, then each once."""
    model = shard(small(), fully_shard)
    calls = Counter()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([name]))
    call = WAYS[run](model)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        loss_of(call, rank, micro).backward()
    assert not calls
    model.set_requires_gradient_sync(True)
    loss_of(call, rank, 2).backward()
    assert set(calls.values()) == {1}
    assert len(calls) == 9


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=1)
def test_one_rank(rank, world_size, run):
    """Nothing to communicate, and `.grad` comes with the sync all the same; with casts, too."""
    for mp in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)
        ours = train(WAYS[run](model), accumulating(model, rank))
        assert_same(ours, train(reference, accumulating(reference, rank)))


@pytest.mark.more
@pytest.mark.parametrize("build", ["whole", "broken"])
@distributed(world_size=2)
def test_compiled_autograd(rank, world_size, build):
    """Gradients wait in the one backward graph, too, and are reduced once, whatever its buckets."""
    model, reference = shard(BUILD[build](), fully_shard), fsdp2(BUILD[build]())
    run = compiled(model, bucket="module")

    def step(call, index):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(call, rank, index * 2 + micro)
            with compiled_autograd(codegen="aot_eager", bucket="module"):
                loss.backward()
            assert (next(model.parameters()).grad is None) == (micro == 0)
        return loss.detach()

    assert_same(train(run, step), train(reference, accumulating(reference, rank, 2)))
    model.zero_grad()
    with count_communication() as volume:
        step(run, 0)
    assert volume["reduce"].tensors == len(list(model.parameters()))


@distributed(world_size=2)
def test_what_waits_is_in_the_budget(rank, world_size):
    """Shards, gradients, AdamW's state, and full gradients that wait."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    model.set_requires_gradient_sync(False)
    loss_of(run, rank, 0).backward()
    for graph in explain(model).graphs:
        elements = sum(read.elements for read in graph.reads)
        assert graph.tasks.persistent == elements // 2 * (4 + 4 + 8) + elements * 4


@pytest.mark.more
@distributed(world_size=2)
def test_inductor(rank, world_size):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    records = []
    for m in (model, reference):
        call = compiled(m, codegen="inductor") if m is model else m
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)

        def step(call, index, m=m):
            for micro in range(3):
                m.set_requires_gradient_sync(micro == 2)
                m.set_reshard_after_backward(micro == 2)
                loss = loss_of(call, rank, index * 3 + micro)
                loss.backward()
            return loss.detach()

        records.append(train(call, step, steps=2, optimizer=optimizer))
    assert_same(*records, rtol=1e-5)
