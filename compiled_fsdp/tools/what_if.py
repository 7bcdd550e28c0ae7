"""A graph's tasks with one change each, so that advice can plan the graph again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.channels import ModelCollective
from compiled_fsdp.passes.plan.choose import PlanRules, adjusted, choose
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.plan.simulate import Simulation, simulate
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Schedule, Tasks


def replan(tasks: Tasks, rules: PlanRules) -> Simulation | None:
    """Plan ``tasks`` as a compile would, and simulate the plan; None if no plan fits into the budget."""
    try:
        schedule, _ = choose(tasks, rules)
    except OverBudget:
        return None
    found = simulate(tasks, adjusted(tasks, schedule, rules))
    return found if rules.budget is None or found.peak <= rules.budget else None


def with_own_block(tasks: Tasks, reads: Collection[int]) -> Tasks:
    """Put the parameters of ``reads`` into a unit of their own."""
    new = 1 + max((task.block_number for task in tasks.all_collectives), default=0)

    return with_each(tasks, lambda task: replace(task, block_number=new) if task.read in reads else task)


def with_each(tasks: Tasks, change: Callable[[CollectiveTask], CollectiveTask], kinds: Iterable[Kind] = Kind) -> Tasks:
    """Change each collective of the given kinds."""
    return tasks.with_collectives({kind: tuple(map(change, tasks.collectives(kind))) for kind in kinds})


def with_batch(tasks: Tasks, factor: float) -> Tasks:
    """Make the batch ``factor`` times as large: so are the seconds of compute and the bytes of activations.

    The bytes of the model's own collectives grow as activations do. The host launches the same kernels.
    """
    return replace(
        tasks,
        segments=tuple(
            replace(segment, seconds=factor * segment.seconds, bytes=round(factor * segment.bytes))
            for segment in tasks.segments
        ),
        model_collectives=tuple(replace(of, bytes=round(factor * of.bytes)) for of in tasks.model_collectives),
    )


def with_smaller_reductions(tasks: Tasks, share: float) -> Tasks:
    """Send ``share`` of each gradient's bytes; each gradient is cast before it is sent."""

    def smaller(task: CollectiveTask) -> CollectiveTask:
        size = task.size
        size = replace(size, sent=round(share * size.sent), gap=round(share * size.gap), copied=True)
        return replace(task, size=size)

    return with_each(tasks, smaller, [Kind.REDUCE])


def without_codecs(tasks: Tasks, *, kind: Kind) -> Tasks:
    """Send the tensors of gathers, or of reductions, without encoding."""

    def exact(task: CollectiveTask) -> CollectiveTask:
        return replace(task, size=replace(task.size, sent=task.size.full, decoded=0)) if task.size.decoded else task

    return with_each(tasks, exact, [kind])


def without_gathers(tasks: Tasks, schedule: Schedule, kept: Collection[int]) -> Schedule:
    """Remove the gathers of the reads ``kept`` from a schedule of ``tasks``.

    The result is a schedule of the tasks that ``tasks_with_kept`` makes for backward.
    """
    left = [i for i, task in enumerate(tasks.gathers) if task.read not in kept]
    number = {old: new for new, old in enumerate(left)}
    out = []
    for launch in schedule:
        if launch.kind.supplies:
            launch = replace(launch, indices=tuple(number[i] for i in launch.indices if i in number))
        if launch.indices:
            out.append(launch)
    return tuple(out)


def joined(parts: Sequence[Tasks]) -> Tasks:
    """Join graphs that run one after the other into one graph.

    Reads and blocks of different parts stay different. Tensors that live to the end of a part (gradients, parameters
    kept for backward) live to the end of the whole.
    """
    end = sum(part.end for part in parts)
    segments: list[ComputeSegment] = []
    collectives: dict[Kind, list[CollectiveTask]] = {kind: [] for kind in Kind}
    own: list[ModelCollective] = []
    reads = blocks = 0
    channels = {key: channel for part in reversed(parts) for key, channel in part.channels.items()}
    for part in parts:
        offset = len(segments)

        def moved(
            task: CollectiveTask, part: Tasks = part, at: tuple[int, int, int] = (offset, reads, blocks)
        ) -> CollectiveTask:
            return replace(
                task,
                read=task.read + at[1],
                block_number=task.block_number + at[2],
                first=task.first + at[0],
                last=end if task.last == part.end else task.last + at[0],
                prefetch_blocks=(),
            )

        segments += [
            replace(segment, milestones=(f"{number + offset}",)) for number, segment in enumerate(part.segments[:-1])
        ]
        for kind in Kind:
            collectives[kind] += map(moved, part.collectives(kind))
        own += [replace(of, at=of.at + offset, wait=of.wait + offset) for of in part.model_collectives]
        reads += 1 + max((task.read for task in part.all_collectives), default=-1)
        blocks += 1 + max((task.block_number for task in part.all_collectives), default=-1)
    segments.append(replace(parts[-1].segments[-1], milestones=("end",)))
    for kind in Kind:
        collectives[kind].sort(key=lambda task: task.first)
    whole = replace(
        parts[0],
        segments=tuple(segments),
        channels=channels,
        model_collectives=tuple(own),
        host_seconds=sum(part.host_seconds for part in parts),
        persistent=max(part.persistent for part in parts),
        largest_block_bytes=max(part.largest_block_bytes for part in parts),
    )
    return whole.with_collectives(collectives)


def seconds_between_graphs(tasks: Tasks, simulation: Simulation, crossing: Collection[int]) -> float:
    """Return a graph's seconds if some of its collectives overlap with the graphs before and after it.

    Compute in those graphs is assumed to take as long as in this one.

    Args:
        crossing: the numbers of those collectives' launches.
    """
    timings = [simulation.timings[i] for i in crossing]
    beside = tasks.seconds_before[-1]
    exposed = sum(max(0.0, timing.end - timing.start - beside) for timing in timings)
    return simulation.seconds - sum(timing.exposed for timing in timings) + exposed


def edges_of(simulation: Simulation) -> list[int]:
    """Return the numbers of the launches that cross a fragment's edges: the first gather and the last reduction."""
    launches = [timing.launch for timing in simulation.timings]
    gathers = [i for i, launch in enumerate(launches) if launch.kind.supplies]
    reductions = [i for i, launch in enumerate(launches) if not launch.kind.supplies]
    return list(itertools.chain(gathers[:1], reductions[-1:]))
