"""Simulate the time and memory of a schedule, with one compute stream and a FIFO of collectives per process group.

A launch packs its bucket on the compute stream. Its collective starts when compute has packed it and the collectives
launched before it on the same stream are done. A wait stops compute until the collective is done, and then unpacks.
The whole graph takes at least the time that the host needs for its launches.

The model's own collectives are launched and waited for at the starts of segments, as in the graph. One that uses the
same link as gathers or reductions is in their FIFO.

``buckets/layout.py`` says how many bytes collectives hold in memory, and for how long.
"""

from __future__ import annotations

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

    @property
    def peak(self) -> int:
        """The most bytes alive at any time."""
        return max(self.curve)

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
    return Simulation(
        max(clock.now, tasks.host_bound(len(schedule))),
        tuple(clock.all_timings()),
        tuple(clock.reached),
        memory_curve(tasks, schedule),
        tuple(ModelTiming(*times) for times in clock.model_timings),
    )


def timeline(tasks: Tasks, schedule: Schedule) -> tuple[list[tuple[float, float]], list[float]]:
    """Return (start, end) of each collective, and when compute reaches each segment, without checking the schedule."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return [(start, end) for _, start, end, _ in clock.timings], clock.reached


def makespan(tasks: Tasks, schedule: Schedule, *, host: bool = True) -> float:
    """``simulate(...).seconds`` alone, which is faster; the schedule is not checked.

    Args:
        host: whether the time is at least that of the host's launches; else it is the device's time.
    """
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return max(clock.now, tasks.host_bound(len(schedule))) if host else clock.now


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
    """The compute stream and the channels while a schedule runs."""

    def __init__(self, tasks: Tasks, schedule: Schedule) -> None:
        self.tasks, self.schedule = tasks, schedule
        self.costs = [tasks.costs_of(launch.kind, launch.indices, launch.form) for launch in schedule]
        self.now, self.segment = 0.0, 0
        self.channel_free: dict[int, float] = {}
        self.busy: list[tuple[float, float]] = []  # when any stream is busy; in order of start if there is one stream
        self.passed = 0  # the number of busy intervals that ended before now
        self.reached: list[float] = []
        self.timings: list[list[float]] = []
        self.model_timings: list[list[float]] = []

    def all_timings(self) -> list[CollectiveTiming]:
        return [CollectiveTiming(launch, *times) for launch, times in zip(self.schedule, self.timings, strict=True)]

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
            self._work((self.tasks.launch_seconds,))
            streams = self.tasks.model_collectives[i].streams
            start = max(self.now, *(self.channel_free.get(stream, 0.0) for stream in streams))
            end = start + self.tasks.model_seconds[i]
            self.channel_free.update(dict.fromkeys(streams, end))
            self.busy.append((start, end))
            self.model_timings.append([self.now, start, end, 0.0])
        for i in waited:
            timing = self.model_timings[i]
            timing[3] = max(0.0, timing[2] - self.now)
            self.now = max(self.now, timing[2])

    def _compute_to(self, index: int) -> None:
        tasks = self.tasks
        noted = len(self.reached) - self.segment  # 1 if the current segment is in ``reached`` already, else 0
        if not tasks.contention:
            start, done = self.now, tasks.seconds_before[self.segment]
            before = tasks.seconds_before[self.segment + noted : index]
            self.reached += [start + seconds - done for seconds in before]
            self.now = start + tasks.seconds_before[index] - done
        else:
            self.reached += self._work(tasks.segment_seconds[self.segment : index])[noted:]
        self.segment = index

    def _work(self, pieces: Sequence[float]) -> list[float]:
        """Compute for each of these seconds in turn, more slowly while a collective runs; return when each begins."""
        now, busy, passed, slow = self.now, self.busy, self.passed, 1 + self.tasks.contention
        count, begun = len(busy), []
        for seconds in pieces:
            begun.append(now)
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
                if left < seconds:
                    now = end
                    seconds -= left
                else:
                    now += seconds * slow
                    break
        self.now, self.passed = now, passed
        return begun

    def _launch(self, index: int) -> None:
        costs = self.costs[index]
        self._work((costs.packing,))
        start = max(self.now, self.channel_free.get(costs.stream, 0.0))
        end = start + costs.on_channel
        self.channel_free[costs.stream] = end
        self.busy.append((start, end))
        self.timings.append([self.now, start, end, 0.0])

    def _wait(self, index: int) -> None:
        timing = self.timings[index]
        timing[3] = max(0.0, timing[2] - self.now)
        self.now = max(self.now, timing[2])
        self._work((self.costs[index].unpacking,))


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
