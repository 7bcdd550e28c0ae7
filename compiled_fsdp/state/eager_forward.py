"""One forward of a unit in uncompiled code: what it has gathered, and what of that its backward needs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class ForwardReads:
    """The full parameters that one uncompiled forward has computed with, by ``param_id``.

    The autograd graph of the forward's output holds it, so it lives no longer than that.
    """

    tensors: dict[int, torch.Tensor]
    # Those that checkpoints read again in backward, without their history.
    kept: dict[int, torch.Tensor]


@dataclass
class EagerForward:
    """The running forward of one unit, as eager code sees it."""

    # The blocks that are gathered so far, by ``bucket_key``; of this forward or of ``recomputing``.
    blocks: dict[Any, Any] | None = None
    # The autograd node that runs a part of the last forward again.
    recomputing: Any = None
    # Whether it began with gradients on, and in which backward: -1 for none.
    trains: bool = False
    backward: int = -1
    # Whether compiled code has called it, or is it.
    below_compile: bool = False
    # Whether a part of the last forward was run again in a backward, alone.
    in_parts: bool = False
    # Whether a part that has read without gradients may be run again, in a backward of its own.
    may_run_again: bool = False
    # What the running forward has read in checkpoints, by ``param_id``, of parameters that stay full from forward to
    # backward; and forwards that have.
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    kept_by: list[weakref.ref[ForwardReads]] = field(default_factory=list)
    # The blocks that were gathered again in backward, by ``bucket_key``, until their first gradient comes.
    gathered_again: set[Any] = field(default_factory=set)
    # Of a root: the frozen blocks (``FrozenRead``, by its key) that the running forward has gathered, which is the
    # model's or that of a part that is called alone; None where no backward may follow. And what ranks have decided of
    # such blocks, by which parameters train.
    frozen: dict[Any, Any] | None = None
    frozen_decisions: dict[tuple[bool, ...], dict[Any, bool]] = field(default_factory=dict)
    # What forwards that no backward has reached yet have read of parameters that stay full from forward to backward.
    # None if the last one was compiled code, whose reads nobody else sees.
    reads: list[weakref.ref[ForwardReads]] | None = field(default_factory=list)

    def forget(self) -> None:
        """No forward runs, and nothing is run again."""
        self.blocks = self.recomputing = None

    def kept_full(self, param_id: int) -> torch.Tensor | None:
        """The full parameter as the last forward has read it in a checkpoint."""
        found = (reads.kept.get(param_id) for known in reversed(self.kept_by) if (reads := known()) is not None)
        return next((full for full in found if full is not None), None)

    def drop_kept(self) -> None:
        """Parameters are about to be written to: what checkpoints would read again is old."""
        for known in self.kept_by:
            if (reads := known()) is not None:
                reads.kept.clear()  # a loss that is kept for a log keeps the graph
        self.kept_by = []
