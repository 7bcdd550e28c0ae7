"""Simulate the time and memory of a schedule, with one compute stream and a FIFO of collectives per process group.

A launch packs its bucket on the compute stream. Its collective starts when compute has packed it and the collectives
launched before it on the same stream are done. A wait stops compute until the collective is done, and then unpacks.
The whole graph takes at least the time that the host needs for its launches.

Compute and collectives slow each other down while both run (``ComputeSegment.contention`` and
``Tasks.collective_contention``). The clock runs in the collectives' time: it stands still for the share of each second
that a collective loses beside compute, and this lag is added in the end. So a collective has the same length wherever
it is, and all streams share one clock, because compute slows each of them by the same share.

The model's own collectives are launched and waited for at the starts of segments, as in the graph. One that uses the
same link as gathers or reductions is in their FIFO.

``buckets/layout.py`` says how many bytes collectives hold in memory, and for how long.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_fsdp.buckets.layout import PARTS
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks


@dataclass(frozen=True)
class CollectiveTiming:
    """The times of a launch, in seconds from the graph's start."""

    launch: Launch
    # When compute has reached the launch and packed the bucket.
    issued: float
    # When the channel begins the collective.
    start: float
    # When the channel ends the collective.
    end: float
    # The seconds that compute waits for it (a duration).
    exposed: float


class ModelTiming(NamedTuple):
    """The times of one of the model's own collectives, as in ``CollectiveTiming``."""

    issued: float
    start: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Simulation:
    """The time and memory of a schedule."""

    # Seconds of the whole graph.
    seconds: float
    # One for each launch, in launch order.
    timings: tuple[CollectiveTiming, ...]
    # When compute starts each segment, in seconds from the graph's start: before the launches and waits of the model's
    # own collectives there, and after those of gathers and reductions.
    reached: tuple[float, ...]
    # The most bytes alive during each segment, with the persistent ones.
    curve: tuple[int, ...]
    # One for each of ``Tasks.model_collectives``.
    model_timings: tuple[ModelTiming, ...] = ()
    # Seconds by which compute and copies take longer because collectives run beside them.
    contention: float = 0.0

    @property
    def peak(self) -> int:
        """The most bytes alive at any time."""
        return max(self.curve)

    @property
    def peak_segment(self) -> int:
        """The first segment with the most bytes."""
        return self.curve.index(self.peak)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for gathers and reductions."""
        return sum(timing.exposed for timing in self.timings)


def simulate(tasks: Tasks, schedule: Schedule) -> Simulation:
    """Simulate ``schedule``.

    At the start of a segment come first the waits for reductions, then the launches in the schedule's order, then the
    waits for gathers. A reduction with launch and wait at the same segment is waited for last.

    Raises:
        ValueError: a bucket is missing or there twice; or one is waited for before its launch, launched before its
            gradients are complete, or waited for after it is needed; or launches are not in the order of segments.
    """
    check(tasks, schedule)
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    clock.convert()
    return Simulation(
        max(clock.seconds, tasks.host_bound(len(schedule))),
        tuple(CollectiveTiming(launch, *times) for launch, times in zip(schedule, clock.timings, strict=True)),
        tuple(clock.reached),
        memory_curve(tasks, schedule),
        tuple(ModelTiming(*times) for times in clock.model_timings),
        clock.lost,
    )


def timeline(tasks: Tasks, schedule: Schedule) -> tuple[list[tuple[float, float]], list[float]]:
    """Return (start, end) of each collective, and when compute reaches each segment, without checking the schedule."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    clock.convert()
    return [(start, end) for _, start, end, _ in clock.timings], clock.reached


def makespan(tasks: Tasks, schedule: Schedule, *, host: bool = True) -> float:
    """``simulate(...).seconds`` alone, which is faster; the schedule is not checked.

    Args:
        host: whether the time is at least that of the host's launches; else it is the device's time.
    """
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return max(clock.seconds, tasks.host_bound(len(schedule))) if host else clock.seconds


def check(tasks: Tasks, schedule: Schedule) -> None:
    """Raise ValueError if ``schedule`` cannot run, or does not have each collective exactly once."""
    for kind in Kind:
        seen = sorted(i for launch in schedule if launch.kind is kind for i in launch.indices)
        if seen != list(range(len(tasks.collectives(kind)))):
            raise ValueError(f"{kind.plural} {seen} are not all, once each")
    at = 0
    for launch in schedule:
        if launch.at < at:
            raise ValueError(f"{launch} goes out behind a later launch")
        at = launch.at
        ready, due = tasks.window(launch.kind, launch.indices)
        if launch.at < ready:
            raise ValueError(f"{launch} goes out before its gradients are complete")
        if launch.wait < launch.at:
            raise ValueError(f"{launch} waits before its launch")
        if launch.wait > due:
            when = "at its first use" if launch.kind.supplies else "when it is needed"
            raise ValueError(f"{launch} is not there {when}")


