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
from compiled_fsdp.passes.channel import channel_of
from compiled_fsdp.passes.cost.compute import Cost, library_kernels, node_costs
from compiled_fsdp.passes.cost.fusion import mark_memory
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.graph import (
    ENCODES,
    IS_SHARD,
    argument,
    calls,
    is_getitem,
    is_given,
    is_wait,
    kind_of,
    ops,
    value,
    waited_for,
)
from compiled_fsdp.passes.memory import Lifetimes, storage_bytes, tensor_bytes
from compiled_fsdp.passes.model_collectives import ModelLinks, seconds_of_compute
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.passes.views import is_view

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def extract(gm: GraphModule, ctx: PassContext) -> tuple[Tasks, Mapping[Node, int]]:
    """Return the tasks of a graph that ``arrange`` has put in order, and the segment of every node that computes.

    Sets ``ctx.library_kernels``.
    """
    segments = _Segments(gm)
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    channels: dict[str, CommChannel] = {}
    links: dict[int, str] = {}
    tasks_by_node: dict[Node, CollectiveTask] = {}
    if ctx.fused:
        mark_memory(gm)
    nodes, memory = list(gm.graph.nodes), Lifetimes(gm, _held_by_waits, backward=ctx.phase == "backward")
    for node in (*gathers, *reductions):
        gathered = node.target is ops.unshard.default
        read = ctx.reads[argument(node, "read")]
        group_id, world = argument(node, "group_id"), argument(node, "world")
        detail = read.dtype if gathered else argument(node, "reduce")
        codec = argument(node, "codec") if gathered else read.reduce_spec.codec
        detail += f" {codec}" * (gathered and bool(codec))
        key = f"{'gather' if gathered else 'reduce'} mesh {group_id} {detail}"
        if key not in channels:
            replicas = 1 if gathered else read.replicas
            channels[key] = channel_of(ctx, gathered, world, group_id, replicas, encodes=bool(codec))
            links[channels[key].stream] = ctx.hardware.link(world, ctx.groups[group_id].nodes)
        first = segments.start[node]
        if gathered:
            last = max(segments.at(nodes[memory.dies[node]]) if node in memory.dies else first, first)
            copied = not codec and value(argument(node, "shard")).dtype != argument(node, "dtype")
        else:
            users = [segments.of[user] for user in node.users if user in segments.of]
            last = max(min(users, default=segments.end), first)
            grad = value(argument(node, "grad"))
            padded = hint(grad.shape[0]) % read.world != 0 if grad.dim() else False
            cast = str(grad.dtype).removeprefix("torch.") != read.reduce_spec.dtype
            if codec:  # encoding casts by itself; sums and divisions before it are copies
                cast = read.reduce_spec.adds_accumulated or read.reduce_spec.before != 1
            copied = padded or cast or read.dim > 0 or not grad.is_contiguous()
        size = read.bytes if gathered else read.reduced_bytes
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
                wider_shard=0 if gathered else max(0, tensor_bytes(value(node)) - size // world),
                cast_shard=0 if gathered else _cast_bytes(node, read.reduce_spec.dtype, size // world),
                copied=copied,
                unpacked=gathered and read.dim > 0 and read.world > 1 and not codec,
            ),
            first=first,
            last=last,
            prefetch_blocks=read.prefetch_blocks_in(ctx.phase),
        )
    models = ModelLinks(ctx, links)
    model_collectives = tuple(models.priced(node, *places) for node, places in segments.model_places().items())
    live = _memory(gm, segments, ctx, memory)
    costs = node_costs(gm, fused=ctx.fused)
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
    memory; full gradients that are pending until a backward that reduces them; the residuals that codecs with error
    feedback keep; and the bytes outside of the graph.
    """
    total = ctx.bytes_outside_graph
    seen = set()
    for read in ctx.reads.values():
        if read.piece or read.name in seen:
            continue
        seen.add(read.name)
        elements = 0 if read.in_host_memory else read.elements / read.world
        of_training = read.grad_itemsize + ctx.optimizer_bytes_per_element if read.trainable else 0
        total += elements * (read.shard_itemsize + of_training)
        if read.trainable and read.reduce_spec.adds_accumulated:
            total += read.reduced_bytes
        if read.trainable and read.reduce_spec.error_feedback:
            total += read.elements * RESIDUAL_ITEMSIZE
    return math.ceil(total)


def _largest_block(ctx: PassContext) -> int:
    """Bytes of the full parameters of the largest unit or repeated block."""
    by_block: dict[int, int] = {}
    for read in ctx.reads.values():
        by_block[read.block_number] = by_block.get(read.block_number, 0) + read.bytes
    return max(by_block.values(), default=0)


class _Segments:
    """The graph, cut into segments at reads, reductions, and the launches and waits of the model's own collectives."""

    def __init__(self, gm: GraphModule) -> None:
        # The segment of each node that computes.
        self.of: dict[Node, int] = {}
        # The segment that begins at each read or reduction.
        self.start: dict[Node, int] = {}
        # The milestones at which each segment starts.
        self.milestones: list[list[str]] = [["start"]]
        # For the model's own collectives, in order: the segments that begin with the launch and with the first wait.
        self._launched: dict[Node, int] = {}
        self._waited: dict[Node, int] = {}
        # State of the segment that is being filled: whether it is empty, whether it computes, and whether it begins
        # with waits for the model's own collectives.
        empty, computes, waits = True, False, False
        late = _late(gm)
        for node in gm.graph.nodes:
            if is_given(node) or node.op == "output":
                continue
            if ENCODES in node.meta:  # runs before all launches, even if a hook has collectives of its own
                self.of[node] = 0
                continue
            if node.target in (ops.unshard.default, ops.reduce_grad.default):
                if not empty:
                    self.milestones.append([])
                    empty, computes, waits = True, False, False
                kind = "use" if node.target is ops.unshard.default else "grad"
                self.milestones[-1].append(f"{kind} {argument(node, 'read')}")
                self.start[node] = len(self.milestones) - 1
            elif node not in late:
                launched = kind_of(node) is not None
                waited = [launch for launch in waited_for(node) if launch not in self._waited]
                if (launched and (computes or waits)) or (waited and computes):
                    self.milestones.append([])
                    computes = waits = False
                self._note(node, waited, len(self.milestones) - 1)
                self.of[node] = len(self.milestones) - 1
                empty, waits = False, waits or bool(waited)
                computes = computes or not (launched or is_wait(node) or is_getitem(node) or is_view(node))
        if not empty:
            self.milestones.append([])
        self.milestones[-1].append("end")
        # The last, empty segment.
        self.end = len(self.milestones) - 1
        for node in (node for node in gm.graph.nodes if node in late):
            self.of[node] = self.end
            self._note(node, waited_for(node), self.end)

    def at(self, node: Node) -> int:
        """The segment in which a node reads its arguments; the last one for the graph's output."""
        return self.end if node.op == "output" else self.of.get(node, self.start.get(node, 0))

    def _note(self, node: Node, waited: Iterable[Node], segment: int) -> None:
        """Note that a segment begins with ``node``, if it launches or waits for the model's own collectives."""
        kind = kind_of(node)
        if kind is not None:
            self.milestones[segment].append(f"{kind} {len(self._launched)}")
            self._launched[node] = segment
        for launch in waited:
            self.milestones[segment].append(f"wait {list(self._launched).index(launch)}")
            self._waited.setdefault(launch, segment)

    def model_places(self) -> dict[Node, tuple[int, int]]:
        """The segments of launch and wait of each of the model's own collectives; without a wait it is the end."""
        return {node: (at, self._waited.get(node, self.end)) for node, at in self._launched.items()}


