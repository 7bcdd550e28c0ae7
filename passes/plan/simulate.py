"""What a schedule takes, in time and in memory: a compute stream and a FIFO of collectives per process group.

A launch packs on the compute stream, and its collective starts when compute has got there and the collectives launched
before it on the same link are done. A wait stops compute until the collective is done, then unpacks. Memory: a gathered
parameter lives from its launch (in a flat bucket: from its wait, and the bucket and the shards copied into it from launch to wait) to its last use; a
gradient from its completion to the end of its reduction (in a flat bucket: to its launch).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from compiled_fsdp.passes.plan.tasks import FLAT, Launch, Schedule, Tasks

GAP = 64
"""Bytes at most, between two tensors that a kernel unpacked into one."""


@dataclass(frozen=True)
class Flight:
    """A launch in time, in seconds from the graph's start: ``start`` and ``end`` on the link, ``exposed`` while compute waits."""

    launch: Launch
    issued: float
    start: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time and memory.

    Attributes:
        seconds: of the whole graph. flights: one for each launch, in launch order.
        reached: when compute starts each run.
        curve: bytes alive at most during each run, persistent ones included. peak: the largest of them.
    """

    seconds: float
    flights: tuple[Flight, ...]
    reached: tuple[float, ...]
    curve: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.curve)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for collectives."""
        return sum(flight.exposed for flight in self.flights)


def simulate(tasks: Tasks, schedule: Schedule) -> Simulation:
    """Run ``schedule``. Launches at one run go out in the schedule's order, before that run's waits for gathers and after
    its waits for reductions.

    Raises:
        ValueError: a bucket that waits before its launch, is launched before its gradients are complete, or waited for
            after it is needed.
    """
    check(tasks, schedule)
    flights, reached = timeline(tasks, schedule)
    return Simulation(reached[-1], tuple(flights), tuple(reached), memory_curve(tasks, schedule))


