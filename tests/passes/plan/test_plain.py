"""Plans with fewer launches: as quick, within memory, and not at the price of being right by a hair."""

from dataclasses import replace

from hypothesis import given

from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.late import as_late_as_safe
from compiled_fsdp.passes.plan.order import wait_when_done
from compiled_fsdp.passes.plan.plain import RATE_ERROR, SAME_SECONDS, SLOW_LINK, with_fewer_launches
from compiled_fsdp.passes.plan.plain_schedules import at_once
from compiled_fsdp.passes.plan.search import OverBudget, search
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve, simulate
from tests.passes.plan.cases import QUICK, gather, random_tasks, reduction, tasks_of

SLOW_TO_START = CommChannel(latency=1.0, each=0.0, bytes_per_second=100.0, world=2, received_share=0.5)


@QUICK
@given(random_tasks())
def test_as_quick_and_within_memory(tasks):
    """Also where the link is slower."""
    limit = 1.5 * max(memory_curve(tasks, at_once(tasks)))
    schedule = as_late_as_safe(tasks, at_once(tasks), limit)
    fewer = with_fewer_launches(tasks, schedule, limit, limit)
    assert len(fewer) <= len(schedule)
    simulate(tasks, fewer)  # it can run
    for share in (1, 1 - RATE_ERROR, 1 / SLOW_LINK):
        rates = {n: c.scaled(rate=share) for n, c in tasks.channels.items()}
        world = replace(tasks, channels=rates)
        assert makespan(world, fewer) <= SAME_SECONDS * makespan(world, schedule) + 1e-9
    assert max(memory_curve(tasks, fewer)) <= max(limit, max(memory_curve(tasks, schedule)))


@QUICK
@given(random_tasks())
def test_the_search_takes_them_within_a_budget(tasks):
    budget = 1.2 * max(memory_curve(tasks, at_once(tasks)))
    try:
        found = search(tasks, budget)
    except OverBudget:
        return
    assert found.simulation.peak <= budget
    assert len(found.schedule) <= len(tasks.gathers) + len(tasks.reductions)


def test_hidden_reductions_of_a_byte():
    """Four of them beside long compute become one, which goes out with the last gradient."""
    tasks = tasks_of([100.0] * 5, [], [(2, i) for i in range(1, 5)], channel=SLOW_TO_START)
    schedule = tuple(reduction(i, i + 1, i + 2) for i in range(4))
    assert with_fewer_launches(tasks, schedule, 1000, 1000) == (reduction((0, 1, 2, 3), 4, 5, "coalesced"),)


def test_small_ones_with_a_large_one_between():
    """Gradients of 2, 5000 and 2 bytes, and flat buckets cost copies: the two small ones share a bucket."""
    channel = replace(SLOW_TO_START, each=500.0)
    sizes = [(2, 1), (5000, 2), (2, 3)]
    tasks = tasks_of([100.0] * 4, [], sizes, channel=channel, copy_seconds=0.01)
    schedule = wait_when_done(tasks, tuple(reduction(i, i + 1, 4) for i in range(3)))
    merged = with_fewer_launches(tasks, schedule, 10_000, 10_000)
    assert sorted(launch.indices for launch in merged) == [(0, 2), (1,)]


def test_what_is_hidden_by_a_hair_stays_apart():
    """A gather of 9.9 s behind 10 s of compute: with the next one in its bucket it is exposed on a slower link."""
    channel = replace(SLOW_TO_START, bytes_per_second=1.0, latency=0.0)
    tasks = tasks_of([10.0, 10.0, 10.0], [(1, 0, 0), (10, 1, 1), (10, 2, 2)], channel=channel)
    schedule = (gather(0, 0, 0), gather(1, 0, 1), gather(2, 1, 2))
    assert with_fewer_launches(tasks, schedule, 1000, 1000) == schedule


def test_memory_keeps_them_apart():
    tasks = tasks_of([100.0] * 5, [], [(2, i) for i in range(1, 5)], channel=SLOW_TO_START)
    schedule = tuple(reduction(i, i + 1, i + 2) for i in range(4))
    limit = max(memory_curve(tasks, schedule))
    assert max(memory_curve(tasks, with_fewer_launches(tasks, schedule, 1000, limit))) <= limit


def test_a_host_that_is_slower_than_the_device_wants_few_launches():
    """Ten seconds a launch: one bucket of all, though the first gather's bytes are then exposed together."""
    channel = replace(SLOW_TO_START, latency=0.0)
    tasks = tasks_of([1.0, 1.0, 1.0], [(100, 0, 0), (100, 1, 1), (100, 2, 2)], channel=channel)
    slow_host = replace(tasks, host_launch_seconds=10.0)
    assert len(search(tasks).schedule) > len(search(slow_host).schedule) == 1
    assert search(slow_host).simulation.seconds == 10.0