def _late(gm: GraphModule) -> set[Node]:
    """The nodes that depend on reductions and come after all other compute: they run at the end of the graph."""
    late: set[Node] = set()
    depends: set[Node] = set()
    for node in gm.graph.nodes:
        if node.target is ops.reduce_grad.default or any(i in depends for i in node.all_input_nodes):
            depends.add(node)
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node.target is ops.reduce_grad.default:
            continue
        if node.op != "call_function" or node not in depends:
            break
        late.add(node)
    return late


def _held_by_waits(node: Node) -> list[Node]:
    """The inputs of the model's own collectives that a node waits for: they live until then."""
    return [i for launch in waited_for(node) for i in launch.all_input_nodes]


def _memory(gm: GraphModule, segments: _Segments, ctx: PassContext, memory: Lifetimes) -> list[int]:
    """The most bytes alive in each segment, without shards, gathered parameters, and complete gradients."""
    nodes = list(gm.graph.nodes)
    gathers, reductions = set(calls(gm, ops.unshard.default)), set(calls(gm, ops.reduce_grad.default))
    shards = {memory.owner[argument(node, "shard")] for node in gathers}
    shards |= {node for node in nodes if IS_SHARD in node.meta}
    backward = ctx.phase == "backward"
    freed: dict[int, int] = {}
    live = 0
    for node in nodes:
        if not memory.is_stored(node) or node in gathers or node in reductions or node in shards or node.op == "output":
            continue
        size = storage_bytes(node)
        if node.op in ("placeholder", "get_attr"):
            live += size
            if node.op == "get_attr" or not backward:
                continue  # the caller holds it
        if node in memory.dies:
            freed[memory.dies[node]] = freed.get(memory.dies[node], 0) + size
    out = [0] * (segments.end + 1)
    segment = 0
    out[0] = live
    for place, node in enumerate(nodes):
        segment = segments.of.get(node, segments.start.get(node, segment))
        if node.op == "output":
            out[segments.end] = max(out[segments.end], live)
            break
        if node not in gathers and node not in reductions:
            made = storage_bytes(node) if node.op == "call_function" and memory.is_stored(node) else 0
            live += made
            out[segment] = max(out[segment], live - memory.overlap(node))
            live -= made if node not in memory.dies else 0
        live -= freed.get(place, 0)  # at a reduction its gradient: from there on the simulator counts it
    # an empty segment holds the bytes that are alive between its neighbours
    for i in range(1, segments.end + 1):
        out[i] = out[i] or live
    return out
