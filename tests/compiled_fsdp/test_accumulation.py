"""Gradient accumulation with and without communication."""

import contextlib
import functools
import logging
from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import communication, compiled_autograd, explain, fully_shard
from tests.compiled_fsdp.runtime.test_boundary import broken
from tests.harness import (
    RUN,
    assert_same,
    collectives_of,
    compiled,
    distributed,
    fsdp2,
    loss_of,
    shard,
    train,
)
from tests.harness.models import Transformer, batch, small

BUILD = {"whole": functools.partial(small, blocks=2), "broken": broken}


def accumulate(run, model, rank: int, step: int, count: int, *, sync: bool = False) -> torch.Tensor:
    """Backwards of `count` microbatches, the last one with gradient sync, `sync`: all of them. Returns the last loss."""
    for micro in range(count):
        last = micro == count - 1
        model.set_requires_gradient_sync(sync or last)
        model.set_is_last_backward(last)
        loss = loss_of(run, rank, step * count + micro)
        loss.backward()
        if not (sync or last):
            assert all(p.grad is None for p in model.parameters())
    return loss.detach()


def accumulating(model, rank: int, count: int = 3, **options):
    return lambda run, step: accumulate(run, model, rank, step, count, **options)


def counted(run) -> Counter[str]:
    """Launches of collectives on the wire's level, by kind; a reduce-scatter may be an all-to-all."""
    names = {
        "all_gather_into_tensor": "AG",
        "all_gather_into_tensor_out": "AG",
        "reduce_scatter_tensor": "RS",
        "all_to_all_single": "RS",
        "all_reduce": "AR",
    }
    found = (name.split()[0] for name in collectives_of(run, "_c10d_functional::"))
    return Counter(names[name] for name in found if name in names)


@pytest.mark.parametrize("build", ["whole", pytest.param("broken", marks=pytest.mark.more)])
@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_without_communication(rank, world_size, run, build):
    """No reduction and no `.grad` until the last microbatch; equal to FSDP2."""
    model, reference = shard(BUILD[build](), fully_shard), fsdp2(BUILD[build]())
    ours = train(RUN[run](model), accumulating(model, rank))
    assert_same(ours, train(reference, accumulating(reference, rank)))


@pytest.mark.parametrize("run", RUN)
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


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_accumulating_reduced_gradients(rank, world_size, run):
    model, reference = shard(small(), fully_shard), fsdp2(small())
    ours = train(RUN[run](model), accumulating(model, rank, sync=True))
    assert_same(ours, train(reference, accumulating(reference, rank, sync=True)))


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_keeping_parameters_over_microbatches(rank, world_size, run):
    """Gathers 3, 0, 0; equal to FSDP2, and gathered anew after the optimizer's step."""
    model = shard(small(blocks=2), fully_shard)
    reference = fsdp2(small(blocks=2), reshard_after_forward=False)
    call = model if run == "eager" else compiled(model, bucket="module")
    found = []

    def step(m, call, index, count=3):
        losses = []

        def run_micro(micro):
            losses.append(loss_of(call, rank, index * count + micro))
            losses[-1].backward()

        for micro in range(count):
            m.set_requires_gradient_sync(micro == count - 1)
            m.set_reshard_after_backward(micro == count - 1)
            kinds = counted(functools.partial(run_micro, micro))
            if m is model:
                found.append((kinds["AG"], kinds["RS"]))
        return losses[-1].detach()

    ours = train(call, lambda c, index: step(model, c, index))
    assert found[3:] == [(3, 0), (0, 0), (0, 3)] * 2
    assert_same(ours, train(reference, lambda c, index: step(reference, c, index)))
    assert all(
        parameter.retained is None for block in (model, *model.blocks) for parameter in block._fsdp_unit.parameters
    )


