"""Frozen blocks that uncompiled code reads: whether a backward gathers them again, and at which place.

A trained block is gathered again before its first gradient, which comes on every rank. A frozen block has no gradient,
and whether backward needs it depends on this rank's code. For example, rank 0 detaches the input of a frozen layer, and
the other ranks do not. Their backward gathers the layer, and rank 0's backward never reaches it.

So a forward notes the frozen blocks that it reads, and all ranks treat each one alike in backward. Its place is known
even if backward never reaches it, because autograd runs nodes in the reverse order of their creation: when a node runs
that was created before the last read of a block, backward has passed the block on every rank. This is checked before
each collective. The first backward that passes a block asks all ranks whether one of them needs it. If so, all ranks
gather it from then on. If not, none does, and a rank whose backward needs it later keeps it from forward on.
"""

# Why: docs/design/graph-breaks.md, "Frozen blocks in eager backwards"

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from compiled_fsdp.ranks import failures
from compiled_fsdp.state.parameter import ShardedParameter

Decisions = dict[Hashable, bool]
"""For each ``FrozenRead.key``: whether all ranks gather the block again in backward."""


@dataclass(eq=False)
class FrozenRead:
    """One read of a frozen block in one forward."""

    parameters: Sequence[ShardedParameter]
    # Gathers the block: a collective call.
    gather: Callable[[], object]
    # The sequence number of the autograd node that was created next after the last use of the read.
    number: int
    # The block, and how many reads of it come before this one. For example, a layer that is called twice has two.
    key: Hashable
    # The decisions for all forwards in which the same parameters are trained.
    decisions: Decisions

    @property
    def is_kept(self) -> bool:
        """Whether no rank gathers the block again, so that it stays full from forward on if backward needs it."""
        return self.decisions.get(self.key) is False

    def is_gathered(self, needed: bool) -> bool:
        """Whether all ranks gather the block at this place of their backwards. The first time it is a collective call.

        ``needed``: whether this rank's backward needs the block.
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
    """The frozen reads that one backward has not passed yet, of the forwards whose outputs it has reached."""

    _ahead: list[FrozenRead] = field(default_factory=list)
    _forwards: list[Sequence[FrozenRead]] = field(default_factory=list)

    def reach(self, reads: Sequence[FrozenRead]) -> None:
        """Note that the backward has reached an output of the forward with these reads."""
        if not any(reads is known for known in self._forwards):  # else another output was reached before
            self._forwards.append(reads)
            self._ahead = sorted([*self._ahead, *reads], key=lambda read: read.number)

    def pass_by(self, number: int) -> None:
        """Gather the blocks that backward has passed at the autograd node with this number, if all ranks gather them.

        The node is about to launch a collective. The number -1 marks the end of backward, which has passed all blocks.
        """
        while self._ahead and self._ahead[-1].number > number:
            read = self._ahead.pop()
            if read.is_gathered(needed=False):
                read.gather()

    def take(self, parameters: Sequence[ShardedParameter]) -> None:
        """Note that this rank's backward needs a block and gathers it now."""
        same = [read for read in self._ahead if read.parameters[0] is parameters[0]]
        # a checkpoint that runs its forward again has its own list of the block's parameters
        own = [read for read in same if read.parameters is parameters] or same
        if own:
            self._ahead.remove(own[-1])
            own[-1].is_gathered(needed=True)
