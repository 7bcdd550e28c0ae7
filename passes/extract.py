"""The planner's view of a graph: compute segments with costs and memory, gathers and reductions with their places.

The order of compute is that of the graph, in which ``arrange`` has put reads at their first uses and reductions after
their gradients. Memory is counted by storage: views, in-place results and elements of tuples own no memory.
"""

# Why: docs/design/planner.md, "A plan is data with milestones"

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.codec import RESIDUAL_ITEMSIZE
from compiled_fsdp.buckets.kernels.layout import aligned
from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.compat.graphs import hint
from compiled_fsdp.passes.alive import Alive
from compiled_fsdp.passes.channel import channel_of, link_of
from compiled_fsdp.passes.cost.compute import Cost, library_kernels, node_costs
from compiled_fsdp.passes.cost.fusion import mark_memory
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.graph import argument, calls, ops, value
from compiled_fsdp.passes.memory import tensor_bytes
from compiled_fsdp.passes.model_collectives import ModelLinks, seconds_of_compute
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.passes.segments import Segments

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def extract(gm: GraphModule, ctx: PassContext) -> tuple[Tasks, Mapping[Node, int]]:
    """Return the tasks of a graph that ``arrange`` has put in order, and the segment of every node that computes.

    Sets ``ctx.library_kernels``.
    """
    segments = Segments(gm)
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    channels: dict[str, CommChannel] = {}
    links: dict[int, str] = {}
    tasks_by_node: dict[Node, CollectiveTask] = {}
    fusion = mark_memory(gm) if ctx.fused else None
    alive = Alive(gm, segments, backward=ctx.phase == "backward")
    for node in (*gathers, *reductions):
        gathered = node.target is ops.unshard.default
        read = ctx.reads[argument(node, "read")]
        group_id, world = argument(node, "group_id"), argument(node, "world")
        detail = read.dtype if gathered else argument(node, "reduce")
        codec = argument(node, "codec") if gathered else read.reduce_spec.codec
        detail += f" {codec}" * (gathered and bool(codec))
        key = f"{'gather' if gathered else 'reduce'} mesh {group_id} {detail}"
        if key not in channels:
            replicas = 1 if gathered else read.reduces_again_over
            in_parts = read.reduces_within is not None
            channels[key] = channel_of(ctx, gathered, world, group_id, replicas, encodes=bool(codec), in_parts=in_parts)
            links[channels[key].stream] = link_of(ctx, world, group_id, replicas)
        first = segments.start[node]
        if gathered:
            last = max(alive.last_segment(node, first), first)
            copied = not codec and value(argument(node, "shard")).dtype != argument(node, "dtype")
        else:
            users = [segments.of[user] for user in node.users if user in segments.of]
            last = max(min(users, default=segments.end), first)
            grad = value(argument(node, "grad"))
            padded = hint(grad.shape[0]) % read.world != 0 if grad.dim() else False
            cast = not codec and str(grad.dtype).removeprefix("torch.") != read.reduce_spec.dtype  # encoding casts, too
            computed = read.reduce_spec.adds_accumulated or read.reduce_spec.before != 1
            copied = padded or cast or computed or argument(node, "dim") > 0 or not grad.is_contiguous()
        size = read.bytes if gathered else read.reduced_bytes
        shard = size // world // channels[key].parts
        tasks_by_node[node] = CollectiveTask(
            read=read.index,
            block_number=read.block_number,
            position=read.position,
            channel=key,
            size=TensorSize(
                sent=read.encoded_bytes(codec) if codec else size,
                decoded=size if codec else 0,
                gap=_gap_bytes(node, size, read.elements, world) if ctx.kernels and not codec else 0,
                host=_host_bytes(node) if gathered else 0,
                wider=0 if gathered else max(0, tensor_bytes(grad) - size),
                wider_shard=0 if gathered else max(0, tensor_bytes(value(node)) - shard),
                cast_shard=0 if gathered else _cast_bytes(node, read.reduce_spec.dtype, shard),
                copied=copied,
                unpacked=gathered and read.dim > 0 and read.world > 1 and not codec,
            ),
            first=first,
            last=last,
            prefetch_blocks=read.prefetch_blocks_in(ctx.phase),
        )
    models = ModelLinks(ctx, links)
    model_collectives = tuple(models.priced(node, *places) for node, places in segments.model_places().items())
    live = alive.most()
    costs = node_costs(gm, fused=ctx.fused, fusion=fusion)
    hardware = ctx.hardware
    of_model = [of for of in model_collectives if not of.is_copy]
    if channels and not of_model and all(channel.by_copies for channel in channels.values()):
        hardware = hardware.by_copies()
    ctx.library_kernels = library_kernels(costs, hardware)
    seconds, slowed = [0.0] * (segments.end + 1), [0.0] * (segments.end + 1)
    for node, segment in segments.of.items():
        took = costs[node].seconds(hardware) + seconds_of_compute(node, hardware)
        seconds[segment] += took
        slowed[segment] += took * costs[node].contention(hardware)
    contention = [more / took if took else 0.0 for took, more in zip(seconds, slowed, strict=True)]
    tasks = Tasks(
        phase=ctx.phase,
        segments=tuple(map(ComputeSegment, map(tuple, segments.milestones), seconds, live, contention)),
        gathers=tuple(sorted((tasks_by_node[n] for n in gathers), key=lambda task: task.first)),
        reductions=tuple(sorted((tasks_by_node[n] for n in reductions), key=lambda task: task.first)),
        channels=channels | models.channels,
        model_collectives=model_collectives,
        copy_seconds=2 / hardware.copy,
        kernel_seconds=hardware.kernel,
        host_copy_seconds=1 / hardware.host_copy,
        **_host_costs(costs.values(), len(model_collectives), hardware),
        copy_contention=hardware.contention.memory,
        collective_contention=hardware.contention.collective,
        persistent=persistent_bytes(ctx),
        largest_block_bytes=_largest_block(ctx),
        kernels=ctx.kernels,
    )
    return tasks, segments.of


