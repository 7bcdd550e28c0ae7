"""What a schedule takes, in time and in memory: a compute stream and a FIFO of collectives per process group.

A launch packs on the compute stream, and its collective starts when compute has got there and the collectives launched
before it on the same stream are done. A wait stops compute until the collective is done, then unpacks. All of it takes
no less time than the host needs for its launches.

Collectives of the model's own stand between compute, at the starts of segments. One that runs over the same link as
some of ours is in their queue; compute waits for it where the graph does.

``buckets/layout.py`` says what collectives hold in memory.
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
    """A launch in time. Times are seconds from the graph's start."""

    launch: Launch
    # When compute has got to the launch and has packed.
    issued: float
    # When the channel begins with the collective.
    start: float
    # When the channel is done with the collective.
    end: float
    # How many seconds compute waits for it.
    exposed: float


class ModelTiming(NamedTuple):
    """A collective of the model's own in time: as ``CollectiveTiming``."""

    issued: float
    start: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time and memory."""

    # Of the whole graph.
    seconds: float
    # One for each launch, in launch order.
    timings: tuple[CollectiveTiming, ...]
    # When compute starts each segment, in seconds: first with what the model has of its own there.
    reached: tuple[float, ...]
    # The most bytes alive during each segment, persistent ones included.
    curve: tuple[int, ...]
    # One for each of ``Tasks.model_collectives``.
    model_timings: tuple[ModelTiming, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes alive at any time."""
        return max(self.curve)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for collectives of ours."""
        return sum(timing.exposed for timing in self.timings)


def simulate(tasks: Tasks, schedule: Schedule) -> Simulation:
    """Play ``schedule``.

    Launches before one segment go out in the schedule's order, before the waits for gathers there and after those for
    reductions.

    Raises:
        ValueError: a bucket that waits before its launch, is launched before its gradients are complete, or waited for
            after it is needed.
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
    """When each collective of a schedule that can run starts and ends, and when compute reaches each segment."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return [(start, end) for _, start, end, _ in clock.timings], clock.reached


def makespan(tasks: Tasks, schedule: Schedule, *, host: bool = True) -> float:
    """``simulate(...).seconds`` without the rest; without the ``host`` the device's alone."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return max(clock.now, tasks.host_bound(len(schedule))) if host else clock.now


def check(tasks: Tasks, schedule: Schedule) -> None:
    """Raise ValueError if ``schedule`` cannot run, or is not a schedule of all collectives."""
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
    """The streams while a schedule runs."""

    def __init__(self, tasks: Tasks, schedule: Schedule) -> None:
        self.tasks, self.schedule = tasks, schedule
        self.costs = [tasks.costs_of(launch.kind, launch.indices, launch.form) for launch in schedule]
        self.now, self.segment = 0.0, 0
        self.channel_free: dict[int, float] = {}
        self.busy: list[tuple[float, float]] = []  # of any stream, in order of start where there is one stream
        self.passed = 0  # busy intervals that ended before now
        self.reached: list[float] = []
        self.timings: list[list[float]] = []
        self.model_timings: list[list[float]] = []

    def all_timings(self) -> list[CollectiveTiming]:
        return [CollectiveTiming(launch, *times) for launch, times in zip(self.schedule, self.timings, strict=True)]

    def advance_all(self) -> None:
        model_events, end = self.tasks.model_events, self.tasks.end
        # By segment, in the order in which they happen at its start.
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
        noted = len(self.reached) - self.segment  # the segment where compute is, if events were at its start
        if not tasks.contention:
            start, done = self.now, tasks.seconds_before[self.segment]
            before = tasks.seconds_before[self.segment + noted : index]
            self.reached += [start + seconds - done for seconds in before]
            self.now = start + tasks.seconds_before[index] - done
        else:
            self.reached += self._work(tasks.segment_seconds[self.segment : index])[noted:]
        self.segment = index

    def _work(self, pieces: Sequence[float]) -> list[float]:
        """Compute for so many seconds, piece by piece, more slowly while a collective runs; when each piece begins."""
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
    """Of ``memory_curve`` what gathers and reductions hold."""
    change = [0] * (len(tasks.segments) + 1)
    _note_changes(tasks, schedule, dict.fromkeys(PARTS, change))
    return list(itertools.accumulate(change[:-1]))


class MemoryParts(NamedTuple):
    """What is alive during one segment, in bytes; the sum is the segment's place on the curve."""

    # Shards, their gradients and optimizer state, and what is held outside of the graph.
    persistent: int
    # Full parameters, from their gathers to their last uses, and full gradients, to their reductions.
    unsharded: int
    # Everything else that compute holds: activations, inputs, parameters that were kept from forward.
    activations: int
    # What collectives are sent from and received in, where that is not a parameter or gradient itself.
    buckets: int


def memory_parts(tasks: Tasks, schedule: Schedule) -> tuple[MemoryParts, ...]:
    """``memory_curve`` by what holds the bytes, for each segment."""
    changes = {part: [0] * (len(tasks.segments) + 1) for part in PARTS}
    _note_changes(tasks, schedule, changes)
    unsharded, buckets, sharded = (itertools.accumulate(changes[part]) for part in PARTS)
    return tuple(
        MemoryParts(tasks.persistent + at_shards, at_full, segment.bytes, in_buckets)
        for segment, at_full, in_buckets, at_shards in zip(tasks.segments, unsharded, buckets, sharded, strict=False)
    )


def _note_changes(tasks: Tasks, schedule: Sequence[Launch], changes: Mapping[str, list[int]]) -> None:
    """Add by how many bytes full tensors, buckets and reduced gradients change at each segment's start."""
    for launch in schedule:
        for what, first, last, size in tasks.footprint(launch):
            if first <= last:
                change = changes[what]
                change[first] += round(size)
                change[last + 1] -= round(size)
