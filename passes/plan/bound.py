"""What no schedule can beat: a lower bound on a graph's time and on its peak memory.

Heads and tails by longest path, Jackson's preemptive schedule of the collectives (Carlier 1982, "The one-machine sequencing
problem"), and arcs that memory forces in any order. Collectives count ``bytes / bytes_per_second`` without latency or
copies, parameter by parameter, so no bucketing beats the bound.
"""

# Why: docs/design.md, note N19

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compiled_fsdp.passes.plan.tasks import Item, Tasks


@dataclass(frozen=True)
class Bound:
    """Lower bounds: ``seconds`` of any schedule within the budget, ``peak`` bytes of any schedule at all. ``with_latency``:
    seconds of any schedule within the budget (or, without one, the planner's own limit), with copies that every form needs and a
    latency for each collective: as many as memory forces, and as many as pay for gathers alone and reductions alone."""

    seconds: float
    peak: int
    with_latency: float


def lower_bound(tasks: Tasks, budget: float | None = None) -> Bound:
    """The bound under a budget in bytes, or without one.

    Every term holds for every schedule: compute alone; a stream's collectives alone; each run between what must come
    before and after it; each stream with the earliest starts (heads) and the least that follows (tails).
    """
    least = _least_memory(tasks)
    total, before, end = tasks.before[-1], tasks.before, tasks.end
    gathers = [(item, _on_link(tasks, item)) for item in tasks.gathers]
    reductions = [(item, _on_link(tasks, item)) for item in tasks.reductions]

    released = [before[_released_by_memory(tasks, item, least, budget)] for item, _ in gathers]
    streams: dict[int, list[int]] = defaultdict(list)
    for i, (item, _) in enumerate(gathers):
        streams[tasks.links[item.link].stream].append(i)

    # heads: when each run can start, after the run before it and the gathers that it and earlier runs need
    heads = list(before)
    for members in streams.values():
        done = 0.0
        for i, release in zip(members, _suffix_minima([released[i] for i in members]), strict=True):
            item, seconds = gathers[i]
            done = max(done, release) + seconds
            heads[item.first] = max(heads[item.first], done)
    for run in range(1, len(heads)):
        heads[run] = max(heads[run], heads[run - 1] + tasks.runs[run - 1].seconds)

    # tails: what must follow each run's start: itself, later runs, and reductions of gradients that come after it
    tails = [total - done for done in before]
    last: dict[int, float] = defaultdict(float)
    for item, seconds in reversed(reductions):
        stream = tasks.links[item.link].stream
        last[stream] += seconds
        made = item.first - 1
        if made >= 0:
            tails[made] = max(tails[made], tasks.runs[made].seconds + last[stream])
    for run in range(end - 1, -1, -1):
        tails[run] = max(tails[run], tasks.runs[run].seconds + tails[run + 1])

    seconds = max([total, *(head + tail for head, tail in zip(heads, tails, strict=True))])
    jobs: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (item, length), release in zip(gathers, released, strict=True):
        jobs[tasks.links[item.link].stream].append((release, length, tails[item.first]))
    for item, length in reductions:  # complete when the run before is done: what its own run waits for may come later
        made = item.first - 1
        complete = heads[made] + tasks.runs[made].seconds if made >= 0 else 0.0
        jobs[tasks.links[item.link].stream].append((complete, length, 0.0))
    for stream_jobs in jobs.values():
        seconds = max(seconds, jackson(stream_jobs))
    # a collective's second slows the compute beside it or is waited for, as are those before and behind all compute
    slowed = tasks.contention / (1 + tasks.contention)
    on_link = {stream: sum(length for _, length, _ in of) for stream, of in jobs.items()}
    begin = next((i for i, run in enumerate(tasks.runs) if run.seconds), end)
    finish = next((i + 1 for i in range(end, -1, -1) if tasks.runs[i].seconds), end)
    latency = _forced_latency(tasks, least, budget)
    worst, copies = seconds, _forced_copies(tasks)
    for stream, busy in on_link.items():
        ahead = [s for item, s in gathers if item.first <= begin and tasks.links[item.link].stream == stream]
        behind = [s for item, s in reductions if item.first >= finish and tasks.links[item.link].stream == stream]
        alone = sum(ahead) + sum(behind)
        seconds = max(seconds, total + slowed * busy + (1 - slowed) * alone)
        cheapest = min(link.latency for link in tasks.links.values() if link.stream == stream)
        alone += cheapest * (bool(ahead) + bool(behind))
        busy += latency.get(stream, 0.0)
        worst = max(worst, seconds, busy, total + copies + slowed * busy + (1 - slowed) * alone)
        # one kind without the other
        before_use = [(tails[item.first], s) for item, s in gathers if tasks.links[item.link].stream == stream]
        behind_compute = [(complete, s) for complete, s, _ in jobs[stream][len(before_use) :]]
        worst = max(worst, batched(before_use, cheapest), batched(behind_compute, cheapest))
    return Bound(seconds, tasks.persistent + max(least), worst)


