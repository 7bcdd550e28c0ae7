"""The search: what it promises of any tasks, and what it does where the best is known."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE, Kind
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.bucketing import by_size, by_unit
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.plain import SAME_SECONDS
from compiled_fsdp.passes.plan.plain_schedules import at_once, one_ahead_schedule, per_unit
from compiled_fsdp.passes.plan.search import GOOD_ENOUGH, Found, OverBudget, search
from compiled_fsdp.passes.plan.simulate import check, makespan, simulate
from compiled_fsdp.passes.plan.tasks import HARDLY_ANY_BYTES, Tasks
from tests.passes.plan.cases import (
    FAST,
    LLAMA,
    QUICK,
    gather,
    layers,
    random_tasks,
    reduction,
    single_schedules,
    tasks_of,
    with_size,
    without_latency,
)
from tests.passes.plan.simulator import curve, play
from tests.passes.plan.test_simulate import with_models_own

NEARLY = GOOD_ENOUGH * SAME_SECONDS + 1e-4
"""The search ends this close to the bound, merges for so much, and counts a launch as much as 1e-6 of the time."""


def default_limit(tasks: Tasks) -> int:
    return max(max(curve(tasks, at_once(tasks))) + tasks.spare_bytes, *curve(tasks, per_unit(tasks)))


def peak_of(tasks: Tasks, found: Found) -> int:
    """Also that the schedule can run, and takes what the search says."""
    check(tasks, found.schedule)
    assert found.simulation == simulate(tasks, found.schedule)
    assert found.simulation.seconds == pytest.approx(play(tasks, found.schedule).now, rel=1e-9, abs=1e-9)
    return max(curve(tasks, found.schedule))


# ---- any tasks -------------------------------------------------------------------------------------------------------
@QUICK
@given(random_tasks())
def test_without_a_budget(tasks):
    """Between the bound and the plain plans, within what FSDP2's order holds, or what the graph needs and two units."""
    found, limit = search(tasks), default_limit(tasks)
    assert peak_of(tasks, found) <= limit
    assert found.simulation.seconds >= lower_bound(tasks, limit).seconds - 1e-9
    assert found.simulation.seconds <= play(tasks, per_unit(tasks)).now * NEARLY
    for plain in (per_unit(tasks, bucketing="parameter"), at_once(tasks)):
        if max(curve(tasks, plain)) <= limit:
            assert found.simulation.seconds <= play(tasks, plain).now * NEARLY


@QUICK
@given(random_tasks(), st.floats(0, 1))
def test_within_a_budget(tasks, share):
    """Anywhere from the bound to twice what is left free without one: a plan that fits, or an error."""
    lowest, highest = lower_bound(tasks).peak, default_limit(tasks)
    budget = lowest + int(share * (highest - lowest))
    try:
        found = search(tasks, budget)
    except OverBudget as caught:
        error = str(caught)
    else:
        error = ""
    if error:
        assert budget < max(curve(tasks, at_once(tasks)))
        assert "'memory_budget'" in error
        assert f"the budget is {budget:,} bytes" in error
        return
    assert peak_of(tasks, found) <= budget
    assert found.simulation.seconds >= lower_bound(tasks, budget).seconds - 1e-9
    for plain in (per_unit(tasks), per_unit(tasks, bucketing="parameter"), at_once(tasks)):
        if max(curve(tasks, plain)) <= budget:
            assert found.simulation.seconds <= play(tasks, plain).now * NEARLY


@QUICK
@given(random_tasks())
def test_below_the_bound_nothing_fits(tasks):
    """The error names the option, and how much would do: no less than every plan needs."""
    least = lower_bound(tasks).peak
    with pytest.raises(OverBudget, match="option 'memory_budget'") as caught:
        search(tasks, least - 1)
    assert caught.value.least >= least
    assert f"needs {caught.value.least:,} bytes" in str(caught.value)
    assert f"the budget is {least - 1:,} bytes" in str(caught.value)


