"""Cut: the joint graph into forward and backward, with what stays unsharded and what is recomputed chosen under the budget.

The partitioner is torch's. What is gathered again is marked before (``reshard``); where the budget is too small for what the
partitioner saves, it is asked to save less, and recompute more, until both graphs can be planned.
"""

# Why: docs/design.md, note N42; docs/design.md, note N44

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compiled_fsdp.compat import activation_share, copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.plan.keep import choose_kept
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.planner import as_late_as_can_be, choose

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

Cut = tuple[GraphModule, GraphModule]

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.01)
"""Of the activations' memory that the partitioner would keep; torch's ``activation_memory_budget``. At 0 it ignores MUST_SAVE."""


def cut(
    joint: GraphModule,
    ctx: PassContext,
    mark: Callable[[GraphModule, PassContext], GraphModule],
    partition: Callable[[GraphModule], Cut],
    agree: Callable[[str, Callable[[], Any]], Any],
) -> Cut:
    """Forward and backward.

    Args:
        mark: runs the joint passes. partition: torch's partitioner.
        agree: a name and this rank's proposal in, the first rank's out. What is gathered again in backward follows from what is
            kept and from what is recomputed, so ranks agree on both.

    Raises:
        OverBudget: no choice fits, or on this rank not the one that the ranks agreed on.
    """
    if ctx.keep_as_sharded and ctx.budget is None:
        return partition(mark(joint, ctx))
    if not ctx.keep_as_sharded:
        ctx = replace(ctx, kept=frozenset(agree("kept reads", lambda: _proposal(joint, ctx, mark, partition))))
    budget = ctx.budget
    if budget is None:
        return partition(mark(joint, ctx))

    @functools.cache
    def at(share: float) -> tuple[Cut, list[tuple[str, int]]]:
        """The graphs, and their phases with the bytes that each needs."""
        with activation_share(share):
            parts = partition(mark(copy_of(joint), ctx))
        return parts, [(tasks.phase, _needed(tasks, ctx)) for tasks in tasks_of(parts, ctx)]

    def smallest_cut() -> float:
        needs = []
        for share in SHARES:
            needed = max(needed for _, needed in at(share)[1])
            if needed <= budget:
                return share
            needs.append(needed)
        raise over_budget("training", min(needs), budget, ctx.bucket)

    share = agree("share of activations", smallest_cut)
    parts, needs = at(share)
    for phase, needed in needs:
        if needed > budget:
            raise over_budget(phase, needed, budget, ctx.bucket)
    if share < 1:
        log.info("memory_budget: the partitioner keeps %d %% of the activations' memory", round(100 * share))
    return parts


def _needed(tasks: Tasks, ctx: PassContext) -> int:
    """Bytes that a graph's plan holds, or would have to."""
    try:
        schedule, _ = choose(tasks, ctx, quick=True)
    except OverBudget as error:
        return error.least
    return min(max(memory_curve(tasks, s)) for s in (schedule, as_late_as_can_be(tasks, schedule)))


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
