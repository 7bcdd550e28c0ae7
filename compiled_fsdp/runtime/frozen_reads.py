"""Blocks that uncompiled code reads and trains nothing of: whether a backward gathers them again, and at which place.

A trained block is gathered again before its first gradient, which comes on every rank. Of a frozen one nothing comes,
and whether backward needs it is up to this rank's code. For example, rank 0 detaches what it gives to a frozen layer,
and the other ranks do not: their backward gathers the layer, and rank 0's does not come to it.

So a forward notes what it reads of this kind, and all ranks do the same with it in backward. The place is known without
the block: autograd runs nodes in the reverse order of their making. When one runs that was made before the last read of
a block, backward has the block behind it on every rank, whether it has needed it or not. That is looked at before each
collective. The first backward that comes there asks all ranks whether one of them needs the block: they gather it from
then on, or none of them does. A rank that comes to need a block which none gathers keeps it from its forward on.
"""

# Why: docs/design.md, note N29

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from compiled_fsdp.ranks import failures
from compiled_fsdp.state.parameter import ShardedParameter

Decisions = dict[Hashable, bool]
"""Whether all ranks gather a block again in the backward of a forward, by ``FrozenRead.key``."""


@dataclass(eq=False)
class FrozenRead:
    """A block as one forward has read it."""

    parameters: Sequence[ShardedParameter]
    # Gathers it: a collective call.
    gather: Callable[[], object]
    # The number of the autograd node that was made next after its last read.
    number: int
    # The block, and how often the forward has read it before, as one that is called several times.
    key: Hashable
    # Of forwards like this one.
    decisions: Decisions

    @property
    def is_kept(self) -> bool:
        """Whether no rank gathers it again, so that a forward has to leave full what its backward needs."""
        return self.decisions.get(self.key) is False

    def is_gathered(self, needed: bool) -> bool:
        """Whether all ranks gather it at this place of their backwards; the first time a collective call.

        ``needed``: whether this rank's backward needs it.
        """
        decided = self.decisions.get(self.key)
        if decided is None:
            first = self.parameters[0]
            flag = torch.tensor([needed], dtype=torch.int32, device=first.device)
            with failures.naming_ended_ranks:
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=first.group.process_group)
            decided = self.decisions[self.key] = bool(flag.item())
        return decided


@dataclass(eq=False)
class FrozenReads:
    """What one backward has before it: the reads of those forwards whose outputs it has reached."""

    _ahead: list[FrozenRead] = field(default_factory=list)
    _forwards: list[Sequence[FrozenRead]] = field(default_factory=list)

    def reach(self, reads: Sequence[FrozenRead]) -> None:
        """An output of the forward with these reads is reached."""
        if not any(reads is known for known in self._forwards):  # else by another output
            self._forwards.append(reads)
            self._ahead = sorted([*self._ahead, *reads], key=lambda read: read.number)

    def pass_by(self, number: int) -> None:
        """Autograd's node with this number launches a collective: gather what lies behind it, as other ranks may have.

        Everything lies behind -1.
        """
        while self._ahead and self._ahead[-1].number > number:
            read = self._ahead.pop()
            if read.is_gathered(needed=False):
                read.gather()

    def take(self, parameters: Sequence[ShardedParameter]) -> None:
        """This rank's backward needs a block, and gathers it now."""
        same = [read for read in self._ahead if read.parameters[0] is parameters[0]]
        # a checkpoint that runs its forward again has read it anew
        own = [read for read in same if read.parameters is parameters] or same
        if own:
            self._ahead.remove(own[-1])
            own[-1].is_gathered(needed=True)
