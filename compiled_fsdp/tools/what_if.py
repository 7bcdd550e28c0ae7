"""A graph's tasks with one change each, so that advice can plan the graph again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.channel import channel_of
from compiled_fsdp.passes.context import Groups, PassContext
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.channels import ModelCollective
from compiled_fsdp.passes.plan.choose import PlanRules, adjusted, choose
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.plan.simulate import Simulation, simulate
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Schedule, Tasks

ALIGNMENT = 16
"""If a shard has a multiple of so many elements, compiled_fsdp's kernels leave no gap behind it."""


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


def nodes_of(tasks: Tasks, reads: Sequence[Read]) -> int:
    """The number of nodes that the ranks of a step's shards are on, by the hops of its gathers that leave a node.

    It is 1 if nothing is gathered, or if the parameters are on several meshes.
    """
    if not tasks.gathers or len({(read.group_id, read.world) for read in reads}) > 1:
        return 1
    inside, between = tasks.channels[tasks.gathers[0].channel].sent
    return round(reads[0].world * between / (inside + between)) if between else 1


def with_shards_in_nodes(tasks: Tasks, *, reads: Sequence[Read], nodes: int, hardware: Hardware) -> Tasks | None:
    """Shard all parameters inside a node and replicate them over the nodes (HSDP), instead of over all ranks.

    The result is exact, or None. For example, it is None if a parameter is padded, because other shards would have
    another padding, or if the model has collectives of its own, because they could share other links.

    Args:
        tasks: a graph whose parameters are sharded over all ranks of ``nodes`` nodes.
        reads: its parameters.
        nodes: the number of nodes.
        hardware: the hardware that it was planned for.
    """
    world = reads[0].world
    node = world // nodes
    alike = all(
        read.size[read.dim] % world == 0
        and read.elements // world % ALIGNMENT == 0
        and read.replicas == 1
        and not (read.codec or read.piece or read.backward_group or read.in_host_memory or read.already_unsharded)
        and read.reduce_spec == ReduceSpec(read.reduce_spec.dtype)
        for read in reads
    )
    usual = not tasks.model_collectives and all(channel.transport == "" for channel in tasks.channels.values())
    if not alike or not usual or node < 2 or world % nodes:
        return None
    group_id = reads[0].group_id
    apart = any(channel.stream < 0 for channel in tasks.channels.values())
    groups = Groups("gather", "reduce" if apart else "gather", "replicas", nodes=1, replicate_nodes=nodes)
    ctx = PassContext(tasks.phase, {}, {group_id: groups}, hardware=hardware)
    channels = {
        task.channel: channel_of(ctx, kind.supplies, node, group_id, 1 if kind.supplies else nodes)
        for kind in Kind
        for task in tasks.collectives(kind)
    }

    def larger(task: CollectiveTask) -> CollectiveTask:
        size = task.size
        size = replace(size, wider_shard=nodes * size.wider_shard, cast_shard=nodes * size.cast_shard)
        return replace(task, size=size)

    return replace(with_each(tasks, larger), channels=channels, persistent=nodes * tasks.persistent)


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
