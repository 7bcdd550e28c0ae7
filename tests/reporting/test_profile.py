"""A profile of a few steps: names, counts, order and sums of what was measured, who is late, what is refused."""

import contextlib
import itertools
import json
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity

from compiled_fsdp import (
    MixedPrecisionPolicy,
    compiled_autograd,
    explain,
    fully_shard,
    profile,
    record_collective_names,
)
from compiled_fsdp.compat.profiling import ProfiledEvent
from compiled_fsdp.tools.profile_ranks import merged
from compiled_fsdp.tools.profile_recorder import Launched, ProfileError, Span
from compiled_fsdp.tools.profile_steps import measured_step, steps_in
from compiled_fsdp.tools.profile_text import _beside
from compiled_fsdp.tools.profile_times import in_line, times_of
from tests.harness import Transformer, batch, compiled, distributed, forward_backward, shard, variants
from tests.harness.models import PartlyDisabled, broken, small

LATE = 0.5  # seconds that a rank sleeps: far above what a step takes here


def profiled(model, run, steps=2, before=2, **options):
    """A profile of some steps after others."""
    for index in range(before):
        forward_backward(run, index)
    with profile(model, **options) as p:
        for index in range(steps):
            forward_backward(run, index)
    return p


def check(p, steps=2):
    """Sums agree with each other, and lanes hold one thing at a time."""
    found = p.result
    assert len(found.steps) == steps
    for step in found.steps:
        assert 0 < step.compute_s < step.seconds
        assert step.exposed_s >= 0
        assert step.most_exposed[2] <= step.exposed_s + 1e-12
        assert 0 <= step.off_core_s < step.seconds
        assert step.planned_s == pytest.approx(step.planned_compute_s + step.planned_exposed_s)
    assert 0 <= found.hidden <= 1
    assert json.loads(json.dumps(p.to_dict()))["collectives"]
    assert str(p)
    assert all(len(line) <= 100 for line in p.table().splitlines())
    timeline = p.timeline()
    measured = [task for graph in timeline.graphs for task in graph.measured]
    assert sum(task.exposed_s for task in measured) in [pytest.approx(step.exposed_s) for step in found.steps]
    lanes = {}
    for task in sorted(measured, key=lambda task: (task.start_s, task.end_s)):
        lanes.setdefault(task.stream, []).append(task)
    for lane in lanes.values():
        for one, following in itertools.pairwise(lane):
            assert one.end_s <= following.start_s + 1e-9, (one, following)
    return found


def by_kind(found):
    return Counter({c.kind: 0 for c in found.collectives}) + Counter(
        kind for c in found.collectives for kind in [c.kind] * c.per_step
    )


@distributed(world_size=2)
def test_a_whole_graph(rank, world_size):
    """Every collective of the plan is there, with its name, its bytes and its plan."""
    model = shard(Transformer(), fully_shard)
    p = profiled(model, compiled(model, bucket="module"))
    found = check(p)
    graphs = {graph.phase: graph for graph in explain(model).graphs}
    planned = [(c.bucket.kind, c.bucket.bytes, c.seconds) for g in graphs.values() for c in g.collectives]
    assert [(c.kind, c.bytes, c.planned_s) for c in found.collectives] == planned
    assert {c.graph for c in found.collectives} == {"forward", "backward"}
    assert {c.per_step for c in found.collectives} == {1}
    names = {c.name for c in found.collectives if c.kind == "gather"}
    assert "blocks.1.* (10)" in names
    assert f"rank {rank}, 2 steps" in str(p)
    assert "of communication hidden" in str(p)
    assert sum(s.planned_s for s in found.steps) == pytest.approx(
        2 * sum(g.simulation.seconds for g in graphs.values())
    )


@distributed(world_size=2)
def test_names_in_the_trace(rank, world_size, tmp_path):
    """Torch's own trace has the bucket's name at each launch and each wait, and gathers before their waits."""
    model = shard(Transformer(), fully_shard)
    p = profiled(model, compiled(model, bucket="module"), steps=1)
    p.trace(tmp_path / f"{rank}.json")
    events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
    ranges = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    order = [e["name"] for e in ranges]
    for c in p.result.collectives:
        title = f"{c.kind} {c.name}"
        launches, waits = (
            [i for i, name in enumerate(order) if name == f"{title}: {what}"] for what in ("launch", "wait")
        )
        assert len(launches) == len(waits) >= 1
        assert all(launch < wait for launch, wait in zip(launches, waits, strict=True))
    ops = [e for e in events if e.get("name") == "_c10d_functional::wait_tensor"]
    inside = [
        e for e in ops for r in ranges
        if r["name"].endswith(": wait") and r["ts"] <= e["ts"] <= r["ts"] + r["dur"]
    ]  # fmt: skip
    assert len(inside) == len(ops) == sum(c.per_step for c in p.result.collectives)


