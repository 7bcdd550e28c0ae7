"""Cut a joint graph into forward and backward in several ways, each of them once.

A way names the results that backward computes again (``recompute.py``), and the tensors that wait in host memory
(``offload.py``). ``cut.py`` chooses the way.
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx import GraphModule

from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.memory import mark_computed, saved_inputs, storage_bytes
from compiled_fsdp.passes.offload import Candidate, Candidates, offload
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.recompute import Choices
from compiled_fsdp.passes.regather import regather
from compiled_fsdp.passes.reshard import mark
from compiled_fsdp.passes.start_copies import start_copies

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

Halves = tuple[GraphModule, GraphModule]
MarkPass = Callable[[GraphModule, "PassContext"], GraphModule]
Reads = frozenset[int] | None
"""The reads that stay unsharded from forward to backward; None: as they are sharded."""


class Way(NamedTuple):
    """A way to cut."""

    # A step of ``Choices``: what backward computes again.
    step: int = 0
    # How many of the saved tensors are offloaded: the first so many of ``Candidates``, or HIDDEN, or ALL.
    offloaded: int = 0


HIDDEN, ALL = -1, 2**31


@dataclass(frozen=True)
class Cut:
    """One way to cut, carried out."""

    halves: Halves
    # Forward's and backward's tasks, as the planner sees them.
    tasks: tuple[Tasks, Tasks]
    offloaded: tuple[Candidate, ...] = ()

    @functools.cached_property
    def saved(self) -> dict[str, int]:
        """The bytes of what forward saves for backward, by the node's name; inputs of the joint graph are left out."""
        given = {node.name for node in self.halves[0].graph.nodes if node.op == "placeholder"}
        taken = [node for node in self.halves[1].graph.nodes if node.op == "placeholder"]
        held, owner = saved_inputs(self.halves[1])
        sizes = {n: held.get(n, 0) if n in owner else storage_bytes(n) for n in taken}
        return {n.name: size for n, size in sizes.items() if n.name not in given and "tangents" not in n.name}


class WaysToCut:
    """A joint graph, and the ways to cut it.

    Graphs that are planned under several memory budgets share one object, because a cut depends on whether there is a
    budget, but not on how large it is.

    Args:
        joint: the joint graph.
        ctx: the context of its passes.
        mark_reads: runs the joint passes.
        partition: torch's partitioner.
    """

    def __init__(
        self, joint: GraphModule, ctx: PassContext, mark_reads: MarkPass, partition: Callable[[GraphModule], Halves]
    ) -> None:
        self._joint, self._ctx, self._mark_reads, self._partition = joint, ctx, mark_reads, partition
        self._halves = functools.cache(self._cut)
        self._candidates = functools.cache(self._find_candidates)
        self._carried_out = functools.cache(self._carry_out)

    @functools.cached_property
    def choices(self) -> Choices:
        """What backward may compute again."""
        return Choices(self._mark_reads(copy_of(self._joint), self._ctx), self._ctx)

    def candidates(self, step: int, kept: Reads) -> Candidates:
        """What may be offloaded, if a step of ``choices`` is computed again and these reads are kept."""
        return self._candidates(step, kept)

    def plain(self, kept: Reads) -> Halves:
        """Cut with these reads kept, and leave the rest to torch's partitioner. This uses the joint graph up."""
        return self._into_halves(self._mark_reads(self._joint, replace(self._ctx, kept_reads=kept)))

    def at(self, way: Way, kept: Reads) -> Cut:
        """Cut in this way, with these reads kept. The graphs must not be changed."""
        return self._carried_out(self.exact(way, kept), kept)

    def exact(self, way: Way, kept: Reads) -> Way:
        """The same way with the number of tensors that it offloads."""
        if not (way.offloaded and self._ctx.host_memory):
            return Way(way.step)
        found = self._candidates(way.step, kept)
        return Way(way.step, found.hidden if way.offloaded == HIDDEN else min(way.offloaded, len(found.all)))

    def _cut(self, step: int, kept: Reads) -> Halves:
        marked = self._mark_reads(copy_of(self._joint), replace(self._ctx, kept_reads=kept))
        if step:
            policies = self.choices.policies(min(step, len(self.choices) - 1))
            for node in marked.graph.nodes:
                if node.name in policies and "recompute" not in node.meta:
                    mark(node, policies[node.name])
        return self._into_halves(marked)

    def _into_halves(self, marked: GraphModule) -> Halves:
        halves = self._partition(marked)
        mark_computed(*halves)
        return halves

    def _find_candidates(self, step: int, kept: Reads) -> Candidates:
        return Candidates(*self._halves(step, kept), self._ctx)

    def _carry_out(self, way: Way, kept: Reads) -> Cut:
        own, halves = replace(self._ctx, kept_reads=kept), self._halves(way.step, kept)
        offloaded: tuple[Candidate, ...] = ()
        if way.offloaded:
            offloaded = self._candidates(way.step, kept).all[: way.offloaded]
            halves = copy_of(halves[0]), copy_of(halves[1])
            offload(*halves, [each.name for each in offloaded])
        return Cut(halves, _tasks_of(halves, own), offloaded)


def _tasks_of(halves: Halves, ctx: PassContext) -> tuple[Tasks, Tasks]:
    """Return the tasks of both graphs, as the planner sees them; the graphs themselves do not change."""
    out: list[Any] = []
    copies = copy_of(halves[0]), copy_of(halves[1])
    if regather.__name__ not in ctx.disabled_passes:
        regather(*copies, replace(ctx, summary={}))
    for half, phase in zip(copies, ("forward", "backward"), strict=True):
        own = replace(ctx, phase=phase, summary={})
        out.append(extract(start_copies(arrange(half, own), own), own)[0])
    return out[0], out[1]
