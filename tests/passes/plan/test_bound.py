"""The lower bound: worked out by hand, and below every schedule."""

import itertools
import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from compiled_fsdp.passes.plan.bound import batched, jackson, lower_bound
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.simulate import makespan, simulate
from tests.passes.plan.cases import (
    FREE,
    QUICK,
    gather,
    random_schedules,
    random_tasks,
    reduction,
    single_schedules,
    tasks_and_schedules,
    tasks_of,
    without_latency,
)
from tests.passes.plan.simulator import curve
from tests.passes.plan.test_simulate import with_models_own


# ---- by hand ---------------------------------------------------------------------------------------------------------
def test_compute_alone():
    assert lower_bound(tasks_of([4, 5])).seconds == 9


def test_a_stream_alone():
    """g0 0-9, g1 9-18, then layer 1's second."""
    assert lower_bound(tasks_of([1, 1], [(9, 0, 0), (9, 1, 1)])).seconds == 19


def test_the_first_gather_and_the_last_reduction_cannot_hide():
    """3 s of gather, 8 of compute, 5 of reduction: neither compute's 8 nor the channel's 8 say so."""
    assert lower_bound(tasks_of([4, 4], [(3, 0, 0)], [(5, 2)])).seconds == 16


def test_the_second_gather_delays_its_own_layer_only():
    """Gathers of 3 and 6 s: layer 0 could run 3-7, layer 1 cannot start before 9."""
    assert lower_bound(tasks_of([4, 4], [(3, 0, 0), (6, 1, 1)])).seconds == 13


def test_reductions_queue_behind_their_producers():
    """Gradients at 4 and 8 s, 6 s each on the channel: 4-10-16."""
    assert lower_bound(tasks_of([4, 4], reductions=[(6, 1), (6, 2)])).seconds == 16


def test_gathers_and_reductions_share_a_channel():
    """A gather of 6 s for layer 1, and a gradient of layer 0 with a reduction of 6 s; layers of 1 s.

    Gathers alone end at 6 + 1, reductions alone at 1 + 6; but the channel has 12 s of work. With a channel of its own
    the reduction goes out at 1: before compute waits for the gather.
    """
    tasks = tasks_of([1, 1], [(6, 1, 1)], [(6, 1)])
    assert lower_bound(tasks).seconds == 12
    assert simulate(tasks, (gather(0, 0, 1), reduction(0, 1, 2))).seconds == 12
    own = replace(tasks, channels={**tasks.channels, "own": replace(FREE, stream=1)})
    own = replace(own, reductions=(replace(own.reductions[0], channel="own"),))
    assert lower_bound(own).seconds == 7
    assert simulate(own, (gather(0, 0, 1), reduction(0, 1, 2))).seconds == 7


def test_memory_holds_a_gather_back():
    """Layer 0 computes with 90 bytes for 5 s; a gather of 20 s and bytes has no room beside it in 100."""
    tasks = tasks_of([5, 1], [(20, 1, 1)], memory=[90, 10])
    assert lower_bound(tasks).seconds == 21
    assert lower_bound(tasks, 110).seconds == 21
    assert lower_bound(tasks, 109).seconds == 26
    assert simulate(tasks, (gather(0, 1, 1),)).seconds == 26
    assert lower_bound(replace(tasks, persistent=50), 159).seconds == 26


def test_a_gather_held_back_delays_later_ones_only():
    """As above, with a gather of 2 s used at once: 2, 5 s of layer 0, 20, 1. It has 90 + 2 + 20 bytes beside it."""
    tasks = tasks_of([5, 1], [(2, 0, 0), (20, 1, 1)], memory=[90, 10])
    assert lower_bound(tasks, 112).seconds == 23
    # the release of the second is by compute alone, at 5; what the gather before it costs compute is not counted
    assert lower_bound(tasks, 111).seconds == 26
    assert simulate(tasks, (gather(0, 0, 0), gather(1, 1, 1))).seconds == 28