@pytest.mark.more
@distributed(world_size=2)
def test_names_in_a_profiler_of_ones_own(rank, world_size):
    """One rank may ask for them alone; what compiles meanwhile is all right."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    names = record_collective_names(model) if rank == 0 else contextlib.nullcontext()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own, names:
        forward_backward(run, 0)
    named = Counter(event.name for event in own.events() if event.name.endswith((": launch", ": wait")))
    planned = [c.bucket.kind for graph in explain(model).graphs for c in graph.collectives]
    assert len(named) == (2 * len(planned) if rank == 0 else 0)
    assert sum(name.startswith("gather ") for name in named) == (2 * planned.count("gather") if rank == 0 else 0)
    with pytest.raises(RuntimeError, match="do not nest"), record_collective_names(model), profile(model):
        pass
    with (
        pytest.raises(ValueError, match=r"record_collective_names: .*fully_shard"),
        record_collective_names(torch.nn.Linear(2, 2)),
    ):
        pass


@distributed(world_size=2)
def test_a_broken_graph(rank, world_size):
    """Equal layers share graphs, but each gather and reduction has its own layer's name."""
    model = shard(broken(blocks=4), fully_shard)
    p = profiled(model, compiled(model))
    found = check(p)
    for block in range(4):
        name = f"blocks.{block}.* (4)"
        its = [c for c in found.collectives if c.name == name]
        graphs = [("gather", "forward"), ("gather", "backward"), ("reduce", "backward")]
        assert [(c.kind, c.graph) for c in its] == graphs
        assert all(c.per_step == 1 and c.planned_s > 0 for c in its)
    runs = [graph.name.partition(" ")[2] for graph in p.timeline().graphs]
    assert [name for name in runs if name.startswith("forward of blocks")] == [
        f"forward of blocks.{i}" for i in range(4)
    ]
    assert sum(name.startswith("backward") for name in runs) >= 4


@pytest.mark.more
@distributed(world_size=2)
def test_who_is_late(rank, world_size):
    model = shard(Transformer(), fully_shard)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    with profile(model) as p:
        for index in range(2):
            if rank == 1:
                time.sleep(LATE)
            forward_backward(run, index)
    worst = p.result.stragglers[0]
    assert (worst.rank, worst.waiting) == (1, 0)
    assert worst.seconds > LATE / 2
    assert "a straggler: rank 0 waits" in str(p)
    assert "for rank 1" in str(p)
    if rank == 0:  # what it waits is not the wires' time
        gathers = [c for c in p.result.collectives if c.kind == "gather"]
        assert max(c.exposed_s for c in gathers) > LATE / 2
        assert max(c.seconds for c in gathers) < LATE / 2


@pytest.mark.more
@distributed(world_size=2)
def test_ways_to_run(rank, world_size):
    """Layers in eager code, compiled autograd, inference, microbatches, coalesced buckets, low precision."""
    partly = shard(PartlyDisabled(), fully_shard)
    found = check(profiled(partly, compiled(partly)))
    eager = [c for c in found.collectives if not c.graph]
    assert any("blocks.1" in c.name for c in eager if c.kind == "gather")
    assert any("blocks.1" in c.name for c in eager if c.kind == "reduce")

    def with_autograd(run, index):
        with compiled_autograd():
            forward_backward(run, index)

    model = shard(small(), fully_shard)
    run = compiled(model)
    for index in range(3):
        with_autograd(run, index)
    with profile(model) as p:
        for index in range(2):
            with_autograd(run, index)
    assert {"gather", "reduce"} <= set(by_kind(check(p)))
    with torch.no_grad():
        for _ in range(2):
            run(batch(rank, 0)[0])
        with profile(model) as p:
            for _ in range(3):
                run(batch(rank, 0)[0])
    assert set(by_kind(check(p, steps=3))) == {"gather"}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(small(), fully_shard, mp_policy=half)
    check(profiled(model, compiled(model)))


