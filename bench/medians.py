"""Medians with intervals that assume nothing of the distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Two order statistics around the median, and how surely they hold it: low, high, coverage.

    The median lies below the k-th smallest of n independent values exactly if fewer than k of them lie below it, of
    which the binomial distribution tells the probability. The narrowest symmetric interval of at least ``confidence``;
    below six values no interval is that sure, and the whole range is returned with what coverage it has.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 1, 0.5**n  # of one side
    while rank < (n + 1) // 2:
        wider = outside + math.comb(n, rank) * 0.5**n
        if 1 - 2 * wider < confidence:
            break
        rank, outside = rank + 1, wider
    return ordered[rank - 1], ordered[n - rank], max(0.0, 1 - 2 * outside)


def median_and_interval(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and [low, high] around it."""
    low, high, _ = interval_of_median(values)
    return statistics.median(values), [low, high]