def test_a_gather_held_back_can_be_overtaken():
    """The first one has room from 5 s on: 5-25; the second one, of 2 s, goes out before it. Layers 1 and 2 25-27."""
    tasks = tasks_of([5, 1, 1], [(20, 1, 1), (2, 2, 2)], memory=[90, 10, 10])
    seen = simulate(tasks, (gather(1, 0, 2), gather(0, 1, 1)))
    assert (seen.seconds, seen.peak) == (27, 92)
    assert lower_bound(tasks, 109).seconds == 27


def test_peak():
    """Persistent 100; segment 1 has its own 3 and both gathers'; segment 2 the second gather's and a gradient's 16."""
    tasks = tasks_of([1, 1, 1], [(10, 0, 1), (20, 1, 2)], [(16, 2)], memory=[1, 3, 5], persistent=100)
    assert lower_bound(tasks).peak == 100 + 5 + 20 + 16
    tasks = replace(tasks, reductions=())
    assert lower_bound(tasks).peak == 100 + 3 + 10 + 20


def test_peak_keeps_the_reduced_gradients():
    """Two ranks: 8 of a first gradient's 16 bytes are there to the end."""
    tasks = tasks_of([1, 1, 1], reductions=[(16, 1)], memory=[0, 0, 40])
    assert lower_bound(tasks).peak == 48


def test_a_reduction_can_wait_for_a_better_place():
    """A gradient of 8 bytes, complete before a segment of 90 bytes and needed at the end.

    What its reduction receives does not have to be there in that segment.
    """
    tasks = tasks_of([1, 1, 1], reductions=[(8, 1)], memory=[0, 90, 0])
    assert simulate(tasks, (reduction(0, 1, 1),)).peak == 90 + 8 + 4
    assert simulate(tasks, (reduction(0, 2, 2),)).peak == 90 + 8
    assert lower_bound(tasks).peak == 90 + 8


def test_latency_and_copies_are_not_counted():
    """A larger bucket could save them."""
    channel = CommChannel(latency=3.0, each=1.0, bytes_per_second=2.0, world=2)
    tasks = tasks_of([1], [(8, 0, 0), (4, 0, 0)], channel=channel, copy_seconds=1.0, contention=1.0)
    assert lower_bound(tasks).seconds == 7


@pytest.mark.parametrize(("shared", "seconds"), [(False, 13), (True, 15)])
def test_beside_one_of_the_models_own(shared, seconds):
    """Layers of 4 s, between which the model waits 5 s for its own; a gather of 6 s for the second.

    Over another link the gather is hidden: 4 + 5 + 4. Over the same one it goes first, 0-6.
    """
    tasks = with_models_own(tasks_of([4, 0, 4], [(6, 2, 2)]), (5, 1, 1), shared=shared)
    best = min(simulate(tasks, (gather(0, at, 2),)).seconds for at in range(3))
    assert lower_bound(tasks).seconds <= best == seconds


def test_one_of_the_models_own_that_is_waited_for_later():
    """Launched at 4, waited for behind layer 1, which takes 1 s: 4 + 5 + 4."""
    assert lower_bound(with_models_own(tasks_of([4, 1, 4]), (5, 1, 2))).seconds == 13


# ---- Jackson's rule --------------------------------------------------------------------------------------------------
def by_brute_force(jobs: list[tuple[int, int, int]]) -> int:
    """The least max(end + tail) over everything that one machine can do in unit steps."""
    best: dict[tuple[int, ...], int] = {tuple(length for _, length, _ in jobs): 0}  # what is left -> worst so far
    horizon = max(head for head, _, _ in jobs) + sum(length for _, length, _ in jobs)
    done = []
    for now in range(horizon + 1):
        following: dict[tuple[int, ...], int] = {}
        for left, worst in best.items():
            if not any(left):
                done.append(worst)
                continue
            following[left] = min(worst, following.get(left, worst))  # idle
            for i, (head, _, tail) in enumerate(jobs):
                if left[i] and head <= now:
                    after = (*left[:i], left[i] - 1, *left[i + 1 :])
                    value = worst if after[i] else max(worst, now + 1 + tail)
                    following[after] = min(value, following.get(after, value))
        best = following
    return min(done)


