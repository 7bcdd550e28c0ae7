"""Plans where rates are others than planned for."""

from dataclasses import replace

import pytest
from hypothesis import given

from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.search import search
from compiled_fsdp.passes.plan.sensitivity import sensitivity, shifted_rates
from compiled_fsdp.passes.plan.simulate import simulate
from tests.passes.plan.cases import QUICK, gather, random_tasks, tasks_of


@QUICK
@given(random_tasks())
def test_each_rate_is_simulated(tasks):
    found = search(tasks)
    seen = {(shift.rate, shift.lower): shift.seconds for shift in sensitivity(tasks, found.schedule).shifts}
    for rate, lower, world in shifted_rates(tasks):
        assert seen.pop((rate, lower)) == simulate(world, found.schedule).seconds
    assert not seen


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
    (found,) = [s for s in sensitivity(TASKS, schedule).shifts if (s.rate, s.lower) == (rate, lower)]
    assert found.seconds == pytest.approx(seconds)


def test_rates_that_nothing_depends_on_are_left_out():
    rates = {rate for rate, _, _ in shifted_rates(replace(TASKS, copy_seconds=0.1, host_seconds=1.0))}
    assert rates == {"compute", "link", "latency", "copies", "host"}
    assert {rate for rate, _, _ in shifted_rates(TASKS)} == {"compute", "link", "latency"}


def test_the_line():
    apart = gather(0, 0, 0), gather(1, 0, 1)
    tasks = tasks_of([10.0, 10.0], [(4, 0, 0), (9, 1, 1)])
    assert str(sensitivity(tasks, apart)) == (
        "with a rate 30% lower or higher, ms: compute 32571.429 or 20692.308, link 28571.429 or 23076.923"
    )
