"""The choice of parameters that stay unsharded from forward to backward: those whose second gather would be exposed.

Blocks are taken in the order of exposed time per byte, as many as fit into the budget, but no more than make the step
faster. Blocks with equal values are taken in the order in which backward needs them, because the first ones are held
for the shortest time.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import replace

from compiled_fsdp.passes.plan.plain_schedules import least_peak, usual_limit
from compiled_fsdp.passes.plan.search import OverBudget, search
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks

MIN_GAIN_OF_KEEPING_MORE = 1e-3
"""The fewest blocks are kept with which the step takes at most this share longer than with the best number of them."""


def choose_unsharded(forward: Tasks, backward: Tasks, budget: float | None) -> frozenset[int]:
    """Choose the reads to keep unsharded from forward to backward.

    Args:
        forward, backward: the two graphs, with every parameter gathered in both.
        budget: the memory budget in bytes; None for the larger ``usual_limit`` of the two graphs.

    Raises:
        OverBudget: the backward graph does not fit even if nothing is kept.
    """
    if budget is None:
        budget = max(map(usual_limit, (forward, backward)))
    plain = search(backward, budget, quick=True).simulation
    order = blocks_by_exposed_time(backward, plain)

    def fits(count: int) -> bool:
        graphs = tasks_with_kept(forward, backward, _reads(order[:count]))
        return all(least_peak(tasks) <= budget for tasks in graphs)

    def seconds(count: int) -> float:
        graphs = tasks_with_kept(forward, backward, _reads(order[:count]))
        try:
            return sum(search(tasks, budget, quick=True).simulation.seconds for tasks in graphs)
        except OverBudget:
            return float("inf")

    most = _last_true(len(order), fits)
    goal = min(seconds(0), seconds(most)) * (1 + MIN_GAIN_OF_KEEPING_MORE)
    least_kept = _last_true(most, lambda count: seconds(most - count) <= goal)
    return frozenset(_reads(order[: most - least_kept]))


def tasks_with_kept(forward: Tasks, backward: Tasks, kept: Iterable[int]) -> tuple[Tasks, Tasks]:
    """Return the two graphs with the reads ``kept`` unsharded in between.

    Forward holds their full parameters to its end. Backward does not gather them, and holds them from its start to
    their last use.
    """
    kept = frozenset(kept)
    forward = replace(
        forward,
        gathers=tuple(replace(task, last=forward.end) if task.read in kept else task for task in forward.gathers),
    )
    segments = list(backward.segments)
    for task in backward.gathers:
        if task.read in kept:
            for segment in range(task.last + 1):
                segments[segment] = replace(segments[segment], bytes=segments[segment].bytes + task.size.full)
    gathers = tuple(task for task in backward.gathers if task.read not in kept)
    return forward, replace(backward, segments=tuple(segments), gathers=gathers)


def blocks_by_exposed_time(backward: Tasks, simulation: Simulation) -> list[tuple[int, ...]]:
    """The reads of each block, in falling order of the seconds per byte that compute waits for the block's gathers."""
    exposed: dict[int, float] = {}
    size: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for timing in simulation.timings:
        if timing.launch.kind.supplies:
            members = backward.members_of(timing.launch)
            total = sum(task.size.sent for task in members)
            for task in members:
                share = timing.exposed * task.size.sent / max(total, 1)
                exposed[task.block_number] = exposed.get(task.block_number, 0.0) + share
    for task in backward.gathers:
        size[task.block_number] = size.get(task.block_number, 0) + task.size.full
        reads.setdefault(task.block_number, []).append(task.read)
    blocks = sorted(reads, key=lambda block: -exposed.get(block, 0.0) / max(size[block], 1))
    return [tuple(reads[block]) for block in blocks]


def _reads(blocks: Iterable[tuple[int, ...]]) -> set[int]:
    return {read for block in blocks for read in block}


def _last_true(most: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to ``most`` for which ``holds(count)`` is true; it is true from 0 up to some count."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not holds(count))
