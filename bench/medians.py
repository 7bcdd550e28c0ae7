"""Medians with intervals that assume nothing about the distribution of the values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return two order statistics around the median and the probability that they enclose it: low, high, coverage.

    The true median is below the k-th smallest of n independent values exactly if fewer than k values are below the true
    median. The binomial distribution gives that probability. The result is the narrowest symmetric interval with a
    coverage of at least ``confidence``. With fewer than six values no interval covers 95 %, and the result is the whole
    range with its lower coverage.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 1, 0.5**n  # the probability that the median is outside on one side
    while rank < (n + 1) // 2:
        wider = outside + math.comb(n, rank) * 0.5**n
        if 1 - 2 * wider < confidence:
            break
        rank, outside = rank + 1, wider
    return ordered[rank - 1], ordered[n - rank], max(0.0, 1 - 2 * outside)


def median_and_interval(values: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median, and [low, high] around it."""
    low, high, _ = interval_of_median(values)
    return statistics.median(values), [low, high]