@pytest.mark.more
@QUICK
@given(random_tasks())
def test_what_an_error_asks_for_is_enough(tasks):
    """With the bytes that the second kind of error names, everything alone at once fits."""
    least, alone = lower_bound(tasks).peak, max(curve(tasks, at_once(tasks)))
    try:
        search(tasks, least)
    except OverBudget as caught:
        needed = re.search(r"needs ([\d,]+) bytes", str(caught))[1]
    else:
        needed = f"{alone:,}"
    assert needed == f"{alone:,}"
    assert peak_of(tasks, search(tasks, alone)) <= alone


@pytest.mark.more
@QUICK
@given(random_tasks())
def test_the_same_tasks_give_the_same_plan(tasks):
    found = search(tasks)
    assert search(tasks) == found
    assert search(Tasks.from_json(tasks.to_json())) == found


@QUICK
@given(random_tasks(segments=3, gathers=2, reductions=2))
def test_at_once_is_the_least_memory_of_gathers(tasks):
    uncast = tuple(with_size(task, copied=False, unpacked=False, decoded=0) for task in tasks.gathers)
    tasks = replace(tasks, gathers=uncast, reductions=())
    least = min(max(curve(tasks, schedule)) for schedule in single_schedules(tasks))
    assert max(curve(tasks, at_once(tasks))) == least == lower_bound(tasks).peak


@QUICK
@given(random_tasks(segments=3, gathers=2, reductions=2))
def test_tiny_tasks_are_close_to_the_best_of_single_launches(tasks):
    """Within the same limit; most are the best, none is far off."""
    limit = default_limit(tasks)
    fits = [s for s in single_schedules(tasks) if max(curve(tasks, s)) <= limit]
    if fits:
        best = min(makespan(tasks, schedule) for schedule in fits)
        assert search(tasks).simulation.seconds <= 1.15 * best + 1e-9


# ---- errors, by hand -------------------------------------------------------------------------------------------------
def test_a_budget_that_just_fits_and_one_that_does_not():
    """90 bytes of segment 0, 10 of its gather; 100 persistent ones."""
    tasks = tasks_of([5, 1], [(10, 0, 0), (20, 1, 1)], memory=[90, 10], persistent=100)
    assert search(tasks, 200).simulation.peak == 200
    with pytest.raises(
        OverBudget, match=r"'memory_budget': the forward graph needs 200 bytes .* the budget is 199 bytes"
    ):
        search(tasks, 199)


def test_a_budget_is_a_trade():
    """Segment 0 computes for 5 s with 90 bytes; the gather of 20 s and bytes is beside it, or after it."""
    tasks = tasks_of([5, 1], [(20, 1, 1)], memory=[90, 10])
    assert search(tasks, 110).simulation.seconds == 21
    assert search(tasks, 109).simulation.seconds == 26


# ---- where the best is known -----------------------------------------------------------------------------------------
def buckets(found: Found, kind: Kind = Kind.GATHER) -> list[tuple[int, ...]]:
    return [launch.indices for launch in found.schedule if launch.kind is kind]


def test_nothing_to_do():
    found = search(tasks_of([3, 4]))
    assert (found.schedule, found.simulation.seconds) == ((), 7)


def test_latency_merges_buckets():
    """Four layers of 1 s; gathers of 1 s and 10 s of latency: 14 s in one call, at least 11 + 11 in two."""
    tasks = tasks_of([1] * 4, [(1, i, i) for i in range(4)], channel=CommChannel(10.0, 0.0, 1.0, 2))
    found = search(tasks, 3)
    assert (found.simulation.peak, len(buckets(found))) == (3, 2)
    found = search(tasks)  # may hold what the link carries in two latencies: 20 bytes
    assert (buckets(found), found.simulation.seconds) == ([(0, 1, 2, 3)], 18)


def test_what_a_plan_may_hold_without_a_budget():
    """Two blocks or what is carried in two latencies, of that no more than hardly matters."""

    def spare(size: int, latency: float, rate: float = 1.0) -> int:
        tasks = tasks_of([1] * 4, [(size, i, i) for i in range(4)], channel=CommChannel(latency, 0.0, rate, 2))
        return tasks.spare_bytes - 2 * tasks.largest_block_bytes

    assert spare(1, 1.0) == spare(5, 2.0) == 0
    assert spare(1, 10.0) == 2 * 10 - 2
    assert spare(1, 1e-3, 1e12) == 2 * HARDLY_ANY_BYTES - 2
    assert spare(HARDLY_ANY_BYTES, 1e-3, 1e12) == 0