@distributed(world_size=2)
def test_steps_that_the_program_counts(rank, world_size):
    model = shard(small(), fully_shard)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    with profile(model) as p:
        for _ in range(2):
            for index in range(3):
                forward_backward(run, index)
            p.step()
    found = check(p)
    assert all(c.per_step % 3 == 0 for c in found.collectives)
    with profile(model) as p:
        forward_backward(run, 0)
        time.sleep(LATE)
        forward_backward(run, 0)
        p.step()
    (step,) = check(p, steps=1).steps
    assert step.off_core_s > 0.9 * LATE  # neither at work nor waiting for a collective
    assert step.exposed_s + step.off_core_s < step.seconds
    assert "other threads had the core" in str(p)


@pytest.mark.more
@distributed(world_size=4)
def test_replicas(rank, world_size):
    """With HSDP a reduction has a second half over the replicas, in one graph and in several."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for build in (small, broken):
        model = shard(build(), fully_shard, mesh=mesh)
        found = check(profiled(model, compiled(model)))
        kinds = by_kind(found)
        assert kinds["reduce"] == kinds["all_reduce"] > 0
        halves = {kind: {c.name for c in found.collectives if c.kind == kind} for kind in ("reduce", "all_reduce")}
        assert halves["reduce"] == halves["all_reduce"]


# ---- what is refused -------------------------------------------------------------------------------------------------
@distributed(world_size=2)
def test_what_is_no_profile(rank, world_size):
    with pytest.raises(ValueError, match="fully_shard"):
        profile(torch.nn.Linear(2, 2))
    model = shard(small(), fully_shard)
    with pytest.raises(ProfileError, match=r"torch\.compile\(model, backend='compiled_fsdp'\)"), profile(model):
        forward_backward(model, 0)  # not compiled
    run = compiled(model)
    with pytest.raises(ProfileError, match="take a step"), profile(model):
        pass
    with pytest.raises(RuntimeError, match="do not nest"), profile(model), profile(model):
        pass
    with (
        pytest.raises(RuntimeError, match=r"a torch\.profiler is active"),
        torch.profiler.profile(activities=[ProfilerActivity.CPU]),
        profile(model),
    ):
        pass
    forward_backward(run, 0)
    p = profiled(model, run)
    with pytest.raises(RuntimeError, match="make a new one"), p:
        pass
    with pytest.raises(RuntimeError, match="after leaving"):
        profile(model).to_dict()


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_steps_that_compile_do_not_count(rank, world_size):
    model = shard(small(), fully_shard)
    run = compiled(model)
    with pytest.raises(ProfileError, match="compiled in each step"), profile(model):
        forward_backward(run, 0)
    torch._dynamo.reset()
    p = profiled(model, run, before=0, steps=3)
    assert len(p.result.steps) == 2
    assert "1 left out" in str(p)


@distributed(world_size=2)
def test_a_rank_that_fails_or_does_not_come(rank, world_size):
    """The others get an error that names it; the next profile is all right; ops are as they were."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    before = torch.ops._c10d_functional.wait_tensor.default._op

    def fail_on(failing):
        forward_backward(run, 0)
        if rank == failing:
            raise ZeroDivisionError("mine")

    error, text = (ZeroDivisionError, "mine") if rank == 1 else (ProfileError, r"rank 1 left .* ZeroDivisionError")
    with pytest.raises(error, match=text), profile(model):
        fail_on(1)
    error, text = (ZeroDivisionError, "mine") if rank == 0 else (ProfileError, r"rank 0 left .* ZeroDivisionError")
    with pytest.raises(error, match=text), profile(model):
        fail_on(0)
    assert torch.ops._c10d_functional.wait_tensor.default._op is before
    check(profiled(model, run, before=0))


@distributed(world_size=2)
@pytest.mark.parametrize("missing", variants([0, 1], 1))
def test_a_rank_that_never_profiles(rank, world_size, missing):
    """The other one's error names it; after that they profile together again."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    if rank == missing:
        forward_backward(run, 0)
    else:
        seconds = 1 if missing == 1 else 11  # rank 0 is given the time in which it waits itself
        with (
            pytest.raises(ProfileError, match=rf"rank {missing} of the group did not leave .* within {seconds} s"),
            profile(model, timeout=timedelta(seconds=1)),
        ):
            forward_backward(run, 0)
    dist.barrier()
    check(profiled(model, run, before=0))


# ---- in parts --------------------------------------------------------------------------------------------------------
def test_whose_lateness_it_is():
    """The rank whose collective was in flight shortest; the others' waiting beyond that is lost to it."""
    summaries = [
        {"0,1,2": [(0, 5.0, 4.5), (1, 1.0, 0.5)]},
        {"0,1,2": [(0, 1.0, 1.0), (1, 1.0, 0.0)]},
        {"0,1,2": [(0, 4.0, 0.5), (1, 3.0, 3.0)], "2,3": [(0, 7.0, 7.0)]},
    ]
    together = merged(summaries)
    assert together.fastest == {"0,1,2": [1.0, 1.0], "2,3": [7.0]}
    assert together.lost == {1: {0: 3.5}, 0: {2: 2.0}}
    assert merged(summaries, left_out=[1]).lost == {1: {0: 3.5}}
    with pytest.raises(ProfileError, match="rank 1 ran 0 collectives of ranks 0,1, and rank 0 1"):
        merged([{"0,1": [(0, 1.0, 1.0)]}, {"0,1": []}])


