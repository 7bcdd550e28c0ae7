"""Plan: which collectives share a bucket, in which form, and the milestones at which they are launched and waited for.

``bucket="auto"`` searches (``plan/search.py``); "module", "none", a size or a list of names fix the buckets. The plan
is agreed on by all ranks: it is the first rank's, and every rank checks that its own graph stays within the budget
under it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from compiled_fsdp.passes.context import Planned
from compiled_fsdp.passes.cost.balance import Balance, balance
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.graph import calls, ops
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be
from compiled_fsdp.passes.plan.choose import adjusted, choose
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit, collective_lines, milestone_lines, plan_of, schedule_of
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import Simulation, memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)


def plan(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Choose and agree on the graph's plan; changes nothing in the graph."""
    tasks, segment_of = extract(gm, ctx)
    if not tasks.gathers and not tasks.reductions:
        needed = max(memory_curve(tasks, ()))
        if ctx.rules.budget is not None and needed > ctx.rules.budget:
            raise over_budget(tasks.phase, needed, ctx.rules.budget)
        ctx.planned = Planned(GraphPlan(ctx.phase, ()))
        ctx.changed("plan", "no collectives")
        return gm
    origin = "agreed"
    rules = replace(ctx.rules, publishes=bool(calls(gm, ops.accumulate_grad.default)))

    def propose() -> GraphPlan:
        nonlocal origin
        schedule, origin = choose(tasks, rules)
        return plan_of(tasks, adjusted(tasks, schedule, rules))

    agreed, schedule = _agree(tasks, ctx, propose)
    simulation = simulate(tasks, schedule)
    # planned for other shapes: ranks share the order, not places
    if ctx.rules.budget is not None and simulation.peak > ctx.rules.budget:
        schedule = as_late_as_can_be(tasks, schedule)
        simulation = simulate(tasks, schedule)
    if ctx.rules.budget is not None and simulation.peak > ctx.rules.budget:
        raise OverBudget(
            f"compiled_fsdp: option 'memory_budget': with this rank's shapes the {tasks.phase} graph needs "
            f"{simulation.peak:,} bytes under the plan that the ranks agreed on, but the budget is "
            f"{ctx.rules.budget:,.0f} bytes. Give more, or take a smaller batch on this rank.",
            simulation.peak,
        )
    found = _balance(gm, simulation, ctx)
    ctx.planned = Planned(agreed, tasks, simulation, found, schedule, segment_of, rules)
    ctx.changed(
        "plan",
        f"{len(schedule)} launches ({origin}), {1e3 * simulation.seconds:.3f} ms, "
        f"{1e3 * simulation.exposed:.3f} ms exposed, peak {simulation.peak / 1e6:.3f} MB",
    )
    return gm


def _balance(gm: GraphModule, simulation: Simulation, ctx: PassContext) -> Balance | None:
    on_channel = sum(timing.end - timing.start for timing in simulation.timings)
    try:
        return balance(gm, ctx.hardware, on_channel, fused=ctx.fused)
    except Exception as error:  # sympy's, mostly; a line of the report is not worth a training run
        log.debug("no balance of compute and communication: %r", error)
        return None


def _agree(tasks: Tasks, ctx: PassContext, propose: Callable[[], GraphPlan]) -> tuple[GraphPlan, Schedule]:
    """The plan of all ranks, and this graph's schedule under it.

    Two models in one process may read equal parameters and compute their gradients in another order: another checkpoint
    policy, say. Then the first one's plan may not do for the second, and all ranks, which are at the second one, agree
    on its own. A rank that compiles such a variant of one model alone follows the plan in other code.
    """
    collectives = collective_lines(tasks)
    already_agreed = ctx.already_agreed(collectives)
    agreed = ctx.agree(collectives, propose)
    try:
        return agreed, schedule_of(agreed, tasks)
    except PlanDoesNotFit as error:
        if not already_agreed:
            raise
        log.info("%s graph: agreeing on another plan than an earlier model's: %s", tasks.phase, error)
        agreed = ctx.agree_anew((*collectives, *milestone_lines(tasks)), propose)
        return agreed, schedule_of(agreed, tasks)