def test_latency_merges_reductions():
    """Two layers of 1 s; in one call 2 + 10 + 2, in two 1 + 11 + 11."""
    tasks = tasks_of([1, 1], reductions=[(1, 1), (1, 2)], channel=CommChannel(10.0, 0.0, 1.0, 2))
    found = search(tasks, 100)
    assert (buckets(found, Kind.REDUCE), found.simulation.seconds) == ([(0, 1)], 14)


def test_reductions_that_cannot_go_together_are_divided():
    """Of one block, and it would pay; but segment 1 needs the first one, and makes the second one's gradient."""
    tasks = tasks_of([1, 1, 1], reductions=[(2, 1), (2, 2), (2, 3)], channel=CommChannel(10.0, 0.0, 1.0, 2))
    of_one_block = (replace(r, block_number=0, last=min(r.last, 1 + 2 * i)) for i, r in enumerate(tasks.reductions))
    tasks = replace(tasks, reductions=tuple(of_one_block))
    assert [launch.indices for launch in per_unit(tasks)] == [(0,), (1, 2)]
    simulate(tasks, per_unit(tasks))
    found = search(tasks, 100)
    assert found.schedule[0] == reduction(0, 1, 1)
    assert buckets(found, Kind.REDUCE) == [(0,), (1, 2)]


def test_buckets_grow_in_a_forward():
    """The first bucket is exposed, so it is small; later ones hide, so they are large."""
    total = sum(LLAMA)
    tasks = layers(8, [8e-3 * size / total for size in LLAMA], LLAMA, FAST, copy_seconds=1 / 1.5e12)
    found = search(tasks)
    sizes = [sum(tasks.gathers[i].size.sent for i in bucket) for bucket in buckets(found)]
    assert sizes[0] == min(sizes)
    assert sizes[:6] == sorted(sizes[:6])
    assert max(sizes) > 5 * sizes[0]
    assert found.simulation.seconds < lower_bound(tasks).seconds * 1.02
    assert found.simulation.seconds < simulate(tasks, per_unit(tasks)).seconds
    # only what is needed first is exposed
    late = sum(timing.exposed for timing in found.simulation.timings[1:])
    assert late < 0.01 * found.simulation.seconds


@pytest.mark.parametrize("count", [2, 4, 12])
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("parameters", [1, 3])
def test_a_backward_of_equal_layers_overlaps(count, share, parameters):
    """Where a layer's gather and reduction take no longer than its compute, one of each is exposed at most.

    Also under a budget of two layers over what everything alone needs, which is the default.
    """
    sizes, channel = [6 * 2**20] * parameters, CommChannel(20e-6, 0.0, 100e9, 8)
    both = 2 * (channel.latency + sum(sizes) / channel.bytes_per_second)
    tasks = layers(count, [both / share / 2 / parameters] * parameters, sizes, channel, backward=True)
    assert sum(segment.seconds for segment in tasks.segments[:parameters]) == pytest.approx(both / share)
    found = search(tasks)
    assert found.simulation.exposed <= both * (1 + 1e-6)
    assert found.simulation.seconds <= tasks.seconds_before[-1] + both * (1 + 1e-6)
    # nothing overlaps: every one exposed
    sides = orders.sides_of(tasks, {kind: by_unit(tasks.collectives(kind)) for kind in Kind})
    plain = simulate(tasks, one_ahead_schedule(tasks, *sides, overlap=False))
    assert plain.exposed == pytest.approx(count * both)


def test_one_of_the_models_own_goes_first_where_ours_can_wait():
    """Layers of 2 and three times 4 s; the model communicates for 1 s ahead of the second, over the same link.

    A gather of 4 s for the last layer: launched at once it would delay that by 2 s, behind it nothing.
    """
    tasks = tasks_of([2.0, 4.0, 4.0, 4.0], [(4, 3, 3)])
    assert search(tasks).simulation.seconds == 14
    shared = with_models_own(tasks, (1, 1, 1), shared=True)
    found = search(shared)
    assert (found.simulation.seconds, found.schedule[0].at) == (15, 2)
    assert simulate(shared, (gather(0, 0, 3),)).seconds == 17


