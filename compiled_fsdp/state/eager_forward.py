"""One forward of a unit in uncompiled code: the parameters that it has gathered, and those that its backward needs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class ForwardReads:
    """The full parameters that one uncompiled forward has computed with, by ``param_id``.

    The autograd graph of the forward's output holds this object, so it lives no longer than that graph.
    """

    tensors: dict[int, torch.Tensor]
    # Full parameters that checkpoints read again in backward, without a ``grad_fn``.
    kept: dict[int, torch.Tensor]


@dataclass
class EagerForward:
    """The state of one unit's running (or last) forward in eager code."""

    # The blocks that are gathered so far, by ``bucket_key``: by the forward, or by a part that backward runs again.
    blocks: dict[Any, Any] | None = None
    # The autograd node (a checkpoint's) in which backward runs a part of the last forward again.
    recomputing: Any = None
    # Whether the forward began with gradients on, and the number of the backward that it runs in; -1: in none.
    trains: bool = False
    backward: int = -1
    # Whether the forward was compiled, or was called by compiled code.
    below_compile: bool = False
    # Whether a backward has run only a part of the last forward again. For example, one layer of the unit is in a
    # checkpoint.
    in_parts: bool = False
    # Whether the forward has a part that read parameters without gradients and may run again in a backward of its own,
    # as a reentrant checkpoint does.
    may_run_again: bool = False
    # The full parameters that the running forward has read in checkpoints, by ``param_id``, if they stay full until
    # backward; and the earlier forwards that have such parameters.
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    kept_by: list[weakref.ref[ForwardReads]] = field(default_factory=list)
    # The blocks that backward has gathered again, by ``bucket_key``, until their first gradient comes.
    gathered_again: set[Any] = field(default_factory=set)
    # For a root unit: the frozen blocks (``FrozenRead``, by its key) that the running forward has gathered. The forward
    # is the root's, or that of a part that is called alone. None if no backward may follow.
    frozen: dict[Any, Any] | None = None
    # For a root unit: whether ranks gather frozen blocks again in backward, by which parameters of the model train.
    frozen_decisions: dict[tuple[bool, ...], dict[Any, bool]] = field(default_factory=dict)
    # The full parameters that stay full until backward, for each forward that no backward has reached yet. None if the
    # last forward was compiled, because other code does not see its reads.
    reads: list[weakref.ref[ForwardReads]] | None = field(default_factory=list)

    def forget(self) -> None:
        """Forget the gathered blocks, because no forward runs and no part of one is run again."""
        self.blocks = self.recomputing = None

    def kept_full(self, param_id: int) -> torch.Tensor | None:
        """The full parameter as the latest forward has read it in a checkpoint; None if none has."""
        found = (reads.kept.get(param_id) for known in reversed(self.kept_by) if (reads := known()) is not None)
        return next((full for full in found if full is not None), None)

    def drop_kept(self) -> None:
        """Drop the parameters that are kept for checkpoints, because their shards are about to be written to."""
        for known in self.kept_by:
            if (reads := known()) is not None:
                reads.kept.clear()  # because a loss that is kept for a log keeps the graph, which keeps ``reads``
        self.kept_by = []
