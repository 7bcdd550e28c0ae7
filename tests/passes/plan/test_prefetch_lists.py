"""Prefetch lists as schedules of tasks, and as one of the planner's candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.graph import spec_of
from compiled_fsdp.passes.plan.plain_schedules import at_once, per_unit, usual_limit
from compiled_fsdp.passes.plan.search import GOOD_ENOUGH, search
from compiled_fsdp.passes.plan.simulate import check, makespan
from compiled_fsdp.passes.plan.tasks import Tasks
from tests.passes.graphs import backward_of_layers, context, launched, planned
from tests.passes.plan.cases import QUICK, layers, random_tasks, tasks_of
from tests.passes.plan.simulator import curve

Lists = Mapping[int, Sequence[int]]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, "U3 U2 P3 U1 P2 U0 P1 P0 P4"),
        ({3: (2, 1), 2: (1, 0)}, "U3 U2 U1 P3 U0 P2 P1 P0 P4"),
        ({3: (0, 1, 2)}, "U3 U0 U1 U2 P3 P2 P1 P0 P4"),
        ({3: (0,)}, "U3 U0 U2 P3 U1 P2 P1 P0 P4"),  # what is next as well, after the list
        ({2: (3, 2, 9, 0)}, "U3 U2 P3 U0 U1 P2 P1 P0 P4"),  # used already, itself, not there
        ({4: (0,)}, "U3 U2 P3 U1 P2 U0 P1 P0 P4"),  # the root gathers nothing, and its gradient comes last
    ],
)
def test_order_of_a_backward(lists, expected):
    """Of four layers and a root that gathers nothing."""
    gm, params, _ = backward_of_layers(layers=4)
    ctx = context(params)
    ctx.reads = {
        i: replace(read, prefetch_blocks=((), lists.get(read.block_number, ()))) for i, read in ctx.reads.items()
    }
    gm = planned(gm, ctx)
    specs = map(spec_of, launched(gm))
    names = [f"{'PU'[spec.kind.supplies]}{spec.reads[0] // 2}" for spec in specs]
    assert " ".join(names) == expected


def test_forward_lists_are_forwards():
    gm, params, _ = backward_of_layers(layers=4)
    ctx, plain = context(params), context(params)
    ctx.reads = {i: replace(read, prefetch_blocks=((0, 1, 2, 3), ())) for i, read in ctx.reads.items()}
    planned(gm, ctx)
    planned(backward_of_layers(layers=4)[0], plain)
    assert ctx.planned.plan == plain.planned.plan


# ---- any tasks -------------------------------------------------------------------------------------------------------
def asking(tasks: Tasks, lists: Lists) -> Tasks:
    """The tasks with prefetch lists by block."""
    gathers, reductions = (
        tuple(
            replace(task, prefetch_blocks=tuple(lists.get(task.block_number, ()))) for task in tasks.collectives(kind)
        )
        for kind in Kind
    )
    return replace(tasks, gathers=gathers, reductions=reductions)


some_lists = st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)


@QUICK
@given(random_tasks(), some_lists, st.sampled_from(["unit", "parameter"]))
def test_any_lists_are_a_schedule_that_can_run(tasks, lists, bucketing):
    """With no launch later than without them."""
    asked = asking(tasks, lists)
    schedule, plain = (per_unit(of, bucketing=bucketing, asked=True) for of in (asked, tasks))
    check(tasks, schedule)
    usual = {(launch.kind, launch.indices): launch.at for launch in plain}
    assert all(launch.at <= usual[launch.kind, launch.indices] for launch in schedule)
    assert Tasks.from_json(asked.to_json()) == asked


@pytest.mark.more
@QUICK
@given(random_tasks(), some_lists)
def test_the_planner_is_as_quick_as_the_lists(tasks, lists):
    """And holds no more than it would without them, or than they do."""
    asked = asking(tasks, lists)
    schedule, found = per_unit(asked, asked=True), search(asked)
    assert max(curve(tasks, found.schedule)) <= max(usual_limit(tasks), *curve(tasks, schedule))
    if asked != tasks:
        assert found.simulation.seconds <= makespan(tasks, schedule) * (GOOD_ENOUGH + 1e-4)


@QUICK
@given(random_tasks(), some_lists)
def test_a_budget_is_a_budget(tasks, lists):
    budget = max(curve(tasks, at_once(tasks)))
    assert max(curve(tasks, search(asking(tasks, lists), budget).schedule)) <= budget


# ---- where the best is known -----------------------------------------------------------------------------------------
def test_lists_may_hold_more_than_the_planner_would():
    """Six gathers of 8 s hidden behind 48 s of compute, where three is what is held without a list."""
    tasks = tasks_of([48.0, *[1.0] * 6], [(1, 0, 0), *((8, i, i) for i in range(1, 7))])
    asked = asking(tasks, {0: range(1, 7)})
    alone, listed = search(tasks).simulation, search(asked).simulation
    assert listed.seconds == 1 + 48 + 6
    assert alone.seconds > listed.seconds
    assert listed.peak > alone.peak
    assert search(asked).origin.startswith("prefetch lists")
    assert search(asked, alone.peak).simulation == alone


def test_a_list_that_does_not_pay_is_not_taken():
    """One ahead is at the bound, and two ahead would hold more."""
    channel = replace(next(iter(tasks_of([1.0], [(1, 0, 0)]).channels.values())), bytes_per_second=10.0)
    tasks = layers(4, [2.0, 2.0], [2, 2], channel, backward=True)
    asked = search(asking(tasks, {0: (1, 2), 1: (2, 3)}))
    assert "prefetch lists" not in asked.origin
    assert asked.simulation.seconds == search(tasks).simulation.seconds