def _forced_latency(tasks: Tasks, least: Sequence[int], budget: float | None) -> dict[int, float]:
    """Latencies by stream of as many collectives as there must be: a bucket holds no more than ever is free."""
    if budget is None:
        budget = tasks.persistent + max(least) + 2 * tasks.unit_bytes
    room = max(budget - tasks.persistent - min(run.bytes for run in tasks.runs), 1.0)
    latency: dict[int, float] = defaultdict(float)
    for items in (tasks.gathers, tasks.reductions):
        by_link: dict[str, int] = defaultdict(int)
        for item in items:
            by_link[item.link] += item.bytes
        for key, total in by_link.items():
            link = tasks.links[key]
            latency[link.stream] += math.ceil(total / room) * link.latency
    return latency


def _forced_copies(tasks: Tasks) -> float:
    """Seconds of copies that reductions need in every form."""
    copied = sum(item.bytes for item in tasks.reductions if item.copied)
    summed = sum(item.bytes for item in tasks.reductions if tasks.links[item.link].summed)
    return (copied + summed) * tasks.copy_seconds


def batched(jobs: Sequence[tuple[float, float]], latency: float) -> float:
    """The least ``max(end + tail)`` of jobs ``(tail, length)`` on one machine in batches that end together and take ``latency`` each.

    Batches of jobs in order of their tails are best. For a given result each batch takes all it can: fewer batches that reach as
    far leave more time for the rest. The result is found by bisection, from below.
    """
    if not jobs:
        return 0.0
    ordered = sorted(jobs, reverse=True)
    ends = list(itertools.accumulate(length for _, length in ordered))

    def possible(result: float) -> bool:
        batches = done = 0
        while done < len(ordered):
            batches += 1
            latest = result - ordered[done][0] - batches * latency
            if ends[done] > latest:
                return False
            done = bisect.bisect_right(ends, latest)
        return True

    low, high = 0.0, ordered[0][0] + latency + ends[-1]
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


def jackson(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule: the least ``max(end + tail)`` of jobs ``(head, length, tail)`` on one machine that may
    interrupt them."""
    waiting: list[tuple[float, float]] = []
    pending = sorted(jobs)
    now, worst, i = 0.0, 0.0, 0
    while i < len(pending) or waiting:
        if not waiting:
            now = max(now, pending[i][0])
        while i < len(pending) and pending[i][0] <= now:
            heapq.heappush(waiting, (-pending[i][2], pending[i][1]))
            i += 1
        tail, left = heapq.heappop(waiting)
        until = pending[i][0] if i < len(pending) else float("inf")
        run = min(left, until - now)
        now += run
        if run < left:
            heapq.heappush(waiting, (tail, left - run))
        else:
            worst = max(worst, now - tail)
    return worst


def _on_link(tasks: Tasks, item: Item) -> float:
    return item.bytes / tasks.links[item.link].bytes_per_second


def _least_memory(tasks: Tasks) -> list[int]:
    """Bytes that every schedule holds during each run: what it computes with, and gradients that it has just made."""
    change = [0] * (len(tasks.runs) + 1)
    for item in tasks.gathers:
        change[item.first] += item.bytes
        change[item.last + 1] -= item.bytes
    for item in tasks.reductions:
        link = tasks.links[item.link]
        landing = item.bytes
        if item.first == item.last:  # else it can be launched in a run with more room
            landing += round(item.bytes * (item.copied + max(link.received, 1 / link.world)))
        change[item.first] += landing
        change[item.first + 1] -= landing - item.bytes // link.world
    least, held = [], 0
    for run, more in zip(tasks.runs, change, strict=False):
        held += more
        least.append(run.bytes + held)
    return least


def _released_by_memory(tasks: Tasks, item: Item, least: Sequence[int], budget: float | None) -> int:
    """The first run before which a gather can be launched in any order: behind the last one that leaves it no room."""
    if budget is None:
        return 0
    room = budget - tasks.persistent - item.bytes
    return next((run + 1 for run in range(item.first - 1, -1, -1) if least[run] > room), 0)


def _suffix_minima(values: Sequence[float]) -> list[float]:
    out = list(values)
    for i in range(len(out) - 2, -1, -1):
        out[i] = min(out[i], out[i + 1])
    return out
