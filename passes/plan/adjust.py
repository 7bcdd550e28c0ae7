"""Changes to a finished schedule: other forms, other waits, other places, in the same order of launches."""

from __future__ import annotations

from dataclasses import replace

from compiled_fsdp.buckets.spec import COALESCED, FLAT
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

MAX_SLOWDOWN_OF_EARLY_WAITS = 1.05
"""Of the graph's time: waits for reductions are early as long as that takes no longer than this many times as long."""


def flat_reductions(tasks: Tasks, schedule: Schedule, budget: float | None) -> Schedule:
    """Reductions as one tensor each, as far as the budget has room for it: they go on over replicas."""
    for i, launch in enumerate(schedule):
        if not launch.kind.supplies and launch.form == COALESCED:
            changed = (*schedule[:i], replace(launch, form=FLAT), *schedule[i + 1 :])
            if budget is None or max(memory_curve(tasks, changed)) <= budget:
                schedule = changed
    return schedule


def wait_soon(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Reductions waited for at the next one's launch at the latest: less memory."""
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
    """``wait_soon`` where it costs next to nothing.

    For graphs that publish gradients: they do so after these waits, and a hook may use the gradients up at once.
    """
    soon = wait_soon(tasks, schedule)
    return soon if makespan(tasks, soon) <= MAX_SLOWDOWN_OF_EARLY_WAITS * makespan(tasks, schedule) else schedule


def as_late_as_can_be(tasks: Tasks, schedule: Schedule) -> Schedule:
    """The same order with little memory.

    As far as the order allows, gathers are launched at their first use and reductions when they are complete;
    reductions are waited for at once.
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
