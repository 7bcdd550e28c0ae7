"""Cut: split the joint graph into forward and backward; choose the kept parameters and the recomputed activations.

The partitioner is torch's, and ``reshard`` has marked the reads that backward gathers again. If the memory budget is
too small for the saved activations, backward computes some of them again: as few as fit (``recompute.py``).
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"
# Why: docs/design/planner.md, "Which parameters stay unsharded"

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.memory import storage_bytes
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be
from compiled_fsdp.passes.plan.choose import PlanRules, choose
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded
from compiled_fsdp.passes.recompute import Choices
from compiled_fsdp.passes.reshard import mark

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

Halves = tuple[GraphModule, GraphModule]
MarkPass = Callable[[GraphModule, "PassContext"], GraphModule]

CUTS = 10
"""The most ways to cut that are planned for one set of kept parameters."""
CLOSE_TO_BUDGET = 0.99
"""The search ends at a cut that needs this share of the budget, or more of it."""


def cut(
    joint: GraphModule,
    ctx: PassContext,
    mark_reads: MarkPass,
    partition: Callable[[GraphModule], Halves],
    agree: Callable[[str, Callable[[], Any]], Any],
) -> Halves:
    """Split a joint graph into forward and backward.

    Args:
        mark_reads: runs the joint passes.
        partition: torch's partitioner.
        agree: takes a topic and a function that makes this rank's proposal; returns the first rank's proposal. Ranks
            agree on the kept reads and on what is computed again, because both decide what backward gathers again.

    Raises:
        OverBudget: no choice fits into the budget, or the choice that the ranks agreed on does not fit on this rank.
    """
    if ctx.rules.keep_as_sharded and ctx.rules.budget is None:
        return partition(mark_reads(joint, ctx))
    cuts = _Cuts(joint, ctx, mark_reads, partition)
    own = ctx.kept_reads
    kept = own if ctx.rules.keep_as_sharded else frozenset(agree("kept reads", cuts.reads_to_keep))
    if ctx.rules.budget is None:
        return partition(mark_reads(joint, replace(ctx, kept_reads=kept)))
    step = agree("what is computed again", lambda: cuts.least_step(kept))
    chosen = cuts.at(step, kept)
    for tasks, needed in zip(chosen.tasks, chosen.needed, strict=True):
        if needed > ctx.rules.budget:
            raise over_budget(tasks.phase, needed, ctx.rules.budget, ctx.rules.bucket)
    if step and log.isEnabledFor(logging.INFO):
        log.info("memory_budget: %s", cuts.comparison(step, kept))
    return chosen.halves


@dataclass(frozen=True)
class _Cut:
    """One way to cut."""

    halves: Halves
    # Forward's and backward's tasks, as the planner sees them.
    tasks: tuple[Tasks, Tasks]
    rules: PlanRules

    @functools.cached_property
    def _planned(self) -> list[tuple[int, float]]:
        return [_needed(tasks, self.rules) for tasks in self.tasks]

    @property
    def needed(self) -> tuple[int, ...]:
        """The bytes that each graph needs."""
        return tuple(needed for needed, _ in self._planned)

    @property
    def seconds(self) -> float:
        """Seconds of both graphs, if they fit."""
        return sum(seconds for _, seconds in self._planned)

    @property
    def saved(self) -> dict[str, int]:
        """The bytes of what forward saves for backward, by the node's name; inputs of the joint graph are left out."""
        given = {node.name for node in self.halves[0].graph.nodes if node.op == "placeholder"}
        taken = [node for node in self.halves[1].graph.nodes if node.op == "placeholder"]
        return {n.name: storage_bytes(n) for n in taken if n.name not in given and "tangents" not in n.name}