@distributed(world_size=2)
def test_kept_parameters_are_dropped_by_an_optimizers_step(rank, world_size):
    """Whoever forgets to reshard trains on what the optimizer wrote; FSDP2 would go on with the old values."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    model.set_reshard_after_backward(False)
    assert_same(train(compiled(model)), train(reference))


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


SAME_AGAIN = {
    "sync": lambda m: (m.set_requires_gradient_sync(False), m.set_requires_gradient_sync(True)),
    "all-reduce": lambda m: (m.set_requires_all_reduce(False), m.set_requires_all_reduce(True)),
    "finalization": lambda m: (m.set_manual_backward_finalization(True), m.set_manual_backward_finalization(False)),
    "kept after forward": lambda m: [(b.set_reshard_after_forward(False), b.set_reshard_after_forward(True)) for b in m.blocks],
    "kept after backward": lambda m: (m.set_reshard_after_backward(False), m.set_reshard_after_backward(True)),
    "the default, by name": lambda m: m.set_reshard_after_forward(False, recurse=False),
}  # fmt: skip


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


@pytest.mark.parametrize("run", RUN)
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
            texts = {p.reduction for block in (m, *m.blocks) for p in block._fsdp_unit.parameters}
            assert texts == {"float32 avg"}, "nothing waits any more"
        return loss

    ours = train(RUN[run](model), lambda call, index: step(model, call, index), steps=5)
    assert_same(ours, train(reference, lambda call, index: step(reference, call, index), steps=5))
    assert found == ([1, 3, 3, 3, 3] if run != "eager" else [0] * 5)


class Hidden(Transformer):
    """To what its head makes logits of."""

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def chunked_step(run, model, rank: int, index: int, count: int = 3) -> torch.Tensor:
    """A forward, and the head and the loss by chunks of it, each with its backward, as torchtitan's chunked loss does it."""
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


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_no_sync(rank, world_size, run):
    """The context, nested, by an exception, and over flags that differ."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    call = RUN[run](model)
    model.blocks[0].set_requires_gradient_sync(False)

    def interrupted():
        with model.no_sync(), model.no_sync():
            loss_of(call, rank, 0).backward()
            assert not any(unit._fsdp_unit.requires_sync for unit in (model, *model.blocks))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    flags = [unit._fsdp_unit.requires_sync for unit in (model, *model.blocks)]
    assert flags == [True, False]
    model.set_requires_gradient_sync(True)
    loss_of(call, rank, 1).backward()
    for micro in range(2):
        reference.set_requires_gradient_sync(micro == 1)
        loss_of(reference, rank, micro).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_dtypes_of_accumulation(rank, world_size, run):
    """What waits has the dtype in which it will be reduced."""
    bf16, fp32 = torch.bfloat16, torch.float32
    table = {(bf16, fp32): fp32, (bf16, None): fp32, (None, bf16): bf16, (bf16, bf16): bf16}
    for dtypes, waits in list(table.items())[0 if run == "eager" else 1 :]:
        mp = MixedPrecisionPolicy(*dtypes)
        theirs = MixedPrecisionPolicy(dtypes[0], dtypes[1] or fp32)
        model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=theirs)
        call = RUN[run](model)
        model.set_requires_gradient_sync(False)
        loss_of(call, rank, 0).backward()
        for block in (model, *model.blocks):
            for parameter in block._fsdp_unit.parameters:
                assert parameter.waiting.dtype == waits
                assert parameter.waiting.shape == parameter.size
        model.reset_iter_state()
        records = []
        for m, run_it in ((model, call), (reference, reference)):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
            records.append(train(run_it, accumulating(m, rank), steps=2, optimizer=optimizer))
        # from torch 2.15 on FSDP2 rounds each gradient before it is added
        rounds = dtypes == (None, bf16) and torch.__version__ >= "2.15"
        assert_same(*records, rtol=3e-2 if rounds else 0.0)  # of bf16 three steps or so


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_hooks_come_with_the_reduction(rank, world_size, run):
    """None without sync, then each once."""
    model = shard(small(), fully_shard)
    calls = Counter()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([name]))
    call = RUN[run](model)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        loss_of(call, rank, micro).backward()
    assert not calls
    model.set_requires_gradient_sync(True)
    loss_of(call, rank, 2).backward()
    assert set(calls.values()) == {1}
    assert len(calls) == 9


class Branching(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.blocks[which](self.first(x).relu())


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


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=2)
def test_flags_that_change_and_parameters_of_one_microbatch(rank, world_size, run):
    """After the last backward gradients are FSDP2's, one hook call a parameter in a backward."""
    for scenario in SCENARIOS:
        grads, hooks = [], []
        for shard_by in (fully_shard, torch.distributed.fsdp.fully_shard):
            model = shard(Branching(), shard_by)
            call = RUN[run](model) if shard_by is fully_shard else model
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
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("compiled_fsdp.runtime.reducer")
    logger.addHandler(handler)
    from compiled_fsdp.runtime import reducer as publishing

    publishing._warned_too_late = False
    model = shard(small(), fully_shard)
    call = compiled(model)
    with contextlib.closing(handler):
        for index in range(3):
            model.set_requires_gradient_sync(True)
            loss = loss_of(call, rank, index)
            model.set_requires_gradient_sync(False)
            loss.backward()
    logger.removeHandler(handler)
    assert len(said) == 1
    assert "set_requires_gradient_sync(False) before the forward" in said[0]


@pytest.mark.parametrize("run", RUN)
@distributed(world_size=1)
def test_one_rank(rank, world_size, run):
    """Nothing to communicate, and `.grad` comes with the sync all the same; with casts, too."""
    for mp in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)
        ours = train(RUN[run](model), accumulating(model, rank))
        assert_same(ours, train(reference, accumulating(reference, rank)))


@pytest.mark.parametrize("build", [pytest.param("whole", marks=pytest.mark.more), "broken"])
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
    with communication() as volume:
        step(run, 0)
    assert volume["reduce"].tensors == len(list(model.parameters()))


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
def test_what_waits_is_in_the_budget(rank, world_size):
    """Shards, gradients, AdamW's state, and full gradients that wait."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    model.set_requires_gradient_sync(False)
    loss_of(run, rank, 0).backward()
    for graph in explain(model).graphs:
        elements = sum(read.elements for read in graph.reads)
        assert graph.tasks.persistent == elements // 2 * (4 + 4 + 8) + elements * 4


@distributed(world_size=2)
def test_gradients_asked_for_leave_nothing_waiting(rank, world_size):
    """`torch.autograd.grad` of something else adds to no parameter."""
    model = shard(Branching(), fully_shard)
    call = compiled(model)
    model.set_requires_gradient_sync(False)
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(call(x, 0).sum(), x)
    assert grad.shape == x.shape
    assert all(p.waiting is None for block in (model, *model.blocks) for p in block._fsdp_unit.parameters)


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
