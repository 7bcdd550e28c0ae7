"""Cut: split the joint graph into forward and backward; choose the kept parameters and the recomputed activations.

The partitioner is torch's, and ``reshard`` has marked the reads that backward gathers again. If the memory budget is
too small for the saved activations, the partitioner is asked to save less and recompute more, until both graphs can be
planned.
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"
# Why: docs/design/planner.md, "Which parameters stay unsharded"

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
"""Shares of the activations' memory that the partitioner may keep, tried in this order until the plans fit.

Each is a value of torch's ``activation_memory_budget``. At 0 the partitioner ignores MUST_SAVE.
"""


def cut(
    joint: GraphModule,
    ctx: PassContext,
    mark: Callable[[GraphModule, PassContext], GraphModule],
    partition: Callable[[GraphModule], Halves],
    agree: Callable[[str, Callable[[], Any]], Any],
) -> Halves:
    """Split a joint graph into forward and backward.

    Args:
        mark: runs the joint passes.
        partition: torch's partitioner.
        agree: takes a topic and a function that makes this rank's proposal; returns the first rank's proposal. Ranks
            agree on the kept reads and on the share of activations, because both decide what backward gathers again.

    Raises:
        OverBudget: no choice fits into the budget, or the choice that the ranks agreed on does not fit on this rank.
    """
    if ctx.rules.keep_as_sharded and ctx.rules.budget is None:
        return partition(mark(joint, ctx))
    budget = ctx.rules.budget

    @functools.cache
    def at(share: float, kept: frozenset[int] | None) -> tuple[Halves, list[tuple[str, int]]]:
        """Cut with this share of activations and these kept reads; return the halves, and (phase, bytes needed)."""
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
        """This rank's proposal: the reads that stay unsharded from forward to backward."""
        forward, backward = tasks_of(partition(mark(copy_of(joint), replace(ctx, kept_reads=frozenset()))), ctx)
        try:
            kept = sorted(choose_unsharded(forward, backward, budget))
            if budget is not None and kept:
                largest_share(frozenset(kept))
        except OverBudget:  # activations need too much, or the graphs cut with these reads hold more than was assumed
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
    """Bytes at the peak of a graph's plan; if no plan fits, the bytes that the smallest one needs."""
    try:
        schedule, _ = choose(tasks, ctx.rules, quick=True)
    except OverBudget as error:
        return error.least
    return min(max(memory_curve(tasks, s)) for s in (schedule, as_late_as_can_be(tasks, schedule)))


def tasks_of(halves: Halves, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Return the tasks of both graphs, as the planner sees them; the graphs themselves do not change."""
    out: list[Any] = []
    for half, phase in zip(halves, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(arrange(copy_of(half), own), own)[0])
    return out[0], out[1]
