"""What the planner proposes under rules, where it is not the search alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.passes.plan.choose import PlanRules, choose
from compiled_fsdp.passes.plan.plain_schedules import per_unit
from compiled_fsdp.passes.plan.search import OverBudget
from tests.passes.plan.cases import QUICK, random_tasks
from tests.passes.plan.simulator import curve


@QUICK
@given(random_tasks(), st.floats(0.3, 2))
def test_a_small_part_of_a_broken_forward(tasks, share):
    """A bucket for each unit, whatever the budget, if that has room for it; else what fits."""
    tasks = replace(
        tasks,
        gathers=tuple(replace(task, block_number=0) for task in tasks.gathers),
        reductions=tuple(replace(task, block_number=0) for task in tasks.reductions),
    )
    needed = max(curve(tasks, per_unit(tasks)))
    rules = PlanRules(is_fragment=True, budget=share * needed)
    usual, _ = choose(tasks, replace(rules, budget=None))
    assert usual == per_unit(tasks)
    try:
        schedule, _ = choose(tasks, rules)
    except OverBudget:
        assert rules.budget < needed
    else:
        assert schedule == usual if rules.budget >= needed else max(curve(tasks, schedule)) <= rules.budget
