"""Cut: the joint graph into forward and backward, with what stays unsharded and what is recomputed chosen under the budget.

The partitioner is torch's. What is gathered again is marked before (``reshard``); where the budget is too small for what the
partitioner saves, it is asked to save less, and recompute more, until both graphs can be planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compiled_fsdp.compat import activation_share, copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.plan.keep import choose_kept
from compiled_fsdp.passes.plan.search import OverBudget, least_peak, over_budget, search
from compiled_fsdp.passes.plan.tasks import Tasks

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext

log = logging.getLogger(__name__)

Cut = tuple[GraphModule, GraphModule]

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
"""Of the activations' memory that the partitioner would keep; torch's ``activation_memory_budget``."""


def cut(
    joint: GraphModule,
    ctx: PassContext,
    mark: Callable[[GraphModule, PassContext], GraphModule],
    partition: Callable[[GraphModule], Cut],
    agree_on_kept: Callable[[Callable[[], list[int]]], list[int]],
) -> Cut:
    """Forward and backward.

    Args:
        mark: runs the joint passes. partition: torch's partitioner.
        agree_on_kept: this rank's proposal of reads to keep in, the first rank's out.

    Raises:
        OverBudget: no choice fits.
    """
    if ctx.keep_as_sharded and ctx.budget is None:
        return partition(mark(joint, ctx))
    kept: frozenset[int] | None = None
    if not ctx.keep_as_sharded:
        kept = frozenset(agree_on_kept(lambda: _proposal(joint, ctx, mark, partition)))
    if ctx.budget is None:
        return partition(mark(joint, replace(ctx, kept=kept)))
    least: list[tuple[int, str]] = []
    for share in SHARES:
        with activation_share(share) as applied:
            if not applied:
                continue
            parts = partition(mark(copy_of(joint), replace(ctx, kept=kept)))
        both = tasks_of(parts, ctx)
        try:
            for tasks in both:
                search(tasks, ctx.budget, quick=True)
        except OverBudget:
            least.append(max((least_peak(tasks), tasks.phase) for tasks in both))
            continue
        if share < 1:
            log.info("memory_budget: the partitioner keeps %d %% of the activations' memory", round(100 * share))
        return parts
    needed, phase = min(least)
    raise over_budget(phase, needed, ctx.budget)


def _proposal(
    joint: GraphModule,
    ctx: PassContext,
    mark: Callable[[GraphModule, PassContext], GraphModule],
    partition: Callable[[GraphModule], Cut],
) -> list[int]:
    parts = partition(mark(copy_of(joint), replace(ctx, kept=frozenset())))
    forward, backward = tasks_of(parts, ctx)
    try:
        return sorted(choose_kept(forward, backward, ctx.budget))
    except OverBudget:
        return []  # activations take too much: the caller saves less of them, and raises where that does not help


def tasks_of(parts: Cut, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Both graphs as the planner sees them; the graphs stay as they are."""
    out: list[Any] = []
    for part, phase in zip(parts, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(arrange(copy_of(part), own), own).tasks)
    return out[0], out[1]
