"""Plans and their runners-up where rates are others than planned for."""

from dataclasses import replace

import pytest
from hypothesis import given

from compiled_fsdp.passes.plan.plain import SAME_SECONDS
from compiled_fsdp.passes.plan.plain_schedules import at_once
from compiled_fsdp.passes.plan.search import search
from compiled_fsdp.passes.plan.sensitivity import RunnerUp, is_more_robust, sensitivity, shifted_rates
from compiled_fsdp.passes.plan.simulate import check, makespan, memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import CommChannel
from tests.passes.plan.cases import QUICK, gather, random_tasks, tasks_of


@QUICK
@given(random_tasks())
def test_the_runner_up_is_another_plan_that_is_not_more_robust(tasks):
    """It can run, within memory, in other buckets or another order."""
    limit = 1.5 * max(memory_curve(tasks, at_once(tasks)))
    found = search(tasks, limit)
    if found.runner_up is None:
        return
    other = found.runner_up.schedule
    check(tasks, other)
    assert max(memory_curve(tasks, other)) <= limit
    launched, own = ([(launch.kind, launch.indices) for launch in of] for of in (other, found.schedule))
    assert launched != own
    assert not is_more_robust(tasks, other, found.schedule)


@QUICK
@given(random_tasks())
def test_the_text_says_where_the_runner_up_is_quicker(tasks):
    """Of each rate lower and higher, and only there."""
    found = search(tasks)
    seen = sensitivity(tasks, found.schedule, found.runner_up)
    text = str(seen)
    lost = []
    for rate, lower, world in shifted_rates(tasks):
        (shift,) = [shift for shift in seen.shifts if (shift.rate, shift.lower) == (rate, lower)]
        assert shift.seconds == simulate(world, found.schedule).seconds
        if found.runner_up is None:
            continue
        assert shift.runner_up == makespan(world, found.runner_up.schedule)
        if shift.seconds > SAME_SECONDS * shift.runner_up:
            lost.append(f"{rate} {'lower' if lower else 'higher'}")
    if found.runner_up is None:
        assert "runner-up" not in text
    else:
        assert ("is quicker in none" in text) == (not lost)
        assert all(name in text.rsplit("is quicker with", 1)[-1] for name in lost)


SLOW_TO_START = CommChannel(latency=1.0, each=0.0, bytes_per_second=1.0, world=2)
TASKS = tasks_of([10.0, 10.0], [(4, 0, 0), (9, 1, 1)], channel=SLOW_TO_START)


@pytest.mark.parametrize(
    ("rate", "lower", "seconds"),
    [
        # as planned: g0 0-5, layer 0 5-15, g1 5-15, layer 1 15-25
        ("compute", True, 5 + 2 * 10 / 0.7),
        ("compute", False, 5 + 10 + 10 / 1.3),  # g1 is not hidden any more
        ("link", True, (1 + 4 / 0.7) + (1 + 9 / 0.7) + 10),
        ("link", False, (1 + 4 / 1.3) + 20),
        ("latency", True, (4 + 1 / 0.7) + (9 + 1 / 0.7) + 10),
        ("latency", False, (4 + 1 / 1.3) + 20),
    ],
)
def test_by_hand(rate, lower, seconds):
    schedule = (gather(0, 0, 0), gather(1, 0, 1))
    (found,) = [s for s in sensitivity(TASKS, schedule, None).shifts if (s.rate, s.lower) == (rate, lower)]
    assert found.seconds == pytest.approx(seconds)


def test_rates_that_nothing_depends_on_are_left_out():
    rates = {rate for rate, _, _ in shifted_rates(replace(TASKS, copy_seconds=0.1, host_seconds=1.0))}
    assert rates == {"compute", "link", "latency", "copies", "host"}
    assert {rate for rate, _, _ in shifted_rates(TASKS)} == {"compute", "link", "latency"}


def test_the_line():
    apart, together = (gather(0, 0, 0), gather(1, 0, 1)), (gather((0, 1), 0, 0, "coalesced"),)
    tasks = tasks_of([10.0, 10.0], [(4, 0, 0), (9, 1, 1)])
    assert str(sensitivity(tasks, apart, RunnerUp(together, "by unit"))) == (
        "with a rate 30% lower or higher, ms: compute 32571.429 or 20692.308, link 28571.429 or 23076.923; "
        "the runner-up (by unit; 1 launches, 33000.000 ms) is quicker in none"
    )
    assert str(sensitivity(tasks, together, RunnerUp(apart, "by unit"))).endswith(
        "is quicker with compute lower (32571.429), link lower (28571.429), compute higher (20692.308), "
        "link higher (23076.923)"
    )
    assert str(sensitivity(tasks, apart, None)).endswith("link 28571.429 or 23076.923")


def test_what_is_right_by_a_hair_gives_way():
    """Plans that take as long, of which one hides all of a gather with nothing to spare."""
    tasks = tasks_of([5.0, 5.0, 5.0], [(1, 0, 0), (5, 2, 2)])
    early, late = (gather(0, 0, 0), gather(1, 0, 2)), (gather(0, 0, 0), gather(1, 1, 2))
    assert makespan(tasks, early) == makespan(tasks, late)
    assert is_more_robust(tasks, early, late)
    assert not is_more_robust(tasks, late, early)
