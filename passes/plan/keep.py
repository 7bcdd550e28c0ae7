"""What stays unsharded between forward and backward: the second gathers that would be exposed, under the budget.

Units are taken in the order of exposed time per byte (equal ones in the order in which backward needs them, since the first
are held the shortest), as many as fit, and of those no more than make the step faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from compiled_fsdp.passes.plan.search import OverBudget, least_peak, search
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks

GAIN = 1e-3
"""What keeping more must save at least, of the step's time."""


def choose_kept(forward: Tasks, backward: Tasks, budget: float | None) -> frozenset[int]:
    """The reads to keep from forward to backward.

    Args:
        forward, backward: the two graphs with every parameter gathered in both.
        budget: bytes; None: what the two need as they are, and twice the largest unit.

    Raises:
        OverBudget: even with nothing kept.
    """
    if budget is None:
        least = max(map(least_peak, (forward, backward)))
        budget = least + 2 * max(forward.unit_bytes, backward.unit_bytes)
    plain = search(backward, budget, quick=True).simulation
    order = _by_exposed_time_per_byte(backward, plain)

    def fits(count: int) -> bool:
        parts = keeping(forward, backward, _reads(order[:count]))
        return all(least_peak(tasks) <= budget for tasks in parts)

    def seconds(count: int) -> float:
        parts = keeping(forward, backward, _reads(order[:count]))
        try:
            return sum(search(tasks, budget, quick=True).simulation.seconds for tasks in parts)
        except OverBudget:
            return float("inf")

    most = _last_true(len(order), fits)
    goal = min(seconds(0), seconds(most)) * (1 + GAIN)
    least_kept = _last_true(most, lambda count: seconds(most - count) <= goal)
    return frozenset(_reads(order[: most - least_kept]))


def keeping(forward: Tasks, backward: Tasks, kept: Iterable[int]) -> tuple[Tasks, Tasks]:
    """The two graphs if the reads ``kept`` stay full: forward holds them to its end, backward from its start to their last use."""
    kept = frozenset(kept)
    ahead = replace(
        forward,
        gathers=tuple(replace(i, last=forward.end) if i.read in kept else i for i in forward.gathers),
    )
    runs = list(backward.runs)
    for item in backward.gathers:
        if item.read in kept:
            for run in range(item.last + 1):
                runs[run] = replace(runs[run], bytes=runs[run].bytes + item.bytes)
    behind = replace(backward, runs=tuple(runs), gathers=tuple(i for i in backward.gathers if i.read not in kept))
    return ahead, behind


def _by_exposed_time_per_byte(backward: Tasks, simulation: Simulation) -> list[tuple[int, ...]]:
    """The reads of each unit, the unit whose gathers compute waits for longest per byte first."""
    exposed: dict[int, float] = {}
    size: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for flight in simulation.flights:
        if flight.launch.gathers:
            items = backward.of(flight.launch)
            total = sum(item.bytes for item in items)
            for item in items:
                exposed[item.unit] = exposed.get(item.unit, 0.0) + flight.exposed * item.bytes / max(total, 1)
    for item in backward.gathers:
        size[item.unit] = size.get(item.unit, 0) + item.bytes
        reads.setdefault(item.unit, []).append(item.read)
    units = sorted(reads, key=lambda unit: -exposed.get(unit, 0.0) / max(size[unit], 1))
    return [tuple(reads[unit]) for unit in units]


def _reads(units: Iterable[tuple[int, ...]]) -> set[int]:
    return {read for unit in units for read in unit}


def _last_true(most: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to ``most`` for which ``holds(count)``, which holds for 0 and not beyond some count."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