def test_two_at_once_share_the_wires():
    assert in_line([(0, 10), (2, 12), (20, 25)]) == [(0, 10), (10, 12), (20, 25)]
    assert in_line([(0, 10), (1, 3)]) == [(3, 10), (1, 3)]


KERNELS = [(20, 50, 20, 1), (50, 90, 20, 2), (25, 40, 7, 3), (50, 95, 7, 4), (95, 120, 7, 5)]
"""Start, end, stream, and the op that launched it: two gathers on a stream of their own, three kernels of compute."""


def device_record(kernels=KERNELS):
    """What a GPU's profile has."""

    def host(name, start, end, number=0, is_range=False):
        return ProfiledEvent(name, start, end, 1, is_range, True, (0, 0), number, 0, -1)

    events = [
        host("gather a: launch", 0, 10, is_range=True),
        host("c10d::_allgather_base_", 2, 9, 1),
        host("gather b: launch", 10, 20, is_range=True),
        host("c10d::_allgather_base_", 12, 19, 2),
        host("aten::mm", 21, 22, 3),
        host("gather a: wait", 23, 24, is_range=True),
        host("aten::mm", 25, 26, 4),
        host("gather b: wait", 27, 28, is_range=True),
        host("aten::mm", 29, 30, 5),
        *(
            ProfiledEvent("", start, end, 0, False, False, (0, stream), 0, launched_by, -1)
            for start, end, stream, launched_by in kernels
        ),
    ]
    spans = []
    launched = {name: Launched("gather", name, (name,), 8, (0, 1), 1, None, 0) for name in "ab"}
    for name, what in ("a", "launch"), ("b", "launch"), ("a", "wait"), ("b", "wait"):
        spans.append(Span(what, f"gather {name}: {what}", False, 0, None, launched[name]))
    return spans, sorted(events, key=lambda event: event.start_ns)


def test_kernels_on_a_stream_of_their_own():
    """Compute stands still from 40 to 50, while gather a runs; gather b is done before the kernel that needs it."""
    times = times_of(*device_record())
    assert [(c.of.name, c.wires, c.exposed) for c in times.collectives] == [("a", (20, 50), 10), ("b", (50, 90), 0)]
    assert times.kernels == ((25, 40), (50, 95), (95, 120))


def test_a_host_that_is_behind():
    """Gather a takes 5 ns of a gap in compute of 60: the other 55 nobody waits for it."""
    late = [(50, 55, 20, 1), (55, 57, 20, 2), (25, 40, 7, 3), (100, 110, 7, 4), (110, 120, 7, 5)]
    times = times_of(*device_record(late))
    assert [c.exposed for c in times.collectives] == [5, 0]
    (step,) = steps_in(times, said=True)
    measured = measured_step(step)
    assert measured.idle_s == pytest.approx(1e-9 * (120 - (15 + 10 + 10) - 5))
    assert measured.most_exposed == ("gather", "a", pytest.approx(5e-9))


def test_a_profiler_that_lost_a_range():
    spans, events = device_record()
    with pytest.raises(ProfileError, match=r"0 of 1 ranges 'gather b: wait'"):
        times_of(spans, [event for event in events if event.name != "gather b: wait"])


def test_a_ratio_is_told_in_words():
    """A step that takes 32 times as long as planned is not "-97%"."""
    assert _beside(2.2e-3, 69.5e-3) == " (planned 2.2 ms: 32 times as long)"
    assert _beside(2e-3, 2.4e-3) == " (planned 2.0 ms: 20% longer)"
    assert _beside(2e-3, 1.8e-3) == " (planned 2.0 ms: 10% shorter)"
    assert _beside(2e-3, 2e-3) == " (planned 2.0 ms: as planned)"
    assert _beside(9e-3, 3e-3) == " (planned 9.0 ms: 3 times as short)"
