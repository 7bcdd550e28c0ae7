"""The time of a plan on hardware that is slower or faster than assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiled_fsdp.passes.plan.plain import RATE_ERROR
from compiled_fsdp.passes.plan.simulate import makespan
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks


@dataclass(frozen=True)
class ShiftedRate:
    """The time of a plan if one rate is lower or higher than assumed, by the share ``RATE_ERROR``."""

    # "compute", "link", "latency", "contention", "copies" or "host".
    rate: str
    # Whether the rate is lower, so that the plan takes longer; else it is higher. A lower rate of latency is a longer
    # latency, and one of contention a larger contention.
    lower: bool
    # Seconds of the plan with this rate.
    seconds: float


@dataclass(frozen=True)
class Sensitivity:
    """The times of a plan under other rates."""

    shifts: tuple[ShiftedRate, ...]

    def __str__(self) -> str:
        rates = list(dict.fromkeys(shift.rate for shift in self.shifts))
        times = {(shift.rate, shift.lower): 1e3 * shift.seconds for shift in self.shifts}
        listed = ", ".join(f"{rate} {times[rate, True]:.3f} or {times[rate, False]:.3f}" for rate in rates)
        return f"with a rate {RATE_ERROR:.0%} lower or higher, ms: {listed}"


def sensitivity(tasks: Tasks, schedule: Schedule) -> Sensitivity:
    """Simulate a plan with each rate lower, and with each rate higher."""
    shifts = [ShiftedRate(rate, lower, makespan(other, schedule)) for rate, lower, other in shifted_rates(tasks)]
    return Sensitivity(tuple(shifts))


def shifted_rates(tasks: Tasks) -> Iterator[tuple[str, bool, Tasks]]:
    """Yield (rate, lower, tasks with that rate changed) for each rate that the tasks depend on."""
    for share in (1 - RATE_ERROR, 1 + RATE_ERROR):
        lower = share < 1
        segments = tuple(replace(segment, seconds=segment.seconds / share) for segment in tasks.segments)
        yield "compute", lower, replace(tasks, segments=segments)
        channels = tasks.channels.items()
        slow = {name: channel.scaled(rate=share) for name, channel in channels}
        yield "link", lower, replace(tasks, channels=slow)
        late = {name: channel.scaled(latency=1 / share) for name, channel in channels}
        if late != tasks.channels:
            yield "latency", lower, replace(tasks, channels=late)
        if tasks.has_contention:
            yield "contention", lower, tasks.with_contention(1 / share)
        for rate, names in _SECONDS.items():
            if any(getattr(tasks, name) for name in names):
                yield rate, lower, replace(tasks, **{name: getattr(tasks, name) / share for name in names})


_SECONDS = {
    "copies": ("copy_seconds", "kernel_seconds", "host_copy_seconds"),
    "host": ("launch_seconds", "host_launch_seconds", "host_seconds"),
}
