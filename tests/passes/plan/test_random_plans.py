"""Plans of any tasks under any rules: each changed schedule is valid, and a plan written as text is read back."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be, flat_reductions, wait_soon
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.choose import PlanRules, adjusted, choose
from compiled_fsdp.passes.plan.convert import plan_of, schedule_of
from compiled_fsdp.passes.plan.late import as_late_as_safe
from compiled_fsdp.passes.plan.plain_schedules import at_once
from compiled_fsdp.passes.plan.search import OverBudget, search
from compiled_fsdp.passes.plan.simulate import check, makespan, memory_curve, memory_parts, simulate
from compiled_fsdp.passes.plan.tasks import Tasks
from tests.passes.plan.cases import QUICK, gather, random_tasks, reduction, tasks_and_schedules, tasks_of

RULES = st.builds(
    PlanRules,
    bucket=st.sampled_from(["auto", "auto", "module", "parameter", 2e-5, 1.0]),
    overlap=st.booleans(),
    prefetch=st.sampled_from(["before", "after"]),
    is_fragment=st.booleans(),
    replicates=st.booleans(),
    publishes=st.booleans(),
)


@QUICK
@given(random_tasks(), RULES, st.one_of(st.none(), st.floats(0.9, 2)), st.booleans())
def test_what_is_chosen_can_run_and_is_the_same_as_text(tasks, rules, share, quick):
    """Under a budget it fits, or the error asks for more than that; then that much is enough."""
    budget = None if share is None else int(share * max(memory_curve(tasks, at_once(tasks))))
    rules = replace(rules, budget=budget)
    try:
        schedule, _ = choose(tasks, rules, quick=quick)
    except OverBudget as error:
        assert budget is not None
        assert error.least > budget  # noqa: PT017
        rules = replace(rules, budget=error.least)
        schedule, _ = choose(tasks, rules, quick=quick)
    check(tasks, schedule)
    one_ahead = (
        rules.bucket in ("module", "parameter") or not rules.overlap or (rules.bucket == "auto" and rules.is_fragment)
    )
    if rules.budget is not None and not one_ahead:
        assert max(memory_curve(tasks, schedule)) <= rules.budget
    ready = adjusted(tasks, schedule, rules)
    check(tasks, ready)
    plan = plan_of(tasks, ready)
    again = GraphPlan.from_json(plan.to_json())
    assert again == plan
    assert schedule_of(again, Tasks.from_json(tasks.to_json())) == ready
    assert simulate(Tasks.from_json(tasks.to_json()), schedule_of(again, tasks)) == simulate(tasks, ready)


@QUICK
@given(tasks_and_schedules(), st.floats(1, 2))
def test_launches_as_late_as_is_safe_take_as_long_within_the_limit(case, share):
    tasks, schedule = case
    before = simulate(tasks, schedule)
    late = as_late_as_safe(tasks, schedule, share * before.peak)
    after = simulate(tasks, late)
    assert after.seconds <= before.seconds * (1 + 1e-6)
    assert after.peak <= share * before.peak
    assert [launch.indices for launch in late] == [launch.indices for launch in schedule]
    assert all(a.at >= b.at for a, b in zip(late, schedule, strict=True))


@QUICK
@given(tasks_and_schedules())
def test_other_waits_and_places_can_run_in_the_same_order(case):
    """And parts of memory add up to the curve."""
    tasks, schedule = case
    for changed in (
        wait_soon(tasks, schedule),
        as_late_as_can_be(tasks, schedule),
        flat_reductions(tasks, schedule, None),
    ):
        check(tasks, changed)
        assert [(of.kind, of.indices) for of in changed] == [(of.kind, of.indices) for of in schedule]
        assert tuple(map(sum, memory_parts(tasks, changed))) == memory_curve(tasks, changed)


WORLDS = st.one_of(st.sampled_from([8, 16, 64, 256, 1000]), st.integers(8, 1000))


@QUICK
@given(random_tasks(), st.sampled_from(sorted(PROFILES)), WORLDS, st.sampled_from([1, 2**10, 2**20]))
def test_on_the_wires_of_8_to_1000_ranks(tasks, name, world, scale):
    """Between the bound and the plain plan on any named hardware; what more ranks or bytes cost is not less."""
    hardware = PROFILES[name]
    channels = {}
    for channel, kind in (("gather", "gather"), ("reduce", "reduce"), ("other", "gather"), ("model", "all_reduce")):
        curve = hardware.curve(kind, world, None)
        assert curve.latency >= 0
        assert curve.bytes_per_second > 0
        fewer = hardware.curve(kind, max(2, world // 2), None)
        assert all(curve.seconds(size) >= 0.999 * fewer.seconds(size) for size in (1e3, 1e6))
        stream, share = tasks.channels[channel].stream, tasks.channels[channel].received_share
        channels[channel] = CommChannel(
            curve.latency, curve.each, curve.bytes_per_second, world, stream, 1 / world if 0 < share < 1 else share,
            quick=curve.quick,
        )  # fmt: skip
    resized = [
        tuple(
            replace(
                t,
                size=replace(
                    t.size, sent=world * scale * t.size.sent, gap=world * t.size.gap, host=scale * t.size.host
                ),
            )
            for t in of
        )
        for of in (tasks.gathers, tasks.reductions)
    ]
    segments = tuple(replace(s, seconds=1e-4 * s.seconds, bytes=scale * s.bytes) for s in tasks.segments)
    tasks = replace(
        tasks, gathers=resized[0], reductions=resized[1], channels=channels, segments=segments,
        largest_block_bytes=world * scale * tasks.largest_block_bytes,
    )  # fmt: skip
    found = search(tasks)
    check(tasks, found.schedule)
    assert lower_bound(tasks).seconds <= found.simulation.seconds * (1 + 1e-9)
    assert lower_bound(tasks).peak <= found.simulation.peak
    plain = at_once(tasks)
    assert found.simulation.seconds <= 1.01 * makespan(tasks, plain)


def test_as_late_as_can_be_a_gather_does_not_hold_up_a_reduction_that_is_needed():
    """Its own use is later than that of the gradient, which goes out after it."""
    tasks = tasks_of([1, 1, 1], [(2, 2, 2)], [(2, 1)])
    tasks = replace(tasks, reductions=(replace(tasks.reductions[0], last=1),))
    schedule = gather(0, 0, 2), reduction(0, 1, 1)
    assert as_late_as_can_be(tasks, schedule) == (gather(0, 1, 2), reduction(0, 1, 1))
