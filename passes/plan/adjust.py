"""Changes of a finished schedule that keep the order of launches: other forms, waits and places."""

from __future__ import annotations

from dataclasses import replace

from compiled_fsdp.buckets.spec import COALESCED, FLAT
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

MAX_SLOWDOWN_OF_EARLY_WAITS = 1.05
"""Early waits for reductions may make the graph take at most this many times as long."""


def flat_reductions(tasks: Tasks, schedule: Schedule, budget: float | None) -> Schedule:
    """Make coalesced reductions flat if the budget has room, so that each bucket needs one all-reduce over replicas."""
    for i, launch in enumerate(schedule):
        if not launch.kind.supplies and launch.form == COALESCED:
            changed = (*schedule[:i], replace(launch, form=FLAT), *schedule[i + 1 :])
            if budget is None or max(memory_curve(tasks, changed)) <= budget:
                schedule = changed
    return schedule


def wait_soon(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Wait for each reduction at the launch of the next one at the latest, which holds less memory."""
    out: list[Launch] = []
    following = tasks.end
    for launch in reversed(schedule):
        if not launch.kind.supplies:
            out.append(launch.placed(launch.at, max(launch.at, min(launch.wait, following))))
            following = launch.at
        else:
            out.append(launch)
    return tuple(reversed(out))


def wait_soon_if_cheap(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Apply ``wait_soon`` if it costs next to nothing.

    This is for graphs that publish gradients, which they do after these waits. A hook may use a published gradient up
    and free its memory.
    """
    soon = wait_soon(tasks, schedule)
    return soon if makespan(tasks, soon) <= MAX_SLOWDOWN_OF_EARLY_WAITS * makespan(tasks, schedule) else schedule


def as_late_as_can_be(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Return a schedule with the same order that holds little memory.

    As far as the order allows, gathers are launched at their first use and reductions when their gradients are
    complete. Reductions are waited for at once.
    """
    places: list[int] = []
    latest = tasks.end
    for launch in reversed(schedule):
        ready, due = tasks.window(launch.kind, launch.indices)
        latest = min(latest, launch.wait if launch.kind.supplies else due)
        places.append(latest if launch.kind.supplies else ready)
    out: list[Launch] = []
    at = 0
    for launch, place in zip(schedule, reversed(places), strict=True):
        at = max(at, place)
        out.append(launch.placed(at, launch.wait if launch.kind.supplies else at))
    return tuple(out)
