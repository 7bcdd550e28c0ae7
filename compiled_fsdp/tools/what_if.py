"""The same graph under other circumstances, as tasks that can be planned again: what advice is tried with."""

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
    """The plan of ``tasks`` as a compile would make it, simulated; None where none fits into the budget."""
    try:
        schedule, _ = choose(tasks, rules)
    except OverBudget:
        return None
    found = simulate(tasks, adjusted(tasks, schedule, rules))
    return found if rules.budget is None or found.peak <= rules.budget else None


def with_own_block(tasks: Tasks, reads: Collection[int]) -> Tasks:
    """The parameters ``reads`` in a unit of their own."""
    new = 1 + max((task.block_number for task in tasks.all_collectives), default=0)

    return with_each(tasks, lambda task: replace(task, block_number=new) if task.read in reads else task)


def with_each(tasks: Tasks, change: Callable[[CollectiveTask], CollectiveTask], kinds: Iterable[Kind] = Kind) -> Tasks:
    """The tasks with each collective of some kinds changed."""
    return tasks.with_collectives({kind: tuple(map(change, tasks.collectives(kind))) for kind in kinds})


def with_batch(tasks: Tasks, factor: float) -> Tasks:
    """A batch ``factor`` times as large: so much longer compute, and so many times the activations.

    What the model itself communicates grows as activations do. The host launches the same kernels.
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
    """Gradients of ``share`` of the bytes on the wires, each cast for it."""

    def smaller(task: CollectiveTask) -> CollectiveTask:
        size = task.size
        size = replace(size, sent=round(share * size.sent), gap=round(share * size.gap), copied=True)
        return replace(task, size=size)

    return with_each(tasks, smaller, [Kind.REDUCE])


def without_codecs(tasks: Tasks, *, kind: Kind) -> Tasks:
    """The gathers, or the reductions, as they would be if tensors were sent as they are."""

    def exact(task: CollectiveTask) -> CollectiveTask:
        return replace(task, size=replace(task.size, sent=task.size.full, decoded=0)) if task.size.decoded else task

    return with_each(tasks, exact, [kind])


def without_gathers(tasks: Tasks, schedule: Schedule, kept: Collection[int]) -> Schedule:
    """A schedule of ``tasks`` for those where the reads ``kept`` are not gathered (``tasks_with_kept``)."""
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
    """Graphs that run one after the other as one graph.

    Reads and blocks of different parts are different. What lives to the end of a part (gradients, parameters kept for
    backward) lives to the end of all.
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
    """Seconds of a graph whose collectives ``crossing`` (numbers of launches) overlap with the graphs beside it.

    Compute there is taken to be as long as here.
    """
    timings = [simulation.timings[i] for i in crossing]
    beside = tasks.seconds_before[-1]
    exposed = sum(max(0.0, timing.end - timing.start - beside) for timing in timings)
    return simulation.seconds - sum(timing.exposed for timing in timings) + exposed


def edges_of(simulation: Simulation) -> list[int]:
    """The launches that cross a graph's edges, if it is one of several: the first gather and the last reduction."""
    launches = [timing.launch for timing in simulation.timings]
    gathers = [i for i, launch in enumerate(launches) if launch.kind.supplies]
    reductions = [i for i, launch in enumerate(launches) if not launch.kind.supplies]
    return list(itertools.chain(gathers[:1], reductions[-1:]))
