"""Cut: split the joint graph into forward and backward; choose what stays in memory from one to the other.

The partitioner is torch's, and ``reshard`` has marked the reads that backward gathers again. If the memory budget is
too small for the saved activations, some of them wait in host memory (``offload.py``), and backward computes some again
(``recompute.py``): as few as fit.
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx import GraphModule

from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.context import ForBackward
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.memory import mark_computed, saved_inputs, storage_bytes
from compiled_fsdp.passes.offload import Candidate, Candidates, offload
from compiled_fsdp.passes.plan.adjust import as_late_as_can_be
from compiled_fsdp.passes.plan.choose import PlanRules, choose
from compiled_fsdp.passes.plan.search import OverBudget, over_budget
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded
from compiled_fsdp.passes.recompute import Choices
from compiled_fsdp.passes.reshard import mark
from compiled_fsdp.passes.start_copies import start_copies

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

log = logging.getLogger(__name__)

Halves = tuple[GraphModule, GraphModule]
MarkPass = Callable[[GraphModule, "PassContext"], GraphModule]

CUTS = 12
"""The most ways to cut that are planned for one set of kept parameters."""
QUICKER = 0.999
"""A way that copies or computes again more than the first one that fits is taken if it takes this share of its time."""
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
    partition = functools.partial(_with_marks, partition)
    if ctx.rules.keep_as_sharded and ctx.rules.budget is None:
        return partition(mark_reads(joint, ctx))
    cuts = _Cuts(joint, ctx, mark_reads, partition)
    own = ctx.kept_reads
    kept = own if ctx.rules.keep_as_sharded else frozenset(agree("kept reads", cuts.reads_to_keep))
    if ctx.rules.budget is None:
        return partition(mark_reads(joint, replace(ctx, kept_reads=kept)))
    way = _Way(*agree("what is computed again and offloaded", lambda: cuts.least(kept)))
    chosen = cuts.at(way, kept)
    for tasks, needed in zip(chosen.tasks, chosen.needed, strict=True):
        if needed > ctx.rules.budget:
            raise over_budget(tasks.phase, needed, ctx.rules.budget, ctx.rules.bucket)
    ctx.for_backward = cuts.for_backward(way, kept)
    if way != _Way():
        log.info("memory_budget: for backward: %s", ctx.for_backward)
    return chosen.halves


def _with_marks(partition: Callable[[GraphModule], Halves], joint: GraphModule) -> Halves:
    halves = partition(joint)
    mark_computed(*halves)
    return halves


class _Way(NamedTuple):
    """A way to cut."""

    # A step of ``Choices``: what backward computes again.
    step: int = 0
    # How many of the saved tensors are offloaded: the first so many of ``Candidates``, or HIDDEN, or ALL.
    offloaded: int = 0


HIDDEN, ALL = -1, 2**31


@dataclass(frozen=True)
class _Cut:
    """One way to cut, carried out."""

    halves: Halves
    # Forward's and backward's tasks, as the planner sees them.
    tasks: tuple[Tasks, Tasks]
    rules: PlanRules
    offloaded: tuple[Candidate, ...] = ()

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
        held, owner = saved_inputs(self.halves[1])
        sizes = {n: held.get(n, 0) if n in owner else storage_bytes(n) for n in taken}
        return {n.name: size for n, size in sizes.items() if n.name not in given and "tangents" not in n.name}


class _Cuts:
    """The ways to cut a joint graph under a memory budget."""

    def __init__(self, joint: GraphModule, ctx: PassContext, mark_reads: MarkPass, partition: Any) -> None:
        self.joint, self.ctx, self.mark_reads, self.partition = joint, ctx, mark_reads, partition
        self._exactly = functools.cache(self._carry_out)
        self.least = functools.cache(self._least)
        self._halves = functools.cache(self._cut)
        self._candidates = functools.cache(self._find_candidates)

    @functools.cached_property
    def choices(self) -> Choices:
        return Choices(self.mark_reads(copy_of(self.joint), self.ctx), self.ctx)

    def _cut(self, step: int, kept: frozenset[int] | None) -> Halves:
        """Cut with what this step of ``choices`` computes again, and these reads kept."""
        marked = self.mark_reads(copy_of(self.joint), replace(self.ctx, kept_reads=kept))
        if step:
            policies = self.choices.policies(min(step, len(self.choices) - 1))
            for node in marked.graph.nodes:
                if node.name in policies and "recompute" not in node.meta:
                    mark(node, policies[node.name])
        halves: Halves = self.partition(marked)
        return halves

    def _find_candidates(self, step: int, kept: frozenset[int] | None) -> Candidates:
        return Candidates(*self._halves(step, kept), self.ctx)

    def at(self, way: _Way, kept: frozenset[int] | None) -> _Cut:
        """Cut in this way, with these reads kept."""
        return self._exactly(self.exact(way, kept), kept)

    def exact(self, way: _Way, kept: frozenset[int] | None) -> _Way:
        """The same way with the number of tensors that it offloads."""
        if not (way.offloaded and self.ctx.host_memory):
            return _Way(way.step)
        found = self._candidates(way.step, kept)
        return _Way(way.step, found.hidden if way.offloaded == HIDDEN else min(way.offloaded, len(found.all)))

    def _carry_out(self, way: _Way, kept: frozenset[int] | None) -> _Cut:
        own, halves = replace(self.ctx, kept_reads=kept), self._halves(way.step, kept)
        offloaded: tuple[Candidate, ...] = ()
        if way.offloaded:
            offloaded = self._candidates(way.step, kept).all[: way.offloaded]
            halves = copy_of(halves[0]), copy_of(halves[1])
            offload(*halves, [each.name for each in offloaded])
        return _Cut(halves, tasks_of(halves, own), own.rules, offloaded)

    def _least(self, kept: frozenset[int] | None) -> _Way:
        """The first way that fits into the budget, as far as few tries find it: what a way needs is only estimated.

        If a later one takes less time, it is that: for example, the same choice for all segments.

        Raises:
            OverBudget: none fits.
        """
        budget = self.ctx.rules.budget
        assert budget is not None
        needs: dict[_Way, int] = {}

        def need(way: _Way) -> int:
            if way not in needs:
                needs[way] = max(self.at(way, kept).needed)
            return needs[way]

        below = _Way(), sum(self.at(_Way(), kept).saved.values())
        if need(below[0]) <= budget:
            return below[0]
        for ways in self._ladder(kept):
            if len(needs) >= CUTS or not ways:
                continue
            if need(ways[-1][0]) <= budget:
                first = _first_that_fits([below, *ways], need, budget, CUTS - len(needs))
                need(first._replace(step=self.choices.end_of_level(first.step)))
                seconds = {way: self.at(way, kept).seconds for way, needed in needs.items() if needed <= budget}
                quickest = min(seconds, key=seconds.__getitem__)
                return self.exact(quickest if seconds[quickest] < QUICKER * seconds[first] else first, kept)
            below = ways[-1]
        # What backward holds while it computes much again may be more than what that frees.
        offloaded = ALL if self.ctx.host_memory else 0
        ends = [_Way(step, offloaded) for step in self.choices.ends_of_levels()]
        for way in ends:
            if need(way) <= budget:
                return self.exact(way, kept)
        # the search may miss other ways under the budget that the error gives
        raise over_budget("training", min(needs.values()), budget, self.ctx.rules.bucket)

    def _ladder(self, kept: frozenset[int] | None) -> Iterator[list[tuple[_Way, int]]]:
        """Yield ways that need less and less memory, each with an estimate of the bytes that it holds for backward.

        What costs least for a byte comes first: to offload while compute hides the copies; to compute again, as long as
        that is cheaper than a copy that compute waits for; to offload the rest; to compute everything again.
        """
        saved = self.at(_Way(), kept).saved
        again = [self.choices.bytes(step, saved) for step in range(len(self.choices))]
        if not self.ctx.host_memory:
            yield [(_Way(step), size) for step, size in enumerate(again)][1:]
            return
        hardware = self.ctx.hardware
        found = self._candidates(0, kept)
        left = [again[0] - size for size in itertools.accumulate(each.bytes for each in found.all[: found.hidden])]
        yield [(_Way(0, count), size) for count, size in enumerate(left, 1)]
        # a byte's two copies, in times to read or write it; a host that computes reads and writes it for each
        copies = 4 if hardware.host_computes else 2 * hardware.copy / hardware.host_copy
        cheap, hidden = self.choices.upto_price(copies), again[0] - min([again[0], *left])
        yield [(_Way(step, HIDDEN), size - hidden) for step, size in enumerate(again[: cheap + 1])][1:]
        found = self._candidates(cheap, kept)
        sizes = itertools.accumulate(each.bytes for each in found.all)
        yield [(_Way(cheap, n), again[cheap] - size) for n, size in enumerate(sizes, 1) if n > found.hidden]
        rest = range(cheap + 1, len(self.choices))
        yield [(_Way(step, ALL), self.choices.held(step)) for step in rest]

    def reads_to_keep(self) -> list[int]:
        """This rank's proposal: the reads that stay unsharded from forward to backward."""
        nothing: frozenset[int] = frozenset()
        budget = self.ctx.rules.budget
        try:
            if budget is None:
                return sorted(choose_unsharded(*self.at(_Way(), nothing).tasks, None))
            first = self.least(nothing)
            best = self.at(first, nothing).seconds, nothing
        except OverBudget:  # the graphs cut with these reads hold more than was assumed
            return []
        for kept in self._may_be_kept(first):
            if kept != best[1]:
                with contextlib.suppress(OverBudget):
                    best = min(best, (self.at(self.least(kept), kept).seconds, kept), key=lambda found: found[0])
        return sorted(best[1])

    def _may_be_kept(self, first: _Way) -> Iterator[frozenset[int]]:
        """Sets of reads to try: those that have room beside the first way that fits, or beside one that copies all that
        compute hides; and everything, for which more may be copied or computed again.
        """
        nothing: frozenset[int] = frozenset()
        budget = self.ctx.rules.budget
        more = self.exact(first._replace(offloaded=HIDDEN), nothing)
        for way in [first, more] if more.offloaded > first.offloaded else [first]:
            with contextlib.suppress(OverBudget):
                yield choose_unsharded(*self.at(way, nothing).tasks, budget)
        yield frozenset(task.read for task in self.at(first, nothing).tasks[1].gathers)

    def for_backward(self, way: _Way, kept: frozenset[int] | None) -> ForBackward:
        """What this way leaves for backward, beside what torch's partitioner alone would."""
        cuts = self.at(_Way(), kept), self.at(way, kept)
        alone, again = (sum(tasks.seconds_before[-1] for tasks in one.tasks) for one in cuts)
        before, after = (sum(one.saved.values()) for one in cuts)
        offloaded = cuts[1].offloaded
        copied = sum(each.bytes for each in offloaded)
        bound = None if way == _Way() else self._bound(cuts[1].tasks[0].persistent)
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


def _first_that_fits(ways: Sequence[tuple[_Way, int]], need: Callable[[_Way], int], budget: float, tries: int) -> _Way:
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


def tasks_of(halves: Halves, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Return the tasks of both graphs, as the planner sees them; the graphs themselves do not change."""
    out: list[Any] = []
    for half, phase in zip(halves, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(start_copies(arrange(copy_of(half), own), own), own)[0])
    return out[0], out[1]
