"""The cheapest choice of what to save and what to compute again, at a price for each saved byte: a minimum cut."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import networkx as nx  # type: ignore[import-untyped]

_NEVER = 1e6
"""Seconds that no choice saves: for what must not be computed again, or saved."""
_UNIT = 2**60


@dataclass(frozen=True)
class Item:
    """A result of forward, as the cut sees it."""

    # The items of the same group that it is computed from.
    reads: tuple[int, ...]
    # Its bytes; None if it cannot be saved: a view, or several tensors.
    bytes: int | None
    # Seconds to compute it again; None if that is not allowed.
    seconds: float | None
    # Whether backward or a later group reads it.
    needed: bool
    # Whether the user's checkpoint computes it again.
    is_again: bool


@functools.lru_cache(maxsize=1024)
def cheapest(items: tuple[Item, ...], price: float, per_byte: float) -> tuple[frozenset[int], frozenset[int]]:
    """The items to compute again, and those to save, at ``price`` seconds for each byte.

    Args:
        per_byte: the seconds to read or write a byte.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(["forward", "backward"])

    def edge(source: Any, target: Any, seconds: float) -> None:
        # whole numbers, so that the cut is the same on all ranks; one without a capacity is never cut
        graph.add_edge(source, target, **({} if seconds == math.inf else {"capacity": round(seconds * _UNIT)}))

    for i, item in enumerate(items):
        made, there = (i, 0), (i, 1)
        edge(made, there, math.inf if item.bytes is None else item.bytes * (price + 2 * per_byte))
        if item.is_again:
            edge(made, "backward", _NEVER)
        elif item.seconds != 0:
            edge("forward", made, _NEVER if item.seconds is None else item.seconds)
        if item.needed:
            edge(there, "backward", math.inf)
        for source in item.reads:
            edge((source, 1), made, math.inf)
    _, (before, after) = nx.minimum_cut(graph, "forward", "backward")
    again = frozenset(i for i in range(len(items)) if (i, 0) in after)
    return again, frozenset(i for i in range(len(items)) if (i, 0) in before and (i, 1) in after)