def _host_bytes(gather: Node) -> int:
    """Bytes of a shard that is on another device than its gather (in host memory); else 0."""
    shard, device = value(argument(gather, "shard")), argument(gather, "device")
    if device is None or shard.device.type == device.type:
        return 0
    return tensor_bytes(shard)


def _host_costs(costs: Iterable[Cost], of_model: int, hardware: Hardware) -> dict[str, float]:
    """Costs of launches, by the names of fields of ``Tasks``.

    If the host computes, launches take compute time. Otherwise they take the host's time, as kernels' launches do.

    Args:
        of_model: the number of the model's own collectives, each of which takes as much of the host's time.
    """
    if hardware.host_computes:
        return {"launch_seconds": hardware.host_collective}
    kernels = sum(cost.kernels for cost in costs)
    seconds = kernels * hardware.host_kernel + of_model * hardware.host_collective
    return {"host_launch_seconds": hardware.host_collective, "host_seconds": seconds}


def _cast_bytes(reduction: Node, dtype: str, size: int) -> int:
    """Bytes of a reduced shard that exist twice while it is cast from ``dtype`` to the dtype of ``.grad``; else 0."""
    shard = value(reduction)
    return 0 if str(shard.dtype) == f"torch.{dtype}" else min(size, tensor_bytes(shard))


def _gap_bytes(node: Node, size: int, elements: int, world: int) -> int:
    """Bytes of the gaps that the Triton kernels leave behind each rank's shard of a tensor.

    They are counted in the wider dtype of the two that a gradient has, because a cast after unpacking includes gaps.

    Args:
        size: bytes of the full, padded tensor as it is gathered or reduced.
        elements: the number of its elements.
    """
    if not elements:
        return 0
    shard = -(-elements // world)
    return world * (aligned(shard) - shard) * max(size // elements, value(node).element_size())


def persistent_bytes(ctx: PassContext) -> int:
    """Bytes that are held during the whole graph.

    These are: shards of the region's parameters, and gradients and optimizer state of the trained ones, except in host
    memory; parts of full parameters that fewer ranks gather; gradients that are pending until a backward that reduces
    them over all ranks; the residuals that codecs with error feedback keep; and the bytes outside of the graph.
    """
    total = ctx.bytes_outside_graph
    seen = set()
    for read in sorted(ctx.reads.values(), key=lambda read: not read.trainable):  # a parameter may have two reads
        if read.backward_group is not None and (ctx.phase == "backward" or not read.trainable):
            total += read.bytes / read.backward_group[1]
        if read.piece or read.name in seen:
            continue
        seen.add(read.name)
        elements = 0 if read.in_host_memory else read.elements / read.world
        of_training = read.grad_itemsize + ctx.optimizer_bytes_per_element if read.trainable else 0
        total += elements * (read.shard_itemsize + of_training)
        total += read.pending_bytes
        if read.trainable and read.reduce_spec.error_feedback:
            total += read.elements * RESIDUAL_ITEMSIZE
    return math.ceil(total)


def _largest_block(ctx: PassContext) -> int:
    """Bytes of the full parameters of the largest unit or repeated block."""
    by_block: dict[int, int] = {}
    for read in ctx.reads.values():
        by_block[read.block_number] = by_block.get(read.block_number, 0) + read.bytes
    return max(by_block.values(), default=0)
