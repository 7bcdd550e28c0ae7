"""What a bucket is: its kind and its form."""

from __future__ import annotations

import enum

SINGLE, FLAT, COALESCED = "single", "flat", "coalesced"
"""Forms of a bucket: one tensor as it is; several, copied into one flat tensor; several in one call, without copies."""


class Kind(str, enum.Enum):
    """What a bucket's collective does. In plans, reports and JSON it is its text: "gather".

    Planner, passes and runtime ask when a kind may be launched, and when it has to be done; so another kind finds its
    place among them by answering.
    """

    GATHER = "gather"
    """Full parameters from shards. It supplies compute: launched at any time before, done at the first use."""
    REDUCE = "reduce"
    """Shards of gradients from full ones. Ready when they are complete; compute does not need the result at once."""

    @property
    def supplies(self) -> bool:
        """Whether compute needs at a milestone what the collective brings; else it takes what is complete there."""
        return self is Kind.GATHER

    @property
    def plural(self) -> str:
        """For messages: "gathers", "reductions"."""
        return "gathers" if self is Kind.GATHER else "reductions"

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # of the text that it is equal to; Enum's is the name's
