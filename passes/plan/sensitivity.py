"""What a plan takes where hardware is not what it is taken for, beside the runner-up."""

# Why: docs/design.md, note N54

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiled_fsdp.passes.plan.plain import RATE_ERROR, SAME_SECONDS
from compiled_fsdp.passes.plan.simulate import makespan
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks


@dataclass(frozen=True)
class RunnerUp:
    """The best other plan that a search has kept."""

    schedule: Schedule
    # Where it came from: for people.
    origin: str


@dataclass(frozen=True)
class ShiftedRate:
    """A graph where one rate is ``RATE_ERROR`` lower or higher than planned for."""

    # "compute", "link", "latency", "copies" or "host".
    rate: str
    # Whether it is lower; else it is higher. Latency counts as a rate: lower takes longer.
    lower: bool
    # Seconds of the plan.
    seconds: float
    # Seconds of the runner-up; None without one.
    runner_up: float | None

    @property
    def loses(self) -> bool:
        """Whether the plan takes longer than the runner-up, by more than planners can tell."""
        return self.runner_up is not None and self.seconds > SAME_SECONDS * self.runner_up


@dataclass(frozen=True)
class Sensitivity:
    """A plan, and the runner-up if there is one, under other rates."""

    shifts: tuple[ShiftedRate, ...]
    runner_up: RunnerUp | None
    # Seconds of the runner-up under the rates that were planned for; None without one.
    runner_up_seconds: float | None

    def __str__(self) -> str:
        rates = list(dict.fromkeys(shift.rate for shift in self.shifts))
        times = {(shift.rate, shift.lower): 1e3 * shift.seconds for shift in self.shifts}
        listed = ", ".join(f"{rate} {times[rate, True]:.3f} or {times[rate, False]:.3f}" for rate in rates)
        text = f"with a rate {RATE_ERROR:.0%} lower or higher, ms: {listed}"
        if self.runner_up is None or self.runner_up_seconds is None:
            return text
        lost = [
            f"{shift.rate} {'lower' if shift.lower else 'higher'} ({1e3 * (shift.runner_up or 0):.3f})"
            for shift in self.shifts
            if shift.loses
        ]
        other = (
            f"the runner-up ({self.runner_up.origin}; {len(self.runner_up.schedule)} launches, "
            f"{1e3 * self.runner_up_seconds:.3f} ms)"
        )
        return f"{text}; {other} is quicker with {', '.join(lost)}" if lost else f"{text}; {other} is quicker in none"


def sensitivity(tasks: Tasks, schedule: Schedule, runner_up: RunnerUp | None) -> Sensitivity:
    """Simulate a plan and the runner-up under each rate lower and higher."""
    shifts = tuple(
        ShiftedRate(
            rate, lower, makespan(other, schedule), None if runner_up is None else makespan(other, runner_up.schedule)
        )
        for rate, lower, other in shifted_rates(tasks)
    )
    return Sensitivity(shifts, runner_up, None if runner_up is None else makespan(tasks, runner_up.schedule))


def is_more_robust(tasks: Tasks, other: Schedule, than: Schedule) -> bool:
    """Whether ``other`` takes as long, is quicker under some shifted rate, and loses under none."""
    if makespan(tasks, other) > SAME_SECONDS * makespan(tasks, than):
        return False
    pairs = [(makespan(world, other), makespan(world, than)) for _, _, world in shifted_rates(tasks)]
    gains = any(theirs > SAME_SECONDS * ours for ours, theirs in pairs)
    return gains and all(ours <= SAME_SECONDS * theirs for ours, theirs in pairs)


def shifted_rates(tasks: Tasks) -> Iterator[tuple[str, bool, Tasks]]:
    """The tasks with one rate lower (True) or higher, for each rate that they depend on."""
    for share in (1 - RATE_ERROR, 1 + RATE_ERROR):
        lower = share < 1
        segments = tuple(replace(segment, seconds=segment.seconds / share) for segment in tasks.segments)
        yield "compute", lower, replace(tasks, segments=segments)
        channels = tasks.channels.items()
        slow = {name: replace(channel, bytes_per_second=channel.bytes_per_second * share) for name, channel in channels}
        yield "link", lower, replace(tasks, channels=slow)
        late = {
            name: replace(channel, latency=channel.latency / share, each=channel.each / share)
            for name, channel in channels
        }
        if late != tasks.channels:
            yield "latency", lower, replace(tasks, channels=late)
        for rate, names in _SECONDS.items():
            if any(getattr(tasks, name) for name in names):
                yield rate, lower, replace(tasks, **{name: getattr(tasks, name) / share for name in names})


_SECONDS = {
    "copies": ("copy_seconds", "kernel_seconds", "host_copy_seconds"),
    "host": ("launch_seconds", "host_launch_seconds", "host_seconds"),
}
