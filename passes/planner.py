"""Plan: which collectives share a bucket, in which form, and the milestones at which they are launched and waited for.

``bucket="auto"`` searches (``plan/search.py``); "module", "none", a size or a list of names fix the buckets. The plan is agreed
on by all ranks: it is the first rank's, and every rank checks that its own graph stays within the budget under it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from compiled_fsdp.passes.context import Planned
from compiled_fsdp.passes.cost.balance import Balance, balance
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.graph import calls, ops
from compiled_fsdp.passes.plan import Bucket, GraphPlan
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.bucketing import Bucketing, by_group, by_size, by_unit, one_by_one
from compiled_fsdp.passes.plan.search import OverBudget, one_ahead_schedule, over_budget, search
from compiled_fsdp.passes.plan.simulate import Simulation, makespan, memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import COALESCED, FLAT, Launch, Schedule, Tasks

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

_FEW_UNITS = 2
_DEAR = 1.05
_PATIENCE = timedelta(minutes=5)


class PlanDoesNotFit(RuntimeError):
    """This rank's graph cannot follow the plan that the ranks agreed on."""


def plan(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Choose and agree on the graph's plan; changes nothing in the graph."""
    extracted = extract(gm, ctx)
    tasks = extracted.tasks
    if not tasks.gathers and not tasks.reductions:
        needed = max(memory_curve(tasks, ()))
        if ctx.budget is not None and needed > ctx.budget:
            raise over_budget(tasks.phase, needed, ctx.budget)
        ctx.planned = Planned(GraphPlan(ctx.phase, ()))
        ctx.changed("plan", "no collectives")
        return gm
    how = ["agreed"]

    def propose() -> GraphPlan:
        schedule, how[0] = choose(tasks, ctx)
        if ctx.part:
            schedule = flat_at_the_edges(schedule)
        if ctx.replicates:
            schedule = flat_reductions(schedule)
        if calls(gm, ops.publish.default):
            schedule = for_publishing(tasks, schedule)
        return plan_of(tasks, schedule, ctx)

    agreed, schedule = _agree(tasks, ctx, propose)
    simulation = simulate(tasks, schedule)
    # planned for other shapes: ranks share the order, not places
    if ctx.budget is not None and simulation.peak > ctx.budget:
        schedule = as_late_as_can_be(tasks, schedule)
        simulation = simulate(tasks, schedule)
    if ctx.budget is not None and simulation.peak > ctx.budget:
        raise OverBudget(
            f"compiled_fsdp: option 'memory_budget': with this rank's shapes the {tasks.phase} graph needs {simulation.peak:,} bytes under the "
            f"plan that the ranks agreed on, but the budget is {ctx.budget:,.0f} bytes. Give more, or take a smaller batch on this rank.",
            simulation.peak,
        )
    ctx.planned = Planned(agreed, tasks, simulation, _balance(gm, simulation, ctx), schedule, extracted.run_of)
    ctx.changed(
        "plan",
        f"{len(schedule)} launches ({how[0]}), {1e3 * simulation.seconds:.3f} ms, {1e3 * simulation.exposed:.3f} ms exposed, peak "
        f"{simulation.peak / 1e6:.3f} MB",
    )
    return gm


def _balance(gm: GraphModule, simulation: Simulation, ctx: PassContext) -> Balance | None:
    on_link = sum(flight.end - flight.start for flight in simulation.flights)
    try:
        return balance(gm, ctx.hardware, on_link, fused=ctx.fused)
    except Exception as error:  # sympy's, mostly; a line of the report is not worth a training run
        log.debug("no balance of compute and communication: %r", error)
        return None


def _agree(tasks: Tasks, ctx: PassContext, propose: Callable[[], GraphPlan]) -> tuple[GraphPlan, Schedule]:
    """The plan of all ranks, and this graph's schedule under it.

    Two models in one process may read equal parameters and compute their gradients in another order: another checkpoint policy, say.
    Then the first one's plan may not do for the second, and all ranks, which are at the second one, agree on its own. A rank that compiles
    a variant alone gets no answer, and an error after ``_PATIENCE``.
    """
    common = what_is_agreed(tasks)
    earlier = ctx.knows(common)
    agreed = ctx.agree(common, propose)
    try:
        return agreed, schedule_of(agreed, tasks)
    except PlanDoesNotFit as error:
        if not earlier:
            raise
        log.info("%s graph: agreeing on another plan than an earlier model's: %s", tasks.phase, error)
        agreed = ctx.agree((*common, *order_of(tasks)), propose, _PATIENCE)
        return agreed, schedule_of(agreed, tasks)


def order_of(tasks: Tasks) -> tuple[str, ...]:
    """The milestones in their order."""
    return tuple(f"then {', '.join(run.starts)}" for run in tasks.runs)


def what_is_agreed(tasks: Tasks) -> tuple[str, ...]:
    """What every rank's graph has to have in common: what it gathers and what it reduces."""
    return tuple(
        sorted(f"{'gather' if gathers else 'reduce'} of read {item.read}, {item.bytes:,} bytes"
               for gathers in (True, False) for item in tasks.items(gathers))
    )  # fmt: skip


def choose(tasks: Tasks, ctx: PassContext, *, quick: bool = False) -> tuple[Schedule, str]:
    """This rank's proposal, and where it comes from; ``quick``: without local search."""
    if ctx.bucket == "auto" and ctx.overlap and not _goes_beyond(tasks, ctx):
        found = search(tasks, ctx.budget, quick=quick)
        return found.schedule, found.how
    fixed = fixed_buckets(tasks, True, ctx), fixed_buckets(tasks, False, ctx)
    if ctx.overlap and ctx.bucket not in ("auto", "module", "none"):
        found = search(tasks, ctx.budget, fixed, quick=quick)
        return found.schedule, found.how
    sides = [orders.buckets_of(tasks, *side, form=FLAT) for side in zip((True, False), fixed, strict=True)]
    after = ctx.prefetch == "after"
    if ctx.overlap and tasks.has_prefetch_lists:
        asked = one_ahead_schedule(tasks, *sides, after=after, asked=True)
        if ctx.budget is None or max(memory_curve(tasks, asked)) <= ctx.budget:
            return asked, "prefetch lists"
    return one_ahead_schedule(tasks, *sides, after=after, overlap=ctx.overlap), "one ahead"


def _goes_beyond(tasks: Tasks, ctx: PassContext) -> bool:
    """Whether a part of a broken forward is so small that what counts is hidden in the graphs beside it. Then a bucket for each unit is
    best: a search in this graph alone would split the first gather, of which all but the first part would be late."""
    units = {item.unit for item in (*tasks.gathers, *tasks.reductions)}
    return ctx.part and ctx.budget is None and len(units) <= _FEW_UNITS


def fixed_buckets(tasks: Tasks, gathers: bool, ctx: PassContext) -> Bucketing:
    """The buckets that the option ``bucket`` asks for; by unit where the planner may choose but not overlap."""
    items = tasks.items(gathers)
    if isinstance(ctx.bucket, (int, float)):
        return by_size(items, ctx.bucket)
    if not isinstance(ctx.bucket, str):
        return by_group(items, ctx.groups_of_reads)
    return one_by_one(items) if ctx.bucket == "none" else by_unit(items)


# ---- plans and schedules ---------------------------------------------------------------------------------------------
def flat_at_the_edges(schedule: Schedule) -> Schedule:
    """The first and the last gather as one tensor each: what is in flight beside other graphs is."""
    gathers = [i for i, launch in enumerate(schedule) if launch.gathers]
    edges = {*gathers[:1], *gathers[-1:]}
    return tuple(
        replace(launch, form=FLAT) if i in edges and launch.form == COALESCED else launch
        for i, launch in enumerate(schedule)
    )


def flat_reductions(schedule: Schedule) -> Schedule:
    """Reductions as one tensor each: they go on over replicas."""
    return tuple(
        replace(launch, form=FLAT) if not launch.gathers and launch.form == COALESCED else launch for launch in schedule
    )


def for_publishing(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Waits for reductions as early as they cost nothing to speak of: behind them the graph publishes gradients, which a hook may
    use up at once."""
    soon = orders.wait_soon(tasks, schedule)
    return soon if makespan(tasks, soon) <= _DEAR * makespan(tasks, schedule) else schedule


def plan_of(tasks: Tasks, schedule: Schedule, ctx: PassContext) -> GraphPlan:
    """A schedule in terms of reads and milestones, which mean the same on all ranks and for all variants."""
    buckets = []
    for launch in schedule:
        items = tasks.of(launch)
        link = tasks.links[items[0].link]
        buckets.append(
            Bucket(
                kind="gather" if launch.gathers else "reduce",
                reads=tuple(item.read for item in items),
                mesh=link.stream if link.stream >= 0 else -1 - link.stream,
                bytes=sum(item.bytes for item in items),
                form=launch.form,
                via="all_to_all" if link.received == 1 else "",
                at=tasks.runs[launch.at].starts[0],
                wait=tasks.runs[launch.wait].starts[0],
            )
        )
    return GraphPlan(tasks.phase, tuple(buckets))


def schedule_of(agreed: GraphPlan, tasks: Tasks) -> Schedule:
    """A plan as this graph's schedule. Where this graph's gradients come later, or its parameters are needed earlier, than in
    the graph that was planned, launches move to the nearest place that can be.

    Raises:
        PlanDoesNotFit: other collectives, or an order that this graph's compute cannot follow.
    """
    # several gradients of one read that cannot be added before they are reduced: the plan's first is the graph's first
    places: dict[tuple[bool, int], deque[int]] = defaultdict(deque)
    mine: dict[tuple[bool, int], int] = {}
    for gathers in (True, False):
        for i, item in enumerate(tasks.items(gathers)):
            places[gathers, item.read].append(i)
            mine[gathers, item.read] = item.bytes
    wanted = [(bucket.kind == "gather", read) for bucket in agreed.launches for read in bucket.reads]
    sizes = [sum(mine.get((bucket.kind == "gather", read), 0) for read in bucket.reads) for bucket in agreed.launches]
    if Counter(wanted) != {key: len(found) for key, found in places.items()} or sizes != [
        bucket.bytes for bucket in agreed.launches
    ]:
        raise PlanDoesNotFit(
            f"compiled_fsdp: the {tasks.phase} graph of this rank does not have the collectives of the agreed plan; only here: "
            f"{_named(set(mine) - set(wanted))}; only in the plan: {_named(set(wanted) - set(mine))}; bytes here {sizes}, in the plan "
            f"{[bucket.bytes for bucket in agreed.launches]}."
        )
    launches: list[Launch] = []
    at = 0
    for bucket in agreed.launches:
        gathers = bucket.kind == "gather"
        members = tuple(places[gathers, read].popleft() for read in bucket.reads)
        items = [tasks.items(gathers)[i] for i in members]
        ready = 0 if gathers else max(item.first for item in items)
        due = min(item.first if gathers else item.last for item in items)
        at = max(at, ready, min(tasks.named.get(bucket.at, 0), due))
        if at > due:
            raise PlanDoesNotFit(
                f"compiled_fsdp: the {tasks.phase} graph of this rank cannot launch its collectives in the agreed order: {bucket} would come "
                f"behind {tasks.runs[at].starts[0]}, but is needed at {tasks.runs[due].starts[0]}."
            )
        wait = due if gathers else max(at, min(tasks.named.get(bucket.wait, tasks.end), due))
        launches.append(Launch(gathers, members, bucket.form, at, wait))
    return tuple(launches)


def as_late_as_can_be(tasks: Tasks, schedule: Schedule) -> Schedule:
    """The same order holding little: gathers at their first use, reductions when complete, as far as the order allows, and waited
    for at once."""
    places: list[int] = []
    latest = tasks.end
    for launch in reversed(schedule):
        if launch.gathers:
            latest = min(latest, launch.wait)
        places.append(latest if launch.gathers else max(item.first for item in tasks.of(launch)))
    out: list[Launch] = []
    at = 0
    for launch, place in zip(schedule, reversed(places), strict=True):
        at = max(at, place)
        out.append(replace(launch, at=at, wait=launch.wait if launch.gathers else at))
    return tuple(out)


def _named(collectives: set[tuple[bool, int]]) -> str:
    names = [f"{'gather' if gathers else 'reduce'} of read {read}" for gathers, read in sorted(collectives)]
    return ", ".join(names) or "none"
