"""Cut: split the joint graph into forward and backward; choose what stays in memory from one to the other.

The partitioner is torch's, and ``reshard`` has marked the reads that backward gathers again. If the memory budget is
too small for the saved activations, some of them wait in host memory, and backward computes some again: as few as fit.
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"
# Why: docs/design/planner.md, "Which parameters stay unsharded"

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.context import ForBackward
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be
from compiled_fsdp.passes.plan.choose import PlanRules, choose
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded
from compiled_fsdp.passes.recompute import Choices
from compiled_fsdp.passes.ways_to_cut import ALL, HIDDEN, Halves, Reads, Way, WaysToCut

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

CUTS = 12
"""The most ways to cut that are planned for one set of kept parameters."""
QUICKER = 0.999
"""A way that copies or computes again more than the first one that fits is taken if it takes this share of its time."""
CLOSE_TO_BUDGET = 0.99
"""The search ends at a cut that needs this share of the budget, or more of it."""


def cut(ways: WaysToCut, ctx: PassContext, agree: Callable[[str, Callable[[], Any]], Any]) -> Halves:
    """Split a joint graph into forward and backward.

    Args:
        ways: the graph, and the ways to cut it.
        ctx: the context of its passes.
        agree: takes a topic and a function that makes this rank's proposal; returns the first rank's proposal. Ranks
            agree on the kept reads and on what is computed again, because both decide what backward gathers again.

    Raises:
        OverBudget: no choice fits into the budget, or the choice that the ranks agreed on does not fit on this rank.
    """
    budget = ctx.rules.budget
    if ctx.rules.keep_as_sharded and budget is None:
        return ways.plain(ctx.kept_reads)
    search = _Search(ways, ctx)
    kept = ctx.kept_reads if ctx.rules.keep_as_sharded else frozenset(agree("kept reads", search.reads_to_keep))
    if budget is None:
        return ways.plain(kept)
    way = Way(*agree("what is computed again and offloaded", lambda: search.least(kept)))
    chosen = ways.at(way, kept)
    for tasks, needed in zip(chosen.tasks, search.needed(way, kept), strict=True):
        if needed > budget:
            raise over_budget(tasks.phase, needed, budget, ctx.rules.bucket)
    ctx.for_backward = search.for_backward(way, kept)
    if way != Way():
        log.info("memory_budget: for backward: %s", ctx.for_backward)
    return copy_of(chosen.halves[0]), copy_of(chosen.halves[1])  # ``ways`` keeps its own for other budgets


class _Search:
    """The search for a way to cut."""

    def __init__(self, ways: WaysToCut, ctx: PassContext) -> None:
        self.ways, self.ctx = ways, ctx
        self.at, self.exact, self.candidates = ways.at, ways.exact, ways.candidates
        self._planned = functools.cache(self._plan)
        self.least = functools.cache(self._least)

    @property
    def choices(self) -> Choices:
        """What backward may compute again."""
        return self.ways.choices

    def needed(self, way: Way, kept: Reads) -> tuple[int, ...]:
        """The bytes that each graph needs."""
        return tuple(needed for needed, _ in self._planned(self.exact(way, kept), kept))

    def seconds(self, way: Way, kept: Reads) -> float:
        """Seconds of both graphs, if they fit."""
        return sum(seconds for _, seconds in self._planned(self.exact(way, kept), kept))

    def _plan(self, way: Way, kept: Reads) -> list[tuple[int, float]]:
        return [_needed(tasks, self.ctx.rules) for tasks in self.at(way, kept).tasks]

    def _least(self, kept: Reads) -> Way:
        """The first way that fits into the budget, as far as few tries find it: what a way needs is only estimated.

        If a later one takes less time, it is that: for example, the same choice for all segments.

        Raises:
            OverBudget: none fits.
        """
        budget = self.ctx.rules.budget
        assert budget is not None
        needs: dict[Way, int] = {}

        def need(way: Way) -> int:
            if way not in needs:
                needs[way] = max(self.needed(way, kept))
            return needs[way]

        below = Way(), sum(self.at(Way(), kept).saved.values())
        if need(below[0]) <= budget:
            return below[0]
        for ways in self._ladder(kept):
            if len(needs) >= CUTS or not ways:
                continue
            if need(ways[-1][0]) <= budget:
                first = _first_that_fits([below, *ways], need, budget, CUTS - len(needs))
                need(first._replace(step=self.choices.end_of_level(first.step)))
                seconds = {way: self.seconds(way, kept) for way, needed in needs.items() if needed <= budget}
                quickest = min(seconds, key=seconds.__getitem__)
                return self.exact(quickest if seconds[quickest] < QUICKER * seconds[first] else first, kept)
            below = ways[-1]
        # What backward holds while it computes much again may be more than what that frees.
        offloaded = ALL if self.ctx.host_memory else 0
        ends = [Way(step, offloaded) for step in self.choices.ends_of_levels()]
        for way in ends:
            if need(way) <= budget:
                return self.exact(way, kept)
        # the search may miss other ways under the budget that the error gives
        raise over_budget("training", min(needs.values()), budget, self.ctx.rules.bucket)

    def _ladder(self, kept: Reads) -> Iterator[list[tuple[Way, int]]]:
        """Yield ways that need less and less memory, each with an estimate of the bytes that it holds for backward.

        What costs least for a byte comes first: to offload while compute hides the copies; to compute again, as long as
        that is cheaper than a copy that compute waits for; to offload the rest; to compute everything again.
        """
        saved = self.at(Way(), kept).saved
        again = [self.choices.bytes(step, saved) for step in range(len(self.choices))]
        if not self.ctx.host_memory:
            yield [(Way(step), size) for step, size in enumerate(again)][1:]
            return
        hardware = self.ctx.hardware
        found = self.candidates(0, kept)
        left = [again[0] - size for size in itertools.accumulate(each.bytes for each in found.all[: found.hidden])]
        yield [(Way(0, count), size) for count, size in enumerate(left, 1)]
        # a byte's two copies, in times to read or write it; a host that computes reads and writes it for each
        copies = 4 if hardware.host_computes else 2 * hardware.copy / hardware.host_copy
        cheap, hidden = self.choices.upto_price(copies), again[0] - min([again[0], *left])
        yield [(Way(step, HIDDEN), size - hidden) for step, size in enumerate(again[: cheap + 1])][1:]
        found = self.candidates(cheap, kept)
        sizes = itertools.accumulate(each.bytes for each in found.all)
        yield [(Way(cheap, n), again[cheap] - size) for n, size in enumerate(sizes, 1) if n > found.hidden]
        rest = range(cheap + 1, len(self.choices))
        yield [(Way(step, ALL), self.choices.held(step)) for step in rest]

    def reads_to_keep(self) -> list[int]:
        """This rank's proposal: the reads that stay unsharded from forward to backward."""
        nothing: frozenset[int] = frozenset()
        budget = self.ctx.rules.budget
        try:
            if budget is None:
                return sorted(choose_unsharded(*self.at(Way(), nothing).tasks, None))
            first = self.least(nothing)
            best = self.seconds(first, nothing), nothing
        except OverBudget:  # the graphs cut with these reads hold more than was assumed
            return []
        for kept in self._may_be_kept(first):
            if kept != best[1]:
                with contextlib.suppress(OverBudget):
                    best = min(best, (self.seconds(self.least(kept), kept), kept), key=lambda found: found[0])
        return sorted(best[1])

    def _may_be_kept(self, first: Way) -> Iterator[frozenset[int]]:
        """Sets of reads to try: those that have room beside the first way that fits, or beside one that copies all that
        compute hides; and everything, for which more may be copied or computed again.
        """
        nothing: frozenset[int] = frozenset()
        budget = self.ctx.rules.budget
        assert budget is not None
        more = self.exact(first._replace(offloaded=HIDDEN), nothing)
        for way in [first, more] if more.offloaded > first.offloaded else [first]:
            with contextlib.suppress(OverBudget):
                yield choose_unsharded(*self.at(way, nothing).tasks, budget)
        backward = self.at(first, nothing).tasks[1]
        sizes = {task.read: task.size.full for task in backward.gathers}
        if backward.persistent + sum(sizes.values()) <= budget:
            yield frozenset(sizes)

    def for_backward(self, way: Way, kept: Reads) -> ForBackward:
        """What this way leaves for backward, beside what torch's partitioner alone would."""
        cuts = self.at(Way(), kept), self.at(way, kept)
        alone, again = (sum(tasks.seconds_before[-1] for tasks in one.tasks) for one in cuts)
        before, after = (sum(one.saved.values()) for one in cuts)
        offloaded = cuts[1].offloaded
        copied = sum(each.bytes for each in offloaded)
        bound = None if way == Way() else self._bound(cuts[1].tasks[0].persistent)
        return ForBackward(after, before, len(offloaded), copied, again - alone, bound)

    def _bound(self, persistent: int) -> float:
        """Seconds that both graphs take at least, whatever is saved, copied or computed again within the budget."""
        hardware, by_link = self.ctx.hardware, bool(self.ctx.host_memory) and not self.ctx.hardware.host_computes
        assert self.ctx.rules.budget is not None
        return self.choices.least_seconds(
            self.ctx.rules.budget - persistent,
            copied=hardware.host_copy if by_link else 0.0,
            # a host that computes can read and write each byte twice instead
            highest_price=4 / hardware.copy if self.ctx.host_memory and hardware.host_computes else math.inf,
        )


