"""Launches as late as is safe: the same time, less memory held."""

# Why: docs/design.md, note N18

from __future__ import annotations

from dataclasses import replace

from compiled_fsdp.passes.plan.simulate import simulate
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

LATE_LAUNCH_SLACK = 0.25
"""A launch as late as is safe leaves its collective this much more time than it takes, as a share of that."""


def as_late_as_safe(tasks: Tasks, schedule: Schedule, limit: float) -> Schedule:
    """Gathers launched as late as the simulation allows, with slack, if that takes as long and stays within ``limit``.

    Else ``schedule`` itself.
    """
    seen = simulate(tasks, schedule)
    out: list[Launch] = []
    latest_start = seen.seconds
    following = tasks.end
    for timing in reversed(seen.timings):
        launch = timing.launch
        length = timing.end - timing.start
        if launch.gathers:
            # it must have ended when it is needed, and before the next one starts where that one cannot wait
            needed = min(max(seen.reached[launch.wait], timing.end), max(latest_start, timing.end))
            start = needed - length * (1 + LATE_LAUNCH_SLACK)
            at = launch.at
            while at < min(launch.wait, following) and seen.reached[at + 1] <= start:
                at += 1
            launch = replace(launch, at=at)
            latest_start = max(timing.start, needed - length)
        else:
            latest_start = timing.start
        following = min(following, launch.at)
        out.append(launch)
    late = tuple(reversed(out))
    after = simulate(tasks, late)
    return late if after.seconds <= seen.seconds * (1 + 1e-6) and after.peak <= limit else schedule
