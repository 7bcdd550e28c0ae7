"""The planner's proposal for a graph: the result of the search, or the buckets that an option fixes."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_fsdp.buckets.spec import FLAT, Kind
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.adjust import flat_reductions, wait_soon_if_cheap
from compiled_fsdp.passes.plan.bucketing import Bucketing, by_group, by_size, by_unit, one_by_one
from compiled_fsdp.passes.plan.plain_schedules import one_ahead_schedule, per_unit
from compiled_fsdp.passes.plan.search import search
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

MAX_BLOCKS_OF_SMALL_FRAGMENT = 2
"""A fragment with no more blocks than this gets a bucket for each block, without a search."""


@dataclass(frozen=True)
class PlanRules:
    """The rules for a plan, as plain data. The same tasks and rules always give the same plan."""

    # The option ``bucket``: "auto", "module", "parameter", megabytes (10**6 bytes), or the user's own plan.
    bucket: str | float | tuple[tuple[str, ...], ...] = "auto"
    # The user's own plan: pairs of a read's index and the number of its bucket.
    user_buckets: tuple[tuple[int, int], ...] = ()
    # Whether collectives are launched ahead of the compute that hides them.
    overlap: bool = True
    # Without a search: whether the next gather is launched "before" or "after" the wait for this one.
    prefetch: str = "before"
    # The memory budget in bytes on each rank; None for no budget.
    budget: float | None = None
    # Bytes of the device's memory, independent of the budget.
    device_bytes: int = 0
    # Whether each unit decides if its parameters stay unsharded after forward (``reshard_after_forward`` of
    # ``fully_shard``); else the planner decides.
    keep_as_sharded: bool = True
    # Whether the graph is one of several graphs of a forward. Then its first gather and its last reductions may cross
    # its edges.
    is_fragment: bool = False
    # Whether the first gather of a forward may be launched before its graph is called (``TrainStep``).
    gathers_ahead: bool = False
    # Whether gradients are reduced twice: the second time over replicas (HSDP), or over other nodes.
    replicates: bool = False
    # Whether the graph itself publishes gradients (compiled autograd). Hooks may use a gradient up as soon as it is
    # published.
    publishes: bool = False


def adjusted(tasks: Tasks, schedule: Schedule, rules: PlanRules) -> Schedule:
    """Adjust a schedule to the rules for replicas and for published gradients."""
    if rules.replicates:
        schedule = flat_reductions(tasks, schedule, rules.budget)
    return wait_soon_if_cheap(tasks, schedule) if rules.publishes else schedule


def choose(tasks: Tasks, rules: PlanRules, *, quick: bool = False) -> tuple[Schedule, str]:
    """Return this rank's proposal, and the name of the rule or search that made it.

    Args:
        quick: whether to skip local search and the search for fewer launches.

    Raises:
        OverBudget: no schedule of the search fits into the budget.
    """
    if rules.bucket == "auto" and rules.overlap and not _is_small_fragment(tasks, rules):
        # with replicas, ``adjusted`` makes reductions flat if the budget has room, and merging would use that room up
        merge = rules.budget is None or not rules.replicates
        found = search(tasks, rules.budget, quick=quick, merge=merge)
        return found.schedule, found.origin
    fixed = {kind: fixed_buckets(tasks, kind, rules) for kind in Kind}
    if rules.overlap and rules.bucket not in ("auto", "module", "parameter"):
        found = search(tasks, rules.budget, fixed, quick=quick, bucket=rules.bucket)
        return found.schedule, found.origin
    form = None if rules.is_fragment and rules.bucket == "auto" else FLAT
    sides = orders.sides_of(tasks, fixed, form)
    after = rules.prefetch == "after"
    if rules.overlap and tasks.has_prefetch_lists:
        asked = one_ahead_schedule(tasks, *sides, after=after, asked=True)
        if rules.budget is None or max(memory_curve(tasks, asked)) <= rules.budget:
            return asked, "prefetch lists"
    return one_ahead_schedule(tasks, *sides, after=after, overlap=rules.overlap), "one ahead"


def _is_small_fragment(tasks: Tasks, rules: PlanRules) -> bool:
    """Whether a fragment is so small that its collectives are hidden by the compute of the graphs around it.

    Then a bucket for each block is best, if it fits into the budget. A search in this graph alone would split the first
    gather, and only the first of the resulting gathers could be launched in the graph before.
    """
    blocks = {task.block_number for task in tasks.all_collectives}
    if not rules.is_fragment or len(blocks) > MAX_BLOCKS_OF_SMALL_FRAGMENT:
        return False
    return rules.budget is None or max(memory_curve(tasks, per_unit(tasks))) <= rules.budget


def fixed_buckets(tasks: Tasks, kind: Kind, rules: PlanRules) -> Bucketing:
    """The buckets that the option ``bucket`` asks for; with "auto" a bucket for each unit or repeated block."""
    collectives = tasks.collectives(kind)
    if isinstance(rules.bucket, (int, float)):
        return by_size(collectives, rules.bucket)
    if not isinstance(rules.bucket, str):
        return by_group(collectives, dict(rules.user_buckets))
    return one_by_one(collectives) if rules.bucket == "parameter" else by_unit(collectives)
