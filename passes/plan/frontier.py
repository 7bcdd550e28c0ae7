"""What the two dynamic programs share: states of channel and compute, and which of them are worth going on with.

A state stands after some buckets of a fixed order. No state is kept that another one beats in both times, when the
channel is free and when compute reaches the next gather's first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

ROUNDING_SECONDS = 1e-12
"""A channel that is free earlier by no more than this is not free earlier."""


class Stall(NamedTuple):
    """A first use, where compute may have waited for its gather."""

    # The segment of the first use.
    segment: int
    # Compute's time there after the wait, in seconds.
    resumed: float
    # The stall before it.
    previous: Stall | None


@dataclass(slots=True)
class State:
    """Where the channel and compute are after some buckets. Not frozen: a search makes too many of them."""

    # When the channel is free, in seconds.
    channel_free: float
    # When compute is at the next gather's first use, in seconds.
    compute: float
    # The last first use.
    stall: Stall | None


S = TypeVar("S", bound=State)


def time_at(state: State, segment: int, next_use: int, seconds_before: Sequence[float]) -> float:
    """Compute's time when it reaches ``segment``, which is not after the next first use (segment ``next_use``)."""
    if segment >= next_use:
        return state.compute
    stall = state.stall
    while stall is not None and segment <= stall.segment:
        stall = stall.previous
    if stall is None:
        return seconds_before[segment]
    return stall.resumed + seconds_before[segment] - seconds_before[stall.segment]


def pareto_front(states: Iterable[S], equal_seconds: float = 0.0) -> list[S]:
    """The states that no other one beats in both times, the one with the earliest compute first.

    Compute times that differ by less than ``equal_seconds`` are equal: of such states the channel decides.
    """
    kept: list[S] = []
    for state in sorted(states, key=lambda s: (s.compute, s.channel_free)):
        if not kept or state.channel_free < kept[-1].channel_free - ROUNDING_SECONDS:
            if kept and state.compute < kept[-1].compute + equal_seconds:
                kept.pop()
            kept.append(state)
    return kept
