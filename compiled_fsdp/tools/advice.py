"""Advice: one change that would make a step faster, and its gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_GAIN = 0.01
"""The least gain that is worth advice, as a share of a call's time."""


@dataclass(frozen=True)
class Advice:
    """One change that would make a step faster.

    Attributes:
        kind: the name of the function in ``advice_kinds.py`` that found the change: "own_unit", "keep_unsharded", ...
        text: the advice in words.
        gain_seconds: by how much one call of the model, with its backward, would be faster, as simulated.
        step_seconds: how long that call takes without the change. For a graph break: how long the graphs on both sides
            of it take.
        graphs: the numbers of the graphs in ``Explanation.graphs``.
        change: the change as plain data, by the names of arguments and options. For example, ``{"bucket": "auto"}``.
        changes_results: whether losses and gradients would be other numbers.
    """

    kind: str
    text: str
    gain_seconds: float
    step_seconds: float
    graphs: tuple[int, ...]
    change: Mapping[str, Any] = field(default_factory=dict)
    changes_results: bool = False

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is at least ``MIN_GAIN`` of the call."""
        return self.gain_seconds >= MIN_GAIN * self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return this advice as plain data, for ``json.dumps``."""
        return {
            "kind": self.kind,
            "text": self.text,
            "gain_s": self.gain_seconds,
            "step_s": self.step_seconds,
            "graphs": list(self.graphs),
            "change": {key: list(value) if isinstance(value, tuple) else value for key, value in self.change.items()},
            "changes_results": self.changes_results,
        }
