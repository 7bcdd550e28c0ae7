"""Schedules that need no search, FSDP2's order among them, and the memory that a plan may take without a budget."""

# Why: docs/design.md, note N43

from __future__ import annotations

import itertools

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.bucketing import by_unit, one_by_one
from compiled_fsdp.passes.plan.order import Order
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks


def at_once(tasks: Tasks) -> Schedule:
    """Every collective alone, launched when it is needed (or complete) and waited for at once: the least memory."""
    placed = orders.one_ahead(*orders.sides_of(tasks, {}), overlap=False)
    return tuple(bucket.at(at, at) for bucket, at in placed)


def per_unit(tasks: Tasks, *, bucketing: str = "unit", form: str | None = None, asked: bool = False) -> Schedule:
    """The plain plan: one gather ahead of compute, in a bucket for each block ("unit") or parameter ("none").

    With ``asked`` the gathers of the user's prefetch lists are launched ahead instead.
    """
    split = by_unit if bucketing == "unit" else one_by_one
    sides = orders.sides_of(tasks, {kind: split(tasks.collectives(kind)) for kind in Kind}, form)
    return one_ahead_schedule(tasks, *sides, asked=asked)


def one_ahead_schedule(
    tasks: Tasks, supplies: Order, drains: Order, *, after: bool = False, overlap: bool = True, asked: bool = False
) -> Schedule:
    """FSDP2's order as a schedule: one gather ahead, or what prefetch lists have ``asked`` for.

    A reduction is waited for one segment after the next one was launched. Other arguments are those of
    ``order.one_ahead``.
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
    """Bytes of the plan that holds least: every collective alone and at once."""
    return max(memory_curve(tasks, at_once(tasks)))


def usual_limit(tasks: Tasks) -> int:
    """Bytes that a plan may hold where the user gives no budget.

    It is what FSDP2's order holds (one gather ahead, in a bucket for each unit, or what prefetch lists ask for); or, if
    that is more, what the graph needs with every collective alone and at once, and ``spare_bytes``.
    """
    fsdp2 = per_unit(tasks, asked=tasks.has_prefetch_lists)
    return max(max(memory_curve(tasks, fsdp2)), least_peak(tasks) + tasks.spare_bytes)