def _first_that_fits(ways: Sequence[tuple[Way, int]], need: Callable[[Way], int], budget: float, tries: int) -> Way:
    """The first of ``ways`` that fits into the budget, found in few tries.

    Args:
        ways: ways with estimates of their bytes; the first one does not fit, and the last one does.
        need: the bytes that a way needs.
        tries: how many more ways may be tried.
    """
    out, fits = 0, len(ways) - 1
    while fits - out > 1 and tries > 0 and need(ways[fits][0]) < CLOSE_TO_BUDGET * budget:
        tries -= 1
        known, size = ways[out]
        goal = size - (need(known) - budget)
        place = next((i for i in range(out + 1, fits) if ways[i][1] <= goal), fits - 1)
        place = min(place, (out + fits) // 2)
        if need(ways[place][0]) <= budget:
            fits = place
        else:
            out = place
    return ways[fits][0]


def _needed(tasks: Tasks, rules: PlanRules) -> tuple[int, float]:
    """Bytes at the peak of a graph's plan, and its seconds; if no plan fits, what the smallest one needs."""
    try:
        schedule, _ = choose(tasks, rules, quick=True)
    except OverBudget as error:
        return error.least, float("inf")
    needed = min(max(memory_curve(tasks, s)) for s in (schedule, as_late_as_can_be(tasks, schedule)))
    return needed, makespan(tasks, schedule)
