"""Schedules that need no search, such as FSDP2's order, and the memory that a plan may hold without a budget."""

# Why: docs/design/planner.md, "The memory limit without a budget"

from __future__ import annotations

import itertools

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.bucketing import by_unit, one_by_one
from compiled_fsdp.passes.plan.order import Order
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks


def at_once(tasks: Tasks) -> Schedule:
    """Every collective alone, launched when needed (or complete) and waited for at once, which holds least memory."""
    placed = orders.one_ahead(*orders.sides_of(tasks, {}), overlap=False)
    return tuple(bucket.at(at, at) for bucket, at in placed)


def per_unit(tasks: Tasks, *, bucketing: str = "unit", form: str | None = None, asked: bool = False) -> Schedule:
    """FSDP2's order: one gather ahead of compute.

    Args:
        bucketing: "unit" for a bucket for each unit or repeated block, "parameter" for one for each parameter.
        form: the form of buckets of several tensors; None for the cheapest.
        asked: whether to launch the gathers of the user's prefetch lists ahead instead.
    """
    split = by_unit if bucketing == "unit" else one_by_one
    sides = orders.sides_of(tasks, {kind: split(tasks.collectives(kind)) for kind in Kind}, form)
    return one_ahead_schedule(tasks, *sides, asked=asked)


def one_ahead_schedule(
    tasks: Tasks, supplies: Order, drains: Order, *, after: bool = False, overlap: bool = True, asked: bool = False
) -> Schedule:
    """FSDP2's order of given buckets as a schedule.

    Each reduction is waited for one segment after the next reduction is launched.

    Args:
        supplies, drains: the buckets of gathers and of reductions, in order.
        after, overlap: as for ``order.one_ahead``.
        asked: whether to launch the gathers of the user's prefetch lists ahead, instead of one gather.
    """
    places = orders.asked_places(tasks, supplies) if asked else None
    placed = orders.one_ahead(supplies, drains, after=after, overlap=overlap, asked=places)
    later = {bucket: following.ready + 1 for bucket, following in itertools.pairwise(drains)}
    return tuple(
        bucket.at(at, bucket.due)
        if bucket.kind.supplies
        else bucket.at(at, max(at, min(later.get(bucket, tasks.end), bucket.due)) if overlap else at)
        for bucket, at in placed
    )


def least_peak(tasks: Tasks) -> int:
    """Bytes at the peak of ``at_once``, the plan that holds least memory."""
    return max(memory_curve(tasks, at_once(tasks)))


def usual_limit(tasks: Tasks) -> int:
    """Bytes that a plan may hold if the user gives no budget.

    This is the larger of two numbers: the peak of FSDP2's order, with one gather ahead or the user's prefetch lists;
    and the peak of ``at_once`` plus ``Tasks.spare_bytes``.
    """
    fsdp2 = per_unit(tasks, asked=tasks.has_prefetch_lists)
    return max(max(memory_curve(tasks, fsdp2)), least_peak(tasks) + tasks.spare_bytes)