@QUICK
@given(random_tasks(segments=3, gathers=2, reductions=2, free=True).map(without_latency))
def test_tiny_tasks_with_the_models_own_are_close_to_the_best(tasks):
    """Launches alone, latency and memory aside."""
    tasks = replace(tasks, largest_block_bytes=1000)
    best = min(makespan(tasks, schedule) for schedule in single_schedules(tasks))
    assert search(tasks).simulation.seconds <= 1.15 * best + 1e-9


def test_launches_are_as_late_as_is_safe():
    """Layers of 10 s, gathers of 4 s: the second one needs not go out before the first layer, and with a quarter of its
    time to spare can go out where 5 s are left."""
    segments = [5.0, 5.0, 5.0, 5.0]
    tasks = tasks_of(segments, [(4, 0, 1), (4, 2, 3)])
    found = search(tasks)
    assert found.simulation.seconds == 24
    assert [(launch.indices, launch.at, launch.wait) for launch in found.schedule] == [((0,), 0, 0), ((1,), 1, 2)]
    # and where they are 4.9 s it goes out ahead of them
    tasks = tasks_of([5.0, 4.9, 5.0, 5.0], [(4, 0, 1), (4, 2, 3)])
    assert [launch.at for launch in search(tasks).schedule] == [0, 0]


def test_a_reduction_that_is_needed_soon_overtakes():
    """Of two gradients of one block the second one is needed at once: 0-2, then the other one beside 1 s of compute."""
    tasks = tasks_of([0, 0, 1], reductions=[(2, 1), (2, 1)])
    soon = replace(tasks.reductions[1], block_number=0, position=1, last=1)
    tasks = replace(tasks, reductions=(tasks.reductions[0], soon), largest_block_bytes=4)
    assert search(tasks).simulation.seconds == 4


def test_of_two_complete_reductions_the_one_needed_sooner_goes_first():
    """Both are complete after 1 s; a gather of 2 s is launched before, so that 0-2-4-6 are full."""
    tasks = tasks_of([1, 2, 0], [(2, 2, 2)], [(2, 1), (2, 1)])
    soon = replace(tasks.reductions[1], last=1)
    tasks = replace(tasks, reductions=(tasks.reductions[0], soon), largest_block_bytes=1000)
    assert search(tasks).simulation.seconds == 6


# ---- what is given ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [FLAT, COALESCED])
def test_a_given_form(form):
    """Of buckets of several tensors; the one that is alone stays single."""
    tasks = layers(2, [1e-3] * 3, [2**20] * 3, FAST, copy_seconds=1 / 1.5e12, backward=True)
    assert [launch.form for launch in per_unit(tasks, form=form)] == [form] * 4
    assert {launch.form for launch in per_unit(tasks, bucketing="parameter", form=form)} == {SINGLE}


def test_an_error_with_given_buckets_names_them_and_what_they_need():
    """Both gathers in one bucket hold 30 bytes at once, which alone they would not."""
    tasks = tasks_of([1, 1], [(10, 0, 0), (20, 1, 1)])
    given = {Kind.GATHER: ((0, 1),)}
    with pytest.raises(OverBudget, match=r"needs 30 bytes .* with the option 'bucket' at 3, but the budget is 25"):
        search(tasks, 25, given, bucket=3)
    assert search(tasks, 30, given, bucket=3).simulation.peak == 30


@pytest.mark.more
@QUICK
@given(random_tasks(), st.sampled_from([0, 2e-5, 1]))
def test_given_buckets_stay(tasks, megabytes):
    """Orders alone are searched; reductions that cannot go together are divided."""
    given = {kind: by_size(tasks.collectives(kind), megabytes) for kind in Kind}
    found = search(tasks, fixed=given)
    peak_of(tasks, found)
    assert {*buckets(found)} == {*given[Kind.GATHER]}
    for bucket in buckets(found, Kind.REDUCE):
        assert any({*bucket} <= {*other} for other in given[Kind.REDUCE])
