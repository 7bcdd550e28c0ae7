"""Conversion between schedules, in numbers of one graph's tasks and segments, and plans, which all ranks understand."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.plan import Bucket, GraphPlan
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks


class PlanDoesNotFit(CompiledFsdpError, RuntimeError):
    """This rank's graph cannot follow the plan that the ranks agreed on."""


def collective_lines(tasks: Tasks) -> tuple[str, ...]:
    """A line of text for each gather and reduction of a graph, sorted. They have to be equal on all ranks."""
    return tuple(
        sorted(
            f"{kind.value} of read {task.read}, {task.size.sent:,} bytes"
            for kind in Kind
            for task in tasks.collectives(kind)
        )
    )


def milestone_lines(tasks: Tasks) -> tuple[str, ...]:
    """A line of text with the milestones at the start of each segment, in order."""
    return tuple(f"then {', '.join(segment.milestones)}" for segment in tasks.segments)


def plan_of(tasks: Tasks, schedule: Schedule) -> GraphPlan:
    """Convert a schedule to reads and milestones, which mean the same on all ranks and for all variants."""
    buckets = []
    for launch in schedule:
        members = tasks.members_of(launch)
        channel = tasks.channels[members[0].channel]
        buckets.append(
            Bucket(
                kind=launch.kind,
                reads=tuple(task.read for task in members),
                group_id=channel.group_id,
                bytes=sum(task.size.sent for task in members),
                form=launch.form,
                transport=channel.transport,
                at=tasks.segments[launch.at].milestones[0],
                wait=tasks.segments[launch.wait].milestones[0],
            )
        )
    return GraphPlan(tasks.phase, tuple(buckets))


def schedule_of(agreed: GraphPlan, tasks: Tasks) -> Schedule:
    """Convert a plan to a schedule of this graph.

    If a gradient is complete later, or a parameter is needed earlier, than in the graph that was planned, the launch
    moves to the nearest possible place.

    Raises:
        PlanDoesNotFit: this graph has other collectives, or its compute cannot follow the order of launches.
    """
    # a read may have several gradients that cannot be added before they are reduced: they are matched in order
    indices_of: dict[tuple[Kind, int], deque[int]] = defaultdict(deque)
    bytes_of: dict[tuple[Kind, int], int] = {}
    for kind in Kind:
        for i, task in enumerate(tasks.collectives(kind)):
            indices_of[kind, task.read].append(i)
            bytes_of[kind, task.read] = task.size.sent
    wanted = [(bucket.kind, read) for bucket in agreed.launches for read in bucket.reads]
    planned_bytes = [bucket.bytes for bucket in agreed.launches]
    own_bytes = [sum(bytes_of.get((bucket.kind, read), 0) for read in bucket.reads) for bucket in agreed.launches]
    if Counter(wanted) != {key: len(found) for key, found in indices_of.items()} or own_bytes != planned_bytes:
        raise PlanDoesNotFit(
            f"compiled_fsdp: the {tasks.phase} graph of this rank does not have the collectives of the agreed plan; "
            f"only here: {_named(set(bytes_of) - set(wanted))}; only in the plan: "
            f"{_named(set(wanted) - set(bytes_of))}; bytes here {own_bytes}, in the plan {planned_bytes}."
        )
    launches: list[Launch] = []
    at = 0
    for bucket in agreed.launches:
        indices = tuple(indices_of[bucket.kind, read].popleft() for read in bucket.reads)
        ready, due = tasks.window(bucket.kind, indices)
        at = max(at, ready, min(tasks.segment_of_milestone.get(bucket.at, 0), due))
        if at > due:
            raise PlanDoesNotFit(
                f"compiled_fsdp: the {tasks.phase} graph of this rank cannot launch its collectives in the agreed "
                f"order: {bucket} would come behind {tasks.segments[at].milestones[0]}, but is needed at "
                f"{tasks.segments[due].milestones[0]}."
            )
        wait = (
            due if bucket.kind.supplies else max(at, min(tasks.segment_of_milestone.get(bucket.wait, tasks.end), due))
        )
        launches.append(Launch(bucket.kind, indices, bucket.form, at, wait))
    return tuple(launches)


def _named(collectives: set[tuple[Kind, int]]) -> str:
    names = [f"{kind.value} of read {read}" for kind, read in sorted(collectives)]
    return ", ".join(names) or "none"
