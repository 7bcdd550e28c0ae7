"""Lower bounds on a graph's time and on its peak memory, which no schedule can beat.

The bound on time combines heads and tails by longest path, Jackson's preemptive schedule of the collectives (Carlier
1982, "The one-machine sequencing problem"), and release times that memory forces in any order. Each parameter's
collective counts ``bytes / bytes_per_second``, without latency or copies, so that no bucketing beats the bound.
"""

# Why: docs/design/planner.md, "Two bounds on a graph's time"
# Why: docs/design/planner.md, "The model's own collectives"

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from compiled_fsdp.buckets.spec import SINGLE
from compiled_fsdp.passes.plan.plain_schedules import usual_limit
from compiled_fsdp.passes.plan.tasks import CollectiveTask, Tasks


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a graph's schedules."""

    # No schedule within the budget takes fewer seconds.
    seconds: float
    # No schedule at all holds fewer bytes at its peak.
    peak: int
    # A higher bound in seconds on schedules within the budget (without a budget: within ``usual_limit``). It also
    # counts the copies that every form needs, and latencies: of as many collectives as memory forces, and of the best
    # batches of gathers alone and of reductions alone.
    with_latency: float


def lower_bound(tasks: Tasks, budget: float | None = None) -> Bound:
    """Compute the bounds under a budget in bytes, or without one.

    The result is the largest of several terms, each of which holds for every schedule: compute alone; the host's
    launches for it; the collectives of one stream alone; for each segment, the time before its start (head) plus the
    time from its start on (tail); for each stream, Jackson's schedule with these heads and tails.
    """
    least, end = _least_memory(tasks), tasks.end
    fixed = _fixed_path(tasks)
    total, before, spans = fixed.before[-1], fixed.before, fixed.spans
    gathers = [(task, _channel_seconds(tasks, task)) for task in tasks.gathers]
    reductions = [(task, _channel_seconds(tasks, task)) for task in tasks.reductions]

    released = [before[_released_by_memory(tasks, task, least, budget)] for task, _ in gathers]
    streams: dict[int, list[int]] = defaultdict(list)
    for i, (task, _) in enumerate(gathers):
        streams[tasks.channels[task.channel].stream].append(i)

    # heads: when each segment can start, after the segment before it and the gathers that it and earlier ones need
    heads = list(before)
    for indices in streams.values():
        done = 0.0
        for i, release in zip(indices, _suffix_minima(released[i] for i in indices), strict=True):
            task, seconds = gathers[i]
            done = max(done, release) + seconds
            heads[task.first] = max(heads[task.first], done)
    for segment in range(1, len(heads)):
        heads[segment] = max(heads[segment], heads[segment - 1] + spans[segment - 1])
        for at, seconds in fixed.into.get(segment, ()):
            heads[segment] = max(heads[segment], heads[at] + seconds)

    # tails: seconds from each segment's start on: itself, later segments, and reductions of gradients made there
    tails = list(fixed.after)
    last: dict[int, float] = defaultdict(float)
    for task, seconds in reversed(reductions):
        stream = tasks.channels[task.channel].stream
        last[stream] += seconds
        made = task.first - 1
        if made >= 0:
            tails[made] = max(tails[made], spans[made] + last[stream])
    for segment in range(end - 1, -1, -1):
        tails[segment] = max(tails[segment], spans[segment] + tails[segment + 1])
        for to, seconds in fixed.out_of.get(segment, ()):
            tails[segment] = max(tails[segment], seconds + tails[to])

    seconds = max([total, *(head + tail for head, tail in zip(heads, tails, strict=True))])
    jobs: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (task, length), release in zip(gathers, released, strict=True):
        jobs[tasks.channels[task.channel].stream].append((release, length, tails[task.first]))
    for task, length in reductions:  # complete when the segment before ends; its own segment may wait for a gather
        made = task.first - 1
        complete = heads[made] + spans[made] if made >= 0 else 0.0
        jobs[tasks.channels[task.channel].stream].append((complete, length, 0.0))
    for stream, stream_jobs in jobs.items():
        seconds = max(seconds, jackson([*stream_jobs, *_jobs_of_model(tasks, stream, heads, tails)]))
    # each collective slows the compute beside it, or compute waits; before the first compute and after the last, it
    # waits
    on_channel = {stream: sum(length for _, length, _ in of) for stream, of in jobs.items()}
    begin = next((i for i, segment in enumerate(tasks.segments) if segment.seconds), end)
    finish = next((i + 1 for i in range(end, -1, -1) if tasks.segments[i].seconds), end)
    latency = _forced_latency(tasks, least, budget)
    launches = bool(gathers) + bool(reductions)
    seconds = max(seconds, tasks.host_seconds)
    compute, waits = tasks.seconds_before[-1], sum(spans) - tasks.seconds_before[-1]
    worst = max(seconds, tasks.host_bound(launches))
    copies = _forced_copies(tasks) + launches * tasks.launch_seconds
    beside_compute, beside_all = _LeastLoss(tasks), _LeastLoss(tasks, copies)
    for stream, busy in on_channel.items():
        of_gathers = [(task, s) for task, s in gathers if tasks.channels[task.channel].stream == stream]
        of_reductions = [(task, s) for task, s in reductions if tasks.channels[task.channel].stream == stream]
        ahead = [s for task, s in of_gathers if task.first <= begin]
        after = [s for task, s in of_reductions if task.first >= finish]
        alone = sum(ahead) + sum(after)
        of_model = _jobs_of_model(tasks, stream, heads, tails)
        whole = busy + sum(length for _, length, _ in of_model)
        seconds = max(seconds, compute + alone + beside_compute.of(whole - alone))
        # collectives that do not fit into the waits for the model's own collectives slow the compute beside them
        at_once = [i for i, of in enumerate(tasks.model_collectives) if of.at == of.wait and stream in of.streams]
        hidden = waits - sum(tasks.model_seconds[i] for i in at_once)
        more = busy - hidden
        seconds = max(seconds, compute + waits + beside_compute.of(more))
        cheapest = min(channel.least_latency for channel in tasks.channels.values() if channel.stream == stream)
        alone += cheapest * (bool(ahead) + bool(after))
        whole += latency.get(stream, 0.0)
        # copies may run beside the collectives that are alone
        idle = max(0.0, alone - copies * (1 + tasks.copy_contention))
        worst = max(worst, seconds, whole, compute + alone + beside_compute.of(whole - alone))
        worst = max(worst, compute + copies + idle + beside_all.of(whole - idle))
        worst = max(worst, compute + waits + copies + beside_all.of(more))
        # gathers without reductions, and reductions without gathers
        before_use = [(tails[task.first], s) for task, s in of_gathers]
        after_compute = [(complete, s) for complete, s, _ in jobs[stream][len(before_use) :]]
        worst = max(worst, batched(before_use, cheapest), batched(after_compute, cheapest))
    return Bound(seconds, tasks.persistent + max(least), worst)