def test_jackson_by_hand():
    """Job 0 runs 0-2, is interrupted by job 1 with the longer tail (2-5), and ends 5-7: 5 + 6 and 7 + 1."""
    assert jackson([(0, 4, 1), (2, 3, 6)]) == 11
    # without interruption 0-4-7 and 7 + 6
    assert jackson([]) == 0


@QUICK
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=4))
def test_jackson_is_the_best_that_one_machine_can_do(jobs):
    assert jackson(jobs) == by_brute_force(jobs)


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 4, 1), (2, 3, 6), (3, 1, 9)])))
def test_jackson_does_not_depend_on_the_order_of_jobs(order):
    """Job 0 0-2, job 1 2-3, job 2 3-4, job 1 4-6, job 0 6-8: 13, 12 and 9."""
    assert jackson(order) == 13


# ---- batches ---------------------------------------------------------------------------------------------------------
def divisions(jobs: tuple[tuple[int, int], ...]):
    """Every way to make batches of consecutive jobs."""
    for cuts in itertools.product((False, True), repeat=max(len(jobs) - 1, 0)):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut]
        yield [jobs[i:j] for i, j in zip([0, *ends], [*ends, len(jobs)], strict=True)]


@QUICK
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 3))
def test_batched_is_the_best_of_all_batches_in_all_orders(jobs, latency):
    best = math.inf
    for order in itertools.permutations(jobs):
        for batches in divisions(order):
            now = worst = 0
            for batch in batches:
                now += latency + sum(length for _, length in batch)
                worst = max(worst, now + max(tail for tail, _ in batch))
            best = min(best, worst)
    assert best * (1 - 2e-6) <= batched(jobs, latency) <= best


# ---- below every schedule --------------------------------------------------------------------------------------------
@QUICK
@given(tasks_and_schedules())
def test_no_schedule_is_below_the_bound(case):
    tasks, schedule = case
    bound, seen = lower_bound(tasks), simulate(tasks, schedule)
    assert seen.seconds >= bound.seconds - 1e-9
    assert max(curve(tasks, schedule)) >= bound.peak


@QUICK
@given(st.data())
def test_no_schedule_within_a_budget_is_below_the_bound(data):
    """The tightest budget that the schedule is within makes the highest bound."""
    tasks = data.draw(random_tasks())
    schedule = data.draw(random_schedules(tasks))
    seen = simulate(tasks, schedule)
    bound = lower_bound(tasks, seen.peak)
    assert seen.seconds >= bound.seconds - 1e-9
    assert seen.seconds >= bound.with_latency - 1e-9
    assert bound.with_latency >= bound.seconds
    assert bound.seconds >= lower_bound(tasks).seconds


@QUICK
@given(random_tasks(segments=3, gathers=2, reductions=2, free=True).map(without_latency), st.data())
def test_the_best_of_all_schedules_is_not_below_the_bound(tasks, data):
    """All single launches of tiny tasks, also within a budget."""
    schedules = list(single_schedules(tasks))
    best = min(makespan(tasks, schedule) for schedule in schedules)
    assert best >= lower_bound(tasks).seconds - 1e-9
    peaks = [max(curve(tasks, schedule)) for schedule in schedules]
    budget = data.draw(st.sampled_from(sorted(set(peaks))[:3]))
    within = min(makespan(tasks, s) for s, peak in zip(schedules, peaks, strict=True) if peak <= budget)
    assert within >= lower_bound(tasks, budget).seconds - 1e-9