class _Clock:
    """The compute stream and the channels while a schedule runs, in the collectives' time (see the module's text)."""

    def __init__(self, tasks: Tasks, schedule: Schedule) -> None:
        self.tasks, self.schedule = tasks, schedule
        self.costs = [tasks.costs_of(launch.kind, launch.indices, launch.form) for launch in schedule]
        self.now, self.segment = 0.0, 0
        self.lag = 0.0  # real seconds minus ``now``
        # Pairs of ``now`` and ``lag`` before and after each growth of the lag.
        self.lags: list[tuple[float, float]] = []
        self.lost = 0.0  # real seconds in which compute made no progress because collectives ran beside it
        self.channel_free: dict[int, float] = {}
        self.busy: list[tuple[float, float]] = []  # when any stream is busy; in order of start if there is one stream
        self.passed = 0  # the number of busy intervals that ended before now
        self.reached: list[float] = []
        self.timings: list[list[float]] = []
        self.model_timings: list[list[float]] = []

    @property
    def seconds(self) -> float:
        return self.now + self.lag

    def convert(self) -> None:
        """Convert the recorded times to real seconds. The lag grows evenly between two pairs of ``lags``."""
        if not self.lags:
            return
        known, lags = zip(*self.lags, strict=True)

        def real(time: float) -> float:
            after = bisect.bisect_left(known, time)
            if after in (0, len(known)):
                return time + lags[after - 1] * (after > 0)
            (begin, lag), (end, more) = self.lags[after - 1 : after + 1]
            return time + lag + (more - lag) * (time - begin) / (end - begin)

        self.reached = list(map(real, self.reached))
        for timing in (*self.timings, *self.model_timings):
            timing[:3] = map(real, timing[:3])

    def advance_all(self) -> None:
        model_events, end = self.tasks.model_events, self.tasks.end
        # Indices of launches by segment, for four events at its start, in the order in which they happen.
        waits_before: dict[int, list[int]] = {}
        launches: dict[int, list[int]] = {}
        waits_of_gathers: dict[int, list[int]] = {}
        waits_at_once: dict[int, list[int]] = {}
        for i, launch in enumerate(self.schedule):
            at, wait = launch.at, launch.wait
            launches.setdefault(at, []).append(i)
            waits = waits_of_gathers if launch.kind.supplies else waits_before if at < wait else waits_at_once
            waits.setdefault(wait, []).append(i)
        for at in sorted({*waits_before, *launches, *waits_of_gathers, *model_events, end}):
            self._compute_to(at)
            for i in waits_before.get(at, ()):
                self._wait(i)
            for i in launches.get(at, ()):
                self._launch(i)
            for i in waits_of_gathers.get(at, ()):
                self._wait(i)
            for i in waits_at_once.get(at, ()):
                self._wait(i)
            if at in model_events or at == end:
                self.reached.append(self.now)
            if at in model_events:
                self._run_model_collectives(*model_events[at])

    def _run_model_collectives(self, launched: Sequence[int], waited: Sequence[int]) -> None:
        for i in launched:
            self._copy(self.tasks.launch_seconds)
            streams = self.tasks.model_collectives[i].streams
            start = max(self.now, *(self.channel_free.get(stream, 0.0) for stream in streams))
            end = start + self.tasks.model_seconds[i]
            self.channel_free.update(dict.fromkeys(streams, end))
            if not self.tasks.model_collectives[i].is_copy:
                self.busy.append((start, end))
            self.model_timings.append([self.now, start, end, 0.0])
        for i in waited:
            timing = self.model_timings[i]
            timing[3] = max(0.0, timing[2] - self.now)
            self.now = max(self.now, timing[2])

    def _compute_to(self, index: int) -> None:
        tasks = self.tasks
        noted = len(self.reached) - self.segment  # 1 if the current segment is in ``reached`` already, else 0
        if not tasks.has_contention:
            start, done = self.now, tasks.seconds_before[self.segment]
            before = tasks.seconds_before[self.segment + noted : index]
            self.reached += [start + seconds - done for seconds in before]
            self.now = start + tasks.seconds_before[index] - done
        else:
            here = slice(self.segment, index)
            self.reached += self._work(tasks.segment_seconds[here], tasks.segment_slowdowns[here])[noted:]
        self.segment = index

    def _copy(self, seconds: float) -> None:
        """Copy, or launch, for so many seconds of the compute stream."""
        self._work((seconds,), (1 + self.tasks.copy_contention,))

    def _work(self, pieces: Sequence[float], slowdowns: Sequence[float]) -> list[float]:
        """Compute for each of these seconds in turn, more slowly while a collective runs; return when each begins.

        Args:
            pieces: seconds that each piece takes alone.
            slowdowns: how many times as long each piece takes beside a collective.
        """
        now, busy, passed = self.now, self.busy, self.passed
        beside = 1 + self.tasks.collective_contention  # real seconds for each of ``now`` while both run
        count, begun = len(busy), []
        for seconds, slowdown in zip(pieces, slowdowns, strict=True):
            begun.append(now)
            slow = slowdown / beside
            while seconds > 0:
                while passed < count and busy[passed][1] <= now:
                    passed += 1
                if passed == count:
                    now += seconds
                    break
                start, end = busy[passed]
                if now < start:
                    free = min(seconds, start - now)
                    now += free
                    seconds -= free
                    continue
                left = (end - now) / slow
                done = min(left, seconds)
                before, now = now, end if left < seconds else now + seconds * slow
                self.lost += done * (slowdown - 1)
                if beside > 1:
                    self._fall_behind(before, now, beside - 1)
                seconds -= done
        self.now, self.passed = now, passed
        return begun

    def _fall_behind(self, before: float, now: float, share: float) -> None:
        if not self.lags or self.lags[-1][0] != before:
            self.lags.append((before, self.lag))
        self.lag += share * (now - before)
        self.lags.append((now, self.lag))

    def _launch(self, index: int) -> None:
        costs = self.costs[index]
        self._copy(costs.packing)
        start = max(self.now, self.channel_free.get(costs.stream, 0.0))
        end = start + costs.on_channel
        self.channel_free[costs.stream] = end
        self.busy.append((start, end))
        self.timings.append([self.now, start, end, 0.0])

    def _wait(self, index: int) -> None:
        timing = self.timings[index]
        timing[3] = max(0.0, timing[2] - self.now)
        self.now = max(self.now, timing[2])
        self._copy(self.costs[index].unpacking)