class _LeastLoss:
    """The least seconds that a stream's collectives add to the compute of a graph, by the seconds of the collectives.

    A collective runs beside compute, which both slow down, or compute waits for it. A second of a collective beside a
    segment with contention c takes ``1 + collective_contention`` seconds, of which the segment loses ``c / (1 + c)``.
    The segments that lose least come first; then compute waits, which loses each second.
    """

    def __init__(self, tasks: Tasks, copies: float = 0.0) -> None:
        both = 1 + tasks.collective_contention
        compute = [(segment.seconds, segment.contention) for segment in tasks.segments]
        self._parts = sorted(
            (both * share / (1 + share), seconds * (1 + share) / both)
            for seconds, share in [*compute, (copies, tasks.copy_contention)]
        )

    def of(self, seconds: float) -> float:
        """The least loss, in seconds, of so many seconds of collectives."""
        lost, left = 0.0, max(0.0, seconds)
        for loss, room in self._parts:
            if loss >= 1:
                break
            beside = min(left, room)
            lost, left = lost + loss * beside, left - beside
        return lost + left


@dataclass(frozen=True)
class _FixedPath:
    """The least times of a graph without gathers and reductions: of compute and of the model's own collectives."""

    # The least seconds before each segment, and of the whole graph.
    before: Sequence[float]
    # The least seconds from each segment's start to the end.
    after: Sequence[float]
    # The least seconds of each segment: its compute, and launches and waits of the model's own collectives.
    spans: Sequence[float]
    # By segment: pairs of an earlier segment, and the least seconds from that one's start to this one's. A pair stands
    # for one of the model's own collectives, launched in the earlier segment and waited for in the one before this.
    into: Mapping[int, Sequence[tuple[int, float]]]
    # The same pairs by the earlier segment, with the later one in its place.
    out_of: Mapping[int, Sequence[tuple[int, float]]]


def _fixed_path(tasks: Tasks) -> _FixedPath:
    before = tasks.seconds_before
    if not tasks.model_collectives:
        return _FixedPath(before, [before[-1] - done for done in before], [s.seconds for s in tasks.segments], {}, {})
    count = len(tasks.segments)
    spans = [segment.seconds + _least_wait(tasks, i) for i, segment in enumerate(tasks.segments)]
    into: dict[int, list[tuple[int, float]]] = defaultdict(list)
    out_of: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for of, seconds in zip(tasks.model_collectives, tasks.model_seconds, strict=True):
        length = seconds + tasks.segments[of.wait].seconds
        into[of.wait + 1].append((of.at, length))
        out_of[of.at].append((of.wait + 1, length))
    earliest, least = [0.0], [0.0] * (count + 1)
    for i in range(count):
        earliest.append(max([earliest[i] + spans[i], *(earliest[at] + seconds for at, seconds in into[i + 1])]))
    for i in range(count - 1, -1, -1):
        least[i] = max([spans[i] + least[i + 1], *(seconds + least[to] for to, seconds in out_of[i])])
    return _FixedPath(earliest, least, spans, into, out_of)