def timeline(tasks: Tasks, schedule: Schedule) -> tuple[list[Flight], list[float]]:
    """The flights of a schedule that can run, and when compute reaches each run, without its memory."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    flights = [Flight(launch, *times) for launch, times in zip(schedule, clock.flights, strict=True)]
    return flights, [*clock.reached, clock.now]


def makespan(tasks: Tasks, schedule: Schedule) -> float:
    """``simulate(...).seconds`` without the rest."""
    clock = _Clock(tasks, schedule)
    clock.advance_all()
    return clock.now


def check(tasks: Tasks, schedule: Schedule) -> None:
    """Raise ValueError if ``schedule`` cannot run, or is not a schedule of all items."""
    for gathers in (True, False):
        seen = sorted(i for launch in schedule if launch.gathers == gathers for i in launch.items)
        if seen != list(range(len(tasks.items(gathers)))):
            raise ValueError(f"{'gathers' if gathers else 'reductions'} {seen} are not all, once each")
    at = 0
    for launch in schedule:
        items = tasks.of(launch)
        if launch.at < at:
            raise ValueError(f"{launch} goes out behind a later launch")
        at = launch.at
        if launch.gathers and not launch.at <= launch.wait <= min(item.first for item in items):
            raise ValueError(f"{launch} is not there at its first use")
        if not launch.gathers and not max(item.first for item in items) <= launch.at <= launch.wait:
            raise ValueError(f"{launch} goes out before its gradients are complete")
        if not launch.gathers and launch.wait > min(item.last for item in items):
            raise ValueError(f"{launch} is not there when it is needed")


class _Clock:
    """The streams while a schedule runs."""

    def __init__(self, tasks: Tasks, schedule: Schedule) -> None:
        self.tasks, self.schedule = tasks, schedule
        self.now, self.run_index = 0.0, 0
        self.link_free: dict[int, float] = defaultdict(float)
        self.busy: list[tuple[float, float]] = []  # of any link, in order of start where there is one link
        self.passed = 0  # busy intervals that ended before now
        self.reached: list[float] = []
        self.flights: list[list[float]] = []

    def advance_all(self) -> None:
        tasks = self.tasks
        launches: dict[int, list[int]] = defaultdict(list)
        waits: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, launch in enumerate(self.schedule):
            launches[launch.at].append(i)
            waits[launch.wait, launch.gathers].append(i)
        for at in sorted({*launches, *(at for at, _ in waits), tasks.end}):
            self._compute_to(at)
            late = [i for i in waits.get((at, False), ()) if self.schedule[i].at < at]
            for i in late:
                self._wait(i)
            for i in launches.get(at, ()):
                self._launch(i)
            for i in (*waits.get((at, True), ()), *(i for i in waits.get((at, False), ()) if i not in late)):
                self._wait(i)

    def _compute_to(self, index: int) -> None:
        tasks = self.tasks
        if not tasks.contention:
            start, done = self.now, tasks.before[self.run_index]
            self.reached += [start + before - done for before in tasks.before[self.run_index : index]]
            self.now = start + tasks.before[index] - done
        else:
            for run in tasks.runs[self.run_index : index]:
                self.reached.append(self.now)
                self._work(run.seconds)
        self.run_index = index

    def _work(self, seconds: float) -> None:
        """Compute for so long, slower where a collective runs."""
        slow = 1 + self.tasks.contention
        while seconds > 0:
            while self.passed < len(self.busy) and self.busy[self.passed][1] <= self.now:
                self.passed += 1
            if self.passed == len(self.busy):
                self.now += seconds
                return
            start, end = self.busy[self.passed]
            if self.now < start:
                free = min(seconds, start - self.now)
                self.now += free
                seconds -= free
                continue
            done = min(seconds, (end - self.now) / slow)
            self.now = end if done < seconds else self.now + done * slow
            seconds -= done

    def _launch(self, index: int) -> None:
        launch = self.schedule[index]
        items = self.tasks.of(launch)
        self._work(self.tasks.packing(items, launch.form, launch.gathers))
        stream = self.tasks.links[items[0].link].stream
        start = max(self.now, self.link_free[stream])
        end = start + self.tasks.seconds(items, launch.form)
        self.link_free[stream] = end
        self.busy.append((start, end))
        self.flights.append([self.now, start, end, 0.0])

    def _wait(self, index: int) -> None:
        launch = self.schedule[index]
        flight = self.flights[index]
        flight[3] = max(0.0, flight[2] - self.now)
        self.now = max(self.now, flight[2])
        self._work(self.tasks.unpacking(self.tasks.of(launch), launch.form, launch.gathers))


def memory_curve(tasks: Tasks, schedule: Schedule) -> tuple[int, ...]:
    """Bytes alive at most during each run."""
    change = [0] * (len(tasks.runs) + 1)

    def alive(first: int, last: int, size: float) -> None:
        """From the start of run ``first`` to the end of run ``last``."""
        if first <= last:
            change[first] += round(size)
            change[last + 1] -= round(size)

    for launch in schedule:
        items = tasks.of(launch)
        total = sum(item.bytes for item in items)
        flat = launch.form == FLAT
        if launch.gathers:
            if flat:
                alive(launch.at, launch.wait, total)
                packed = total / tasks.links[items[0].link].world
                alive(launch.at, max(launch.at, launch.wait - 1), packed)
            if flat and tasks.kernels:  # one tensor, which goes with the last of them
                alive(launch.wait, max(launch.wait, *(item.last for item in items)), total + len(items) * GAP)
                continue
            for item in items:
                alive(launch.wait if flat else launch.at, max(item.last, launch.wait), item.bytes)
            continue
        link = tasks.links[items[0].link]
        landed = max(launch.at, launch.wait - 1)  # waits for reductions come first in their run
        for item in items:
            packed = flat or item.copied
            alive(item.first, launch.at if packed else landed, item.bytes)
            if packed:
                alive(launch.at, landed, item.bytes)
            if flat and item.copied:
                alive(launch.at, launch.at, item.bytes)
        alive(launch.at, landed, max(link.received, 1 / link.world) * total)
        alive(landed + 1, tasks.end, total / link.world)
    held = itertools.accumulate(change[:-1])
    return tuple(tasks.persistent + run.bytes + more for run, more in zip(tasks.runs, held, strict=True))