class _Cuts:
    """The ways to cut a joint graph under a memory budget."""

    def __init__(self, joint: GraphModule, ctx: PassContext, mark_reads: MarkPass, partition: Any) -> None:
        self.joint, self.ctx, self.mark_reads, self.partition = joint, ctx, mark_reads, partition
        self.at = functools.cache(self._at)
        self.least_step = functools.cache(self._least_step)

    @functools.cached_property
    def choices(self) -> Choices:
        return Choices(self.mark_reads(copy_of(self.joint), self.ctx), self.ctx)

    def _at(self, step: int, kept: frozenset[int] | None) -> _Cut:
        """The cut with what this step of ``choices`` computes again, and these reads kept."""
        own = replace(self.ctx, kept_reads=kept)
        marked = self.mark_reads(copy_of(self.joint), own)
        if step:
            policies = self.choices.policies(min(step, len(self.choices) - 1))
            for node in marked.graph.nodes:
                if node.name in policies and "recompute" not in node.meta:
                    mark(node, policies[node.name])
        halves = self.partition(marked)
        return _Cut(halves, tasks_of(halves, own), own.rules)

    def _least_step(self, kept: frozenset[int] | None) -> int:
        """The first step that fits into the budget, as far as few tries find it: what it needs is only estimated.

        Raises:
            OverBudget: none fits.
        """
        budget = self.ctx.rules.budget
        assert budget is not None
        needs = {0: max(self.at(0, kept).needed)}
        if needs[0] <= budget:
            return 0
        saved = self.at(0, kept).saved
        estimates = [self.choices.bytes(step, saved) for step in range(len(self.choices))]
        below, fits = 0, len(estimates)
        while fits - below > 1 and len(needs) < CUTS:
            goal = estimates[below] - (needs[below] - budget)
            step = next((s for s in range(below + 1, fits) if estimates[s] <= goal), fits - 1)
            if fits < len(estimates):
                step = min(step, (below + fits) // 2)
            needs[step] = max(self.at(step, kept).needed)
            if needs[step] <= budget:
                fits = step
                if needs[step] > CLOSE_TO_BUDGET * budget:
                    break
            else:
                below = step
        if fits < len(estimates):
            return fits
        # What backward holds while it computes much again may be more than what that frees.
        ends = {step: max(self.at(step, kept).needed) for step in self.choices.ends_of_levels()}
        if (fits := next((step for step, needed in ends.items() if needed <= budget), 0)) == 0:
            # the search may miss other steps under the budget that the error gives
            raise over_budget("training", min(needs[0], *ends.values()), budget, self.ctx.rules.bucket)
        return fits

    def reads_to_keep(self) -> list[int]:
        """This rank's proposal: the reads that stay unsharded from forward to backward."""
        nothing: frozenset[int] = frozenset()
        budget = self.ctx.rules.budget
        try:
            step = 0 if budget is None else self.least_step(nothing)
            plain = self.at(step, nothing)
            kept = choose_unsharded(*plain.tasks, budget)
            if budget is None or not kept:
                return sorted(kept)
            return sorted(kept) if self.at(self.least_step(kept), kept).seconds < plain.seconds else []
        except OverBudget:  # the graphs cut with these reads hold more than was assumed
            return []

    def comparison(self, step: int, kept: frozenset[int] | None) -> str:
        """What this step saves, beside what torch's partitioner alone would."""
        cuts = self.at(0, kept), self.at(step, kept)
        before, after = (sum(one.saved.values()) / 1e6 for one in cuts)
        alone, again = (sum(tasks.seconds_before[-1] for tasks in one.tasks) for one in cuts)
        return (
            f"forward saves {after:,.1f} MB for backward instead of {before:,.1f} MB; to compute the rest again takes "
            f"{1e3 * (again - alone):.3f} ms"
        )


def _needed(tasks: Tasks, rules: PlanRules) -> tuple[int, float]:
    """Bytes at the peak of a graph's plan, and its seconds; if no plan fits, what the smallest one needs."""
    try:
        schedule, _ = choose(tasks, rules, quick=True)
    except OverBudget as error:
        return error.least, float("inf")
    needed = min(max(memory_curve(tasks, s)) for s in (schedule, as_late_as_can_be(tasks, schedule)))
    return needed, makespan(tasks, schedule)


def tasks_of(halves: Halves, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Return the tasks of both graphs, as the planner sees them; the graphs themselves do not change."""
    out: list[Any] = []
    for half, phase in zip(halves, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(arrange(copy_of(half), own), own)[0])
    return out[0], out[1]