def _least_wait(tasks: Tasks, segment: int) -> float:
    """The least seconds from a segment's start to its compute: for launches and waits of the model's own collectives.

    A wait counts here only if its launch is at the same segment.
    """
    launched, _ = tasks.model_events.get(segment, ((), ()))
    now = done = 0.0
    free: dict[int, float] = defaultdict(float)
    for i in launched:
        now += tasks.launch_seconds
        of = tasks.model_collectives[i]
        if of.wait == segment:
            end = max(now, *(free[stream] for stream in of.streams)) + tasks.model_seconds[i]
            free.update(dict.fromkeys(of.streams, end))
            done = max(done, end)
    return max(now, done)


def _jobs_of_model(
    tasks: Tasks, stream: int, heads: Sequence[float], tails: Sequence[float]
) -> list[tuple[float, float, float]]:
    """The model's own collectives on a stream, as jobs ``(head, length, tail)``."""
    return [
        (heads[of.at], seconds, tasks.segments[of.wait].seconds + tails[of.wait + 1])
        for of, seconds in zip(tasks.model_collectives, tasks.model_seconds, strict=True)
        if stream in of.streams
    ]


def _forced_latency(tasks: Tasks, least: Sequence[int], budget: float | None) -> dict[int, float]:
    """Latencies of the fewest possible collectives, by stream: no bucket is larger than the most free memory."""
    budget = usual_limit(tasks) if budget is None else budget
    room = max(budget - tasks.persistent - min(segment.bytes for segment in tasks.segments), 1.0)
    latency: dict[int, float] = defaultdict(float)
    for collectives in (tasks.gathers, tasks.reductions):
        by_channel: dict[str, int] = defaultdict(int)
        for task in collectives:
            by_channel[task.channel] += task.size.sent
        for key, total in by_channel.items():
            channel = tasks.channels[key]
            latency[channel.stream] += math.ceil(total / room) * channel.least_latency
    return latency


def _forced_copies(tasks: Tasks) -> float:
    """Seconds of copies that collectives need in every form."""
    gathers = [task for task in tasks.gathers if task.size.is_packed(SINGLE)]
    copied = sum(task.size.full for task in tasks.reductions if task.size.is_packed(SINGLE))
    cast = sum(task.size.full / tasks.channels[task.channel].world for task in gathers)
    summed = sum(task.size.full for task in tasks.reductions if tasks.channels[task.channel].reduced_locally)
    decoded = sum(task.size.decoded for task in tasks.gathers)
    return (copied + cast + summed + decoded) * tasks.copy_seconds


def batched(jobs: Sequence[tuple[float, float]], latency: float) -> float:
    """The least ``max(end + tail)`` of jobs ``(tail, length)`` on one machine that runs them in batches.

    Each batch takes ``latency`` in addition, and its jobs end together. Batches of jobs in order of their tails are
    best. To test a result, each batch takes as many jobs as it can, because fewer batches that reach as far leave more
    time for the rest. Bisection finds the smallest possible result, from below.
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
    """The least ``max(end + tail)`` of jobs ``(head, length, tail)`` on one machine that may interrupt them.

    Jackson's preemptive schedule reaches it.
    """
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
        done = min(left, until - now)
        now += done
        if done < left:
            heapq.heappush(waiting, (tail, left - done))
        else:
            worst = max(worst, now - tail)
    return worst


def _channel_seconds(tasks: Tasks, task: CollectiveTask) -> float:
    """Seconds of a collective on its channel, without latency."""
    return task.size.sent / tasks.channels[task.channel].bytes_per_second


def _least_memory(tasks: Tasks) -> list[int]:
    """Bytes that every schedule holds during each segment: compute, the parameters in use, and gradients just made."""
    change = [0] * (len(tasks.segments) + 1)
    for task in tasks.gathers:
        change[task.first] += task.size.full
        change[task.last + 1] -= task.size.full
    for task in tasks.reductions:
        channel = tasks.channels[task.channel]
        landing, copied = task.size.full, task.size.is_packed(SINGLE)
        if task.first == task.last:  # otherwise it can be launched in a segment with more room
            landing += round(task.size.sent * (copied + max(channel.received_share, 1 / channel.world)))
        change[task.first] += landing
        change[task.first + 1] -= landing - task.size.full // channel.world
    least, held = [], 0
    for segment, more in zip(tasks.segments, change, strict=False):
        held += more
        least.append(segment.bytes + held)
    return least


def _released_by_memory(tasks: Tasks, task: CollectiveTask, least: Sequence[int], budget: float | None) -> int:
    """The first segment before which any schedule can launch a gather: after the last segment without room for it."""
    if budget is None:
        return 0
    room = budget - tasks.persistent - task.size.sent
    return next((segment + 1 for segment in range(task.first - 1, -1, -1) if least[segment] > room), 0)


def _suffix_minima(values: Iterable[float]) -> list[float]:
    return [*itertools.accumulate(reversed([*values]), min)][::-1]
