"""States of the two dynamic programs (``bucketing.py``, ``order.py``), and the choice of those to continue with.

A state describes channel and compute after some buckets of a fixed order. It has two times: when the channel is free,
and when compute reaches the next gather's first use. A state is dropped if another one beats it in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

ROUNDING_SECONDS = 1e-12
"""Channel times that differ by no more than this count as equal."""


class Stall(NamedTuple):
    """A first use of a gathered parameter, where compute may have waited for the gather."""

    # The segment of the first use.
    segment: int
    # When compute went on after the wait, in seconds from the graph's start.
    resumed: float
    # The stall before this one.
    previous: Stall | None


@dataclass(slots=True)
class State:
    """Channel and compute after some buckets. Not frozen, because a search makes very many."""

    # When the channel is free, in seconds from the graph's start.
    channel_free: float
    # When compute reaches the next gather's first use, in seconds from the graph's start.
    compute: float
    # The stall at the most recent first use.
    stall: Stall | None


S = TypeVar("S", bound=State)


def time_at(state: State, segment: int, next_use: int, seconds_before: Sequence[float]) -> float:
    """The time at which compute reaches ``segment``, or, if that is earlier, the next first use.

    Args:
        next_use: the segment of the next first use.
        seconds_before: seconds of compute before each segment.
    """
    if segment >= next_use:
        return state.compute
    stall = state.stall
    while stall is not None and segment <= stall.segment:
        stall = stall.previous
    if stall is None:
        return seconds_before[segment]
    return stall.resumed + seconds_before[segment] - seconds_before[stall.segment]


def pareto_front(states: Iterable[S], equal_seconds: float = 0.0) -> list[S]:
    """The states that no other state beats in both times, in order of their compute times.

    Compute times that differ by less than ``equal_seconds`` count as equal. Among such states the one whose channel is
    free first is kept.
    """
    kept: list[S] = []
    for state in sorted(states, key=lambda s: (s.compute, s.channel_free)):
        if not kept or state.channel_free < kept[-1].channel_free - ROUNDING_SECONDS:
            if kept and state.compute < kept[-1].compute + equal_seconds:
                kept.pop()
            kept.append(state)
    return kept
