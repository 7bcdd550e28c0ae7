"""Plan: choose the buckets, their form, and the milestones at which they are launched and waited for.

With ``bucket="auto"`` the planner searches (``plan/search.py``); "module", "parameter", a size or a list of names fix
the buckets. All ranks use the first rank's plan, and every rank checks that its own graph stays within the memory
budget with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from compiled_fsdp.passes.alive import Alive
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
from compiled_fsdp.passes.segments import Segments

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)


def plan(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Choose the graph's plan and agree on it with the other ranks; change nothing in the graph.

    Raises:
        OverBudget: no plan fits into the memory budget, or the agreed plan does not fit on this rank.
        PlanDoesNotFit: this rank's graph cannot follow the agreed plan.
    """
    tasks, segment_of = extract(gm, ctx)
    if not tasks.gathers and not tasks.reductions:
        needed = max(memory_curve(tasks, ()))
        if ctx.rules.budget is not None and needed > ctx.rules.budget:
            raise over_budget(tasks.phase, needed, ctx.rules.budget)
        ctx.planned = Planned(GraphPlan(ctx.phase, ()))
        if any(read.replicas > 1 for read in ctx.reads.values()):  # reports add up its time and its backward's
            ctx.planned = Planned(ctx.planned.plan, tasks, simulate(tasks, ()), segment_of=segment_of, rules=ctx.rules)
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
    # The plan may have been made for other shapes. Ranks must launch in the same order, but may launch later.
    if ctx.rules.budget is not None and simulation.peak > ctx.rules.budget:
        schedule = as_late_as_can_be(tasks, schedule)
        simulation = simulate(tasks, schedule)
    if ctx.rules.budget is not None and simulation.peak > ctx.rules.budget:
        raise OverBudget(
            f"compiled_fsdp: option 'memory_budget': with this rank's shapes the {tasks.phase} graph needs "
            f"{simulation.peak:,} bytes under the plan that the ranks agreed on, but the budget is "
            f"{ctx.rules.budget:,.0f} bytes. Give more, "
            + ("" if ctx.rules.bucket == "auto" else "leave out option 'bucket', ")
            + "or take a smaller batch on this rank.",
            simulation.peak,
        )
    found = _balance(gm, simulation, ctx)
    held = Alive(gm, Segments(gm), backward=ctx.phase == "backward").by_module(simulation.peak_segment)
    ctx.planned = Planned(agreed, tasks, simulation, found, schedule, segment_of, rules, held)
    ctx.changed(
        "plan",
        f"{len(schedule)} launches ({origin}), {1e3 * simulation.seconds:.3f} ms, "
        f"{1e3 * simulation.exposed:.3f} ms exposed, peak {simulation.peak / 1e6:.3f} MB",
    )
    return gm


def _balance(gm: GraphModule, simulation: Simulation, ctx: PassContext) -> Balance | None:
    """Find the size from which compute hides communication; None if the graph has no symbolic sizes or no price."""
    on_channel = sum(timing.end - timing.start for timing in simulation.timings)
    try:
        return balance(gm, ctx.hardware, on_channel, fused=ctx.fused)
    except Exception as error:  # mostly from sympy; a line of a report must not end a training run
        log.debug("no balance of compute and communication: %r", error)
        return None


def _agree(tasks: Tasks, ctx: PassContext, propose: Callable[[], GraphPlan]) -> tuple[GraphPlan, Schedule]:
    """Return the plan of all ranks, and this graph's schedule under it.

    The agreed plan may come from an earlier model that reads equal parameters. For example, the second model has
    another checkpoint policy, so that its gradients are complete in another order, and the first model's plan does not
    fit. All ranks compile the second model now, so they agree on a plan for it. If instead one rank alone compiles such
    a variant of one model, ``agree_anew`` raises, and that rank follows the plan in other code (``follow.py``).
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
