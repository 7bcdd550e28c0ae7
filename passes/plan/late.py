"""Launches as late as is safe: the schedule takes the same time and holds less memory."""

# Why: docs/design/planner.md, "The search for a plan"

from __future__ import annotations

from compiled_fsdp.passes.plan.simulate import Simulation, simulate
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

LATE_LAUNCH_SLACK = 0.25
"""The extra time that a launch leaves for its collective, as a share of the collective's own time."""


def as_late_as_safe(tasks: Tasks, schedule: Schedule, limit: float) -> Schedule:
    """Move the launches of gathers as late as the simulation allows, with slack.

    The result takes as long as ``schedule`` and holds at most ``limit`` bytes; if there is none, it is ``schedule``
    itself. If some of the model's own collectives use the same link, a second try keeps each launch ahead of the next
    one of those.
    """
    seen = simulate(tasks, schedule)
    for stay_ahead in (False, True) if tasks.shares_links else (False,):
        late = _late(tasks, seen, stay_ahead=stay_ahead)
        after = simulate(tasks, late)
        if after.seconds <= seen.seconds * (1 + 1e-6) and after.peak <= limit:
            return late
    return schedule


def _late(tasks: Tasks, seen: Simulation, *, stay_ahead: bool) -> Schedule:
    out: list[Launch] = []
    latest_start = seen.seconds
    following = tasks.end
    for timing in reversed(seen.timings):
        launch = timing.launch
        length = timing.end - timing.start
        if launch.kind.supplies:
            # it must end before its first use, and before the next collective has to start
            needed = min(max(seen.reached[launch.wait], timing.end), max(latest_start, timing.end))
            limit = min(launch.wait, following)
            if stay_ahead and (model := _next_of_model(tasks, launch)) is not None:
                needed = min(needed, max(seen.model_timings[model].start, timing.end))
                limit = min(limit, tasks.model_collectives[model].at)
            start = needed - length * (1 + LATE_LAUNCH_SLACK)
            at = launch.at
            while at < limit and seen.reached[at + 1] <= start:
                at += 1
            launch = launch.placed(at, launch.wait)
            latest_start = max(timing.start, needed - length)
        else:
            latest_start = timing.start
        following = min(following, launch.at)
        out.append(launch)
    return tuple(reversed(out))


def _next_of_model(tasks: Tasks, launch: Launch) -> int | None:
    """The first of the model's own collectives that is launched after ``launch`` on its link."""
    stream = tasks.channels[tasks.members_of(launch)[0].channel].stream
    own = enumerate(tasks.model_collectives)
    return next((i for i, of in own if of.at >= launch.at and stream in of.streams), None)
