"""Runs of numbers that occur several times in a sequence, so that each need be handled once.

Suffixes are sorted by doubling prefixes (Manber and Myers, "Suffix arrays", 1993). Their common prefixes are found as
by Kasai et al., "Linear-time longest-common-prefix computation in suffix arrays" (2001).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repeat:
    """A run of ``length`` numbers that begins at each of ``starts``; its occurrences do not overlap.

    ``weight`` is the sum of the numbers' weights.
    """

    length: int
    starts: tuple[int, ...]
    weight: int

    @property
    def saved(self) -> int:
        """The weight of the numbers that need no handling of their own."""
        return (len(self.starts) - 1) * self.weight


def repeats(sequence: Sequence[int], weights: Sequence[int], least: int) -> list[Repeat]:
    """Return repeated runs that have no place in common, the ones that save most first.

    Each is the best one after those before it, which need not be the best set of runs: to find that is NP-hard.

    For example, in ``[1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]`` one run of 3 numbers begins at 0, 4 and 8.

    Args:
        sequence: equal numbers mean equal things. A number that occurs once ends every run.
        weights: of the numbers; equal ones have the same.
        least: the least weight of a run.
    """
    numbers, upto = np.asarray(sequence, dtype=np.int64), [0, *itertools.accumulate(weights)]
    found: list[Repeat] = []
    while (best := _best(numbers, upto, least)) is not None:
        found.append(best)
        numbers = numbers.copy()
        for start in best.starts:  # no further run may contain these places
            numbers[start : start + best.length] = numbers.max() + 1 + np.arange(best.length)
    return found


def _best(numbers: np.ndarray, upto: Sequence[int], least: int) -> Repeat | None:
    if len(numbers) < 2:
        return None
    order = _sorted_suffixes(numbers)

    def weight(run: tuple[int, int, int]) -> int:
        start = int(order[run[1]])
        return upto[start + run[0]] - upto[start]

    def most(run: tuple[int, int, int]) -> int:
        """The most that a run can save: not all of its occurrences may fit into the sequence side by side."""
        length, first, last = run
        return weight(run) * min(last - first, len(numbers) // length - 1)

    best: Repeat | None = None
    runs = [run for run in _common(_prefixes(numbers, order)) if weight(run) >= least]
    for run in sorted(runs, key=most, reverse=True):
        length, first, last = run
        if best is not None and most(run) <= best.saved:
            break
        starts: list[int] = []
        for start in sorted(order[first : last + 1].tolist()):
            if not starts or start >= starts[-1] + length:
                starts.append(start)
        repeat = Repeat(length, tuple(starts), weight(run))
        if repeat.saved and (best is None or repeat.saved > best.saved):
            best = repeat
    return best


def _sorted_suffixes(numbers: np.ndarray) -> np.ndarray:
    """Return the starts of all suffixes in the order of the suffixes."""
    rank = np.unique(numbers, return_inverse=True)[1]
    step = 1
    while True:
        ahead = np.full(len(rank), -1)
        ahead[:-step] = rank[step:]
        order = np.lexsort((ahead, rank))
        steps = (np.diff(rank[order]) != 0) | (np.diff(ahead[order]) != 0)
        rank[order] = np.concatenate(([0], np.cumsum(steps)))
        step *= 2
        if steps.all() or step >= len(rank):
            return order


def _prefixes(numbers: np.ndarray, order: np.ndarray) -> list[int]:
    """Return for each suffix, in order, how many numbers it has in common with the one before it; 0 for the first."""
    values, starts = numbers.tolist(), order.tolist()
    place = {start: i for i, start in enumerate(starts)}
    common = [0] * len(values)
    length = 0
    for start in range(len(values)):
        if place[start] == 0:
            length = 0
            continue
        other = starts[place[start] - 1]
        while max(start, other) + length < len(values) and values[start + length] == values[other + length]:
            length += 1
        common[place[start]] = length
        length = max(length - 1, 0)
    return common


def _common(common: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (length, first, last) for each range of suffixes that have a prefix of so many numbers in common."""
    open_ranges: list[tuple[int, int]] = []  # length and first, of growing length
    for i, length in enumerate([*common, 0]):
        first = i - 1
        while open_ranges and open_ranges[-1][0] > length:
            known, first = open_ranges.pop()
            yield known, first, i - 1
        if length and (not open_ranges or open_ranges[-1][0] < length):
            open_ranges.append((length, first))
