"""Divisions into buckets: the best ones against all, and the plain ones."""

import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.passes.plan import bucketing
from compiled_fsdp.passes.plan.bucketing import (
    Bucketing,
    by_size,
    by_unit,
    earliest_launches,
    gather_buckets,
    mirror,
    one_by_one,
    reduction_buckets,
)
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.tasks import CollectiveTask, Tasks
from tests.passes.plan.cases import FAST, LLAMA, QUICK, gather, layers, random_tasks, reduction, tasks_of
from tests.passes.plan.simulator import play

NO_LIMIT = float("inf")


def divisions(count: int) -> Iterator[Bucketing]:
    """All contiguous ones."""
    for cuts in itertools.product((False, True), repeat=max(count - 1, 0)):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        yield tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False))


def gathered(tasks: Tasks, buckets: Bucketing) -> float:
    """Seconds with every launch at the start."""
    return play(tasks, tuple(gather(b, 0, tasks.gathers[b[0]].first) for b in buckets)).now


def reduced(tasks: Tasks, buckets: Bucketing) -> float:
    """Seconds with every launch as soon as its bucket is complete, waited for at the end."""
    launches = (reduction(b, tasks.reductions[b[-1]].first, tasks.end) for b in buckets)
    return play(tasks, tuple(launches)).now


@st.composite
def sides(draw) -> tuple[list[float], list[tuple[int, int]], CommChannel]:
    """Seconds of segments, (bytes, first use) of up to 8 gathers, and a channel with latency."""
    seconds = draw(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8))
    uses = sorted(draw(st.lists(st.integers(0, len(seconds) - 1), min_size=1, max_size=8)))
    sizes = [draw(st.integers(1, 10)) for _ in uses]
    latency = draw(st.sampled_from([0.0, 0.5, 2.0, 5.0]))
    return seconds, list(zip(sizes, uses, strict=True)), CommChannel(latency, 0.0, draw(st.sampled_from([1.0, 2.0])), 2)


# ---- the best division -----------------------------------------------------------------------------------------------
def test_latency_merges():
    """Both are needed at once: 10 + 2 in one call, 11 + 11 in two."""
    tasks = tasks_of([1], [(1, 0, 0), (1, 0, 0)], channel=CommChannel(10.0, 0.0, 1.0, 2))
    assert gather_buckets(tasks, NO_LIMIT) == ((0, 1),)


def test_without_latency_what_is_needed_later_does_not_hold_up():
    """Layer 0 runs 1-10 while the other one's gather of 8 s runs 1-9."""
    tasks = tasks_of([9, 1], [(1, 0, 0), (8, 1, 1)])
    assert gather_buckets(tasks, NO_LIMIT) == ((0,), (1,))


def test_one_call_for_what_hides():
    """Latency 2, layers of 6 s. Alone: 3-6-9-12 on the channel, each there in time; but two calls fewer do as well."""
    channel = CommChannel(2.0, 0.0, 1.0, 2)
    tasks = tasks_of([6, 6, 6], [(1, 0, 0), (1, 1, 1), (1, 2, 2)], channel=channel)
    assert gathered(tasks, gather_buckets(tasks, NO_LIMIT)) == 21
    # the first alone is the best first bucket: with the second it would be there at 4
    assert gather_buckets(tasks, NO_LIMIT)[0] == (0,)


def test_kinds_are_not_mixed():
    tasks = tasks_of([1], [(1, 0, 0)] * 3, channel=CommChannel(10.0, 0.0, 1.0, 2))
    other = CollectiveTask(1, 1, 0, "other", TensorSize(1), 0, 0)
    tasks = Tasks(
        tasks.phase,
        tasks.segments,
        (tasks.gathers[0], other, tasks.gathers[2]),
        (),
        {**tasks.channels, "other": tasks.channels["channel"]},
    )
    assert gather_buckets(tasks, NO_LIMIT) == ((0,), (1,), (2,))


def test_a_budget_divides():
    """One call of all would be best, but all three never fit at once: 4 bytes in each layer's 5."""
    tasks = tasks_of([1, 1, 1], [(4, 0, 0), (4, 1, 1), (4, 2, 2)], channel=CommChannel(10.0, 0.0, 1.0, 2))
    assert gather_buckets(tasks, NO_LIMIT) == ((0, 1, 2),)
    assert gather_buckets(tasks, 8) == ((0, 1), (2,))
    assert gather_buckets(tasks, 5) == ((0,), (1,), (2,))
    assert gather_buckets(tasks, 1) == ((0,), (1,), (2,))


def test_a_busy_channel_counts():
    """Gathers for layers 2 and 3 have room from layer 1's 20 s on: one call of 3 + 2 s hides, and is done sooner.

    After 30 s of other collectives it would be there at 35 and layer 3 end at 43; alone they are at 34 and 38: 42.
    """
    channel = CommChannel(3.0, 0.0, 1.0, 2)
    tasks = tasks_of([1, 20, 4, 4], [(1, 2, 2), (1, 3, 3)], channel=channel, memory=[10, 0, 0, 0])
    assert earliest_launches(tasks, 10) == [1, 1]
    assert gather_buckets(tasks, 10) == ((0, 1),)
    assert gather_buckets(tasks, 10, [0.0] + 6 * [30.0]) == ((0,), (1,))


def test_buckets_grow():
    """Where all but the first hide, each can be as large as the compute ahead of it lets it be."""
    total = sum(LLAMA)
    tasks = layers(8, [8e-3 * size / total for size in LLAMA], LLAMA, FAST)
    sizes = [sum(tasks.gathers[i].size.sent for i in bucket) for bucket in gather_buckets(tasks, NO_LIMIT)]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert sizes[-2] > 10 * sizes[0]


