"""Cut: the joint graph into forward and backward; choose what stays unsharded and what is recomputed under the budget.

The partitioner is torch's. What is gathered again is marked before (``reshard``). Where the budget is too small for
what the partitioner saves, it is asked to save less, and recompute more, until both graphs can be planned.
"""

# Why: docs/design.md, note N42; docs/design.md, note N44

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compiled_fsdp.compat.graphs import activation_share, copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be
from compiled_fsdp.passes.plan.choose import choose
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

Halves = tuple[GraphModule, GraphModule]

ACTIVATION_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.01)
"""How much of the activations' memory the partitioner is asked to keep, tried in this order until the plans fit.

Torch's ``activation_memory_budget``. At 0 it ignores MUST_SAVE.
"""


def cut(
    joint: GraphModule,
    ctx: PassContext,
    mark: Callable[[GraphModule, PassContext], GraphModule],
    partition: Callable[[GraphModule], Halves],
    agree: Callable[[str, Callable[[], Any]], Any],
) -> Halves:
    """Forward and backward.

    Args:
        mark: runs the joint passes.
        partition: torch's partitioner.
        agree: takes a topic and this rank's proposal, gives the first rank's. What is gathered again in backward
            follows from what is kept and from what is recomputed, so ranks agree on both.

    Raises:
        OverBudget: no choice fits, or on this rank not the one that the ranks agreed on.
    """
    if ctx.rules.keep_as_sharded and ctx.rules.budget is None:
        return partition(mark(joint, ctx))
    budget = ctx.rules.budget

    @functools.cache
    def at(share: float, kept: frozenset[int] | None) -> tuple[Halves, list[tuple[str, int]]]:
        """The graphs, and their phases with the bytes that each needs."""
        own = replace(ctx, kept_reads=kept)
        with activation_share(share):
            halves = partition(mark(copy_of(joint), own))
        return halves, [(tasks.phase, _needed(tasks, own)) for tasks in tasks_of(halves, own)]

    def largest_share(kept: frozenset[int] | None) -> float:
        assert budget is not None
        needs = []
        for share in ACTIVATION_SHARES:
            needed = max(needed for _, needed in at(share, kept)[1])
            if needed <= budget:
                return share
            needs.append(needed)
        raise over_budget("training", min(needs), budget, ctx.rules.bucket)

    def reads_to_keep() -> list[int]:
        """This rank's proposal of what stays unsharded from forward to backward."""
        forward, backward = tasks_of(partition(mark(copy_of(joint), replace(ctx, kept_reads=frozenset()))), ctx)
        try:
            kept = sorted(choose_unsharded(forward, backward, budget))
            if budget is not None and kept:
                largest_share(frozenset(kept))
        except OverBudget:  # activations take too much, or it was chosen by what each graph holds before it is cut anew
            return []
        return kept

    kept = ctx.kept_reads if ctx.rules.keep_as_sharded else frozenset(agree("kept reads", reads_to_keep))
    if budget is None:
        return partition(mark(joint, replace(ctx, kept_reads=kept)))
    share = agree("share of activations", lambda: largest_share(kept))
    halves, needs = at(share, kept)
    for phase, needed in needs:
        if needed > budget:
            raise over_budget(phase, needed, budget, ctx.rules.bucket)
    if share < 1:
        log.info("memory_budget: the partitioner keeps %d %% of the activations' memory", round(100 * share))
    return halves


def _needed(tasks: Tasks, ctx: PassContext) -> int:
    """Bytes that a graph's plan holds, or would have to."""
    try:
        schedule, _ = choose(tasks, ctx.rules, quick=True)
    except OverBudget as error:
        return error.least
    return min(max(memory_curve(tasks, s)) for s in (schedule, as_late_as_can_be(tasks, schedule)))


def tasks_of(halves: Halves, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Both graphs as the planner sees them; the graphs stay as they are."""
    out: list[Any] = []
    for half, phase in zip(halves, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(arrange(copy_of(half), own), own)[0])
    return out[0], out[1]