def memory_curve(tasks: Tasks, schedule: Schedule) -> tuple[int, ...]:
    """The most bytes alive during each segment."""
    held = held_by_collectives(tasks, schedule)
    return tuple(tasks.persistent + segment.bytes + more for segment, more in zip(tasks.segments, held, strict=True))


def held_by_collectives(tasks: Tasks, schedule: Sequence[Launch]) -> list[int]:
    """The bytes of ``memory_curve`` that gathers and reductions hold, for each segment."""
    change = [0] * (len(tasks.segments) + 1)
    _note_changes(tasks, schedule, dict.fromkeys(PARTS, change))
    return list(itertools.accumulate(change[:-1]))


class MemoryParts(NamedTuple):
    """The bytes alive during one segment, in four parts; their sum is the segment's value in ``memory_curve``."""

    # Shards, their gradients and optimizer state, and bytes outside of the graph.
    persistent: int
    # Full parameters from their gathers to their last uses, and full gradients until their reductions.
    unsharded: int
    # Everything else that compute holds: activations, inputs, parameters that were kept from forward.
    activations: int
    # Send and receive buffers of collectives, except those that are full parameters or gradients themselves.
    buckets: int


def memory_parts(tasks: Tasks, schedule: Schedule) -> tuple[MemoryParts, ...]:
    """``memory_curve`` divided into its parts, for each segment."""
    changes = {part: [0] * (len(tasks.segments) + 1) for part in PARTS}
    _note_changes(tasks, schedule, changes)
    unsharded, buckets, sharded = (itertools.accumulate(changes[part]) for part in PARTS)
    return tuple(
        MemoryParts(tasks.persistent + at_shards, at_full, segment.bytes, in_buckets)
        for segment, at_full, in_buckets, at_shards in zip(tasks.segments, unsharded, buckets, sharded, strict=False)
    )


def _note_changes(tasks: Tasks, schedule: Sequence[Launch], changes: Mapping[str, list[int]]) -> None:
    """Add to ``changes`` the bytes that buckets allocate, or free, at the start of each segment.

    Args:
        changes: for each of ``PARTS``, the change at each segment.
    """
    for launch in schedule:
        for what, first, last, size in tasks.footprint(launch):
            if first <= last:
                change = changes[what]
                change[first] += round(size)
                change[last + 1] -= round(size)