def test_of_equally_fast_divisions_the_one_with_fewer_buckets_is_best():
    """Sums of tenths differ by rounding: everything after the first hides, in one call."""
    tasks = tasks_of([10.1] + [0.1] * 5, [(1, i, i) for i in range(6)], channel=CommChannel(0.3, 0.0, 10.0, 2))
    assert gather_buckets(tasks, NO_LIMIT) == ((0,), (1, 2, 3, 4, 5))


@QUICK
@given(sides())
def test_gather_buckets_are_the_best(side):
    seconds, members, channel = side
    tasks = tasks_of(seconds, [(size, use, use) for size, use in members], channel=channel)
    best = min(gathered(tasks, division) for division in divisions(len(members)))
    found = gather_buckets(tasks, NO_LIMIT)
    assert [i for bucket in found for i in bucket] == list(range(len(members)))
    assert gathered(tasks, found) <= 1.05 * best  # as not every state is kept
    with mock.patch.object(bucketing, "MAX_STATES_KEPT", 100):
        assert gathered(tasks, gather_buckets(tasks, NO_LIMIT)) == pytest.approx(best, rel=1e-9)


@QUICK
@given(sides())
def test_reduction_buckets_are_the_best(side):
    seconds, members, channel = side
    tasks = tasks_of(seconds, reductions=[(size, use + 1) for size, use in members], channel=channel)
    best = min(reduced(tasks, division) for division in divisions(len(members)))
    found = reduction_buckets(tasks, NO_LIMIT)
    assert [i for bucket in found for i in bucket] == list(range(len(members)))
    assert reduced(tasks, found) <= 1.05 * best  # as not every state is kept
    with mock.patch.object(bucketing, "MAX_STATES_KEPT", 100):
        assert reduced(tasks, reduction_buckets(tasks, NO_LIMIT)) == pytest.approx(best, rel=1e-9)


@QUICK
@given(sides())
def test_reductions_are_gathers_in_the_mirror(side):
    """Gathers used in a forward take as long as the reductions of its backward, the same division reversed."""
    seconds, members, channel = side
    forward = tasks_of(seconds, [(size, use, use) for size, use in members], channel=channel)
    count, segments = len(members), len(seconds)
    backward = tasks_of(
        seconds[::-1], reductions=[(size, segments - use) for size, use in members[::-1]], channel=channel
    )
    for division in divisions(count):
        mirrored = tuple(tuple(count - 1 - i for i in bucket[::-1]) for bucket in division[::-1])
        assert reduced(backward, mirrored) == pytest.approx(gathered(forward, division), rel=1e-9)


def test_mirror():
    """Made by segment 0 of 1, 2, 3 s: in the mirror (0, 3, 2, 1, 0 s) it has to be there before its fourth segment."""
    tasks = tasks_of([1, 2, 3], reductions=[(5, 1), (7, 3)])
    seen = mirror(tasks)
    assert [segment.seconds for segment in seen.segments] == [0, 3, 2, 1, 0]
    assert [(task.size.sent, task.first) for task in seen.gathers] == [(7, 1), (5, 3)]
    assert seen.reductions == ()


# ---- memory ----------------------------------------------------------------------------------------------------------
def room_for(tasks: Tasks, places: Sequence[int], upto: int, budget: float) -> bool:
    """Whether the gathers before ``upto`` fit from launch to last use, up to the last one's first use."""
    for index in range(places[upto - 1], tasks.gathers[upto - 1].first):
        held = sum(
            task.size.full for task, at in zip(tasks.gathers[:upto], places, strict=False) if at <= index <= task.last
        )
        if tasks.persistent + tasks.segments[index].bytes + held > budget:
            return False
    return True


@QUICK
@given(random_tasks(reductions=0), st.integers(0, 200))
def test_earliest_launches_fit_and_none_earlier_does(tasks, budget):
    found = earliest_launches(tasks, budget)
    assert found == sorted(found)
    for i, (task, at) in enumerate(zip(tasks.gathers, found, strict=True)):
        assert at <= max(task.first, found[i - 1] if i else 0)
        assert room_for(tasks, found, i + 1, budget)
        lowest = found[i - 1] if i else 0
        for earlier in range(lowest, min(at, task.first)):
            assert not room_for(tasks, [*found[:i], earlier], i + 1, budget), (i, earlier)


# ---- plain divisions -------------------------------------------------------------------------------------------------
def items_of(*of: tuple) -> tuple[CollectiveTask, ...]:
    """Of (block, position, channel, bytes)."""
    return tuple(
        CollectiveTask(i, unit, position, channel, TensorSize(size), i, i)
        for i, (unit, position, channel, size) in enumerate(of)
    )


def test_by_unit():
    """In registration order within a block, channels apart, blocks in the order of their first collectives."""
    members = items_of((1, 1, "a", 4), (0, 0, "a", 4), (1, 0, "a", 4), (1, 2, "b", 4), (0, 1, "a", 4))
    assert by_unit(members) == ((2, 0), (1, 4), (3,))
    assert by_unit(()) == ()


def test_by_size():
    """3 MB: 1 + 2 just fit, 2 more do not; the other channel has its own bucket meanwhile; one of 5 MB is alone."""
    mega = 10**6
    members = items_of(
        (0, 0, "a", mega), (0, 1, "b", mega), (0, 2, "a", 2 * mega), (0, 3, "a", 2 * mega), (0, 4, "b", mega),
        (0, 5, "a", 5 * mega), (0, 6, "a", 1),
    )  # fmt: skip
    assert by_size(members, 3) == ((0, 2), (1, 4), (3,), (5,), (6,))
    assert by_size((), 3) == ()


def test_one_by_one():
    assert one_by_one(items_of((0, 0, "a", 1), (0, 1, "a", 1))) == ((0,), (1,))
