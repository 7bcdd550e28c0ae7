"""The planner's view of a graph: compute runs with their costs and memory, gathers and reductions with their places.

What is computed in which order is the graph's; ``arrange`` has put reads at their first uses and reductions behind their
gradients. Memory is counted by storage: views, in-place results and the elements of tuples live in what they show.
"""

# Why: docs/design.md, note N17

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.compat import hint
from compiled_fsdp.passes.cost.compute import node_costs
from compiled_fsdp.passes.graph import SHARD, argument, calls, memory_of, ops, value
from compiled_fsdp.passes.memory import storage_bytes
from compiled_fsdp.passes.plan.tasks import Item, Link, Run, Tasks

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


@dataclass(frozen=True)
class Extracted:
    """``tasks`` of a graph; ``run_of`` tells the run of every node that computes."""

    tasks: Tasks
    run_of: Mapping[Node, int]


def extract(gm: GraphModule, ctx: PassContext) -> Extracted:
    """The tasks of a graph that ``arrange`` has put in order."""
    runs = _Runs(gm)
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    links: dict[str, Link] = {}
    items: dict[Node, Item] = {}
    last_use = _last_uses(gm, runs)
    for node in (*gathers, *reductions):
        gathered = node.target is ops.unshard.default
        read = ctx.reads[argument(node, "read")]
        mesh, world = argument(node, "mesh"), argument(node, "world")
        key = f"gather mesh {mesh} {read.dtype}" if gathered else f"reduce mesh {mesh} {argument(node, 'reduction')}"
        if key not in links:
            links[key] = link_of(ctx, gathered, world, mesh, 1 if gathered else read.replicas)
        first = runs.start[node]
        copied = False
        if gathered:
            last = max(last_use.get(node, first), first)
        else:
            users = [runs.of[user] for user in node.users if user in runs.of]
            last = max(min(users, default=runs.end), first)
            grad = value(argument(node, "grad"))
            padded = hint(grad.shape[0]) % read.world != 0 if grad.dim() else False
            cast = str(grad.dtype).removeprefix("torch.") != read.how.dtype
            copied = padded or cast or read.dim > 0 or not grad.is_contiguous()
        size = read.bytes if gathered else read.reduced_bytes
        items[node] = Item(
            read.index, read.bucket, read.position, key, size, first, last, copied, read.ahead_in(ctx.phase)
        )
    live = _memory(gm, runs, ctx, set(gathers), set(reductions))
    costs = node_costs(gm, fused=ctx.fused)
    seconds = [0.0] * (runs.end + 1)
    for node, run in runs.of.items():
        seconds[run] += costs[node].seconds(ctx.hardware)
    names = [tuple(runs.names[i]) for i in range(runs.end + 1)]
    tasks = Tasks(
        phase=ctx.phase,
        runs=tuple(Run(names[i], seconds[i], live[i]) for i in range(runs.end + 1)),
        gathers=tuple(sorted((items[n] for n in gathers), key=lambda item: item.first)),
        reductions=tuple(sorted((items[n] for n in reductions), key=lambda item: item.first)),
        links=links,
        copy_seconds=2 / ctx.hardware.copy,
        kernel_seconds=ctx.hardware.kernel,
        contention=ctx.hardware.contention,
        persistent=persistent_bytes(ctx),
        unit_bytes=_largest_unit(ctx),
        kernels=ctx.kernels,
    )
    return Extracted(tasks, runs.of)


def link_of(ctx: PassContext, gathered: bool, world: int, mesh: int, replicas: int = 1) -> Link:
    """What collectives of a group cost; reductions as an all-to-all where that can be had and is quicker, and with what follows over
    replicas: an all-reduce of each shard, which is a reduction and a gather."""
    curve = ctx.hardware.curve("gather" if gathered else "reduce", world)
    received = 0.0
    if not gathered and ctx.may_exchange:
        exchange = ctx.hardware.curve("alltoall", world)
        if exchange.bytes_per_second > curve.bytes_per_second:
            curve, received = exchange, 1.0
    latency, rate = curve.latency, curve.bytes_per_second
    if replicas > 1:
        more = [ctx.hardware.curve(kind, replicas) for kind in ("reduce", "gather")]
        latency += sum(curve.latency for curve in more)
        rate = 1 / (1 / rate + sum(1 / curve.bytes_per_second for curve in more) / world)
    apart = not gathered and ctx.groups[mesh].reduces_apart
    return Link(latency, curve.each, rate, world, stream_of(mesh, apart), received)


def stream_of(mesh: int, apart: bool) -> int:
    """The number of a stream of collectives: the mesh's label, and below zero that of a group that only reduces."""
    return -1 - mesh if apart else mesh


def persistent_bytes(ctx: PassContext) -> int:
    """Shards of the region's parameters, and for the trained ones gradients and optimizer state; full gradients, where some wait for a
    backward that communicates; what is held elsewhere."""
    total = ctx.elsewhere
    seen = set()
    for read in ctx.reads.values():
        if read.name in seen:
            continue
        seen.add(read.name)
        elements = read.elements / read.world
        total += elements * (read.stored + (read.stored + ctx.optimizer_bytes if read.trainable else 0))
        if read.trainable and read.how.adds_accumulated:
            total += read.reduced_bytes
    return math.ceil(total)


def _largest_unit(ctx: PassContext) -> int:
    by_unit: dict[int, int] = {}
    for read in ctx.reads.values():
        by_unit[read.bucket] = by_unit.get(read.bucket, 0) + read.bytes
    return max(by_unit.values(), default=0)


class _Runs:
    """The graph cut at reads and reductions.

    Attributes:
        of: the run of each node that computes. start: the run that begins at each read or reduction.
        names: the milestones at which each run starts. end: the last, empty run.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.of: dict[Node, int] = {}
        self.start: dict[Node, int] = {}
        self.names: list[list[str]] = [["start"]]
        empty = True
        late = _late(gm)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.target in (ops.unshard.default, ops.reduce_grad.default):
                if not empty:
                    self.names.append([])
                    empty = True
                kind = "use" if node.target is ops.unshard.default else "grad"
                self.names[-1].append(f"{kind} {argument(node, 'read')}")
                self.start[node] = len(self.names) - 1
            elif node not in late:
                self.of[node] = len(self.names) - 1
                empty = False
        if not empty:
            self.names.append([])
        self.names[-1].append("end")
        self.end = len(self.names) - 1
        for node in late:
            self.of[node] = self.end


def _late(gm: GraphModule) -> set[Node]:
    """Nodes behind the last read, reduction and independent computation that depend on reductions: they run at the end."""
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


def _last_uses(gm: GraphModule, runs: _Runs) -> dict[Node, int]:
    """The run of the last use of each node's memory; of what the output holds, the end."""
    last: dict[Node, int] = {}
    for node in gm.graph.nodes:
        run = runs.end if node.op == "output" else runs.of.get(node, runs.start.get(node, 0))
        for i in node.all_input_nodes:
            last[memory_of(i)] = max(last.get(memory_of(i), 0), run)
    return last


def _memory(gm: GraphModule, runs: _Runs, ctx: PassContext, gathers: set[Node], reductions: set[Node]) -> list[int]:
    """The most bytes alive in each run, without shards, gathered parameters and gradients that wait for their reduction."""
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    owner = {node: memory_of(node) for node in nodes}
    shards = {owner[argument(node, "shard")] for node in gathers} | {node for node in nodes if node.meta.get(SHARD)}
    dies: dict[Node, int] = {}
    for node in nodes:
        for i in node.all_input_nodes:
            dies[owner[i]] = max(dies.get(owner[i], 0), place[node])
    backward = ctx.phase == "backward"
    freed: dict[int, int] = {}
    live = 0
    for node in nodes:
        if owner[node] is not node or node in gathers or node in reductions or node in shards or node.op == "output":
            continue
        size = storage_bytes(node)
        if node.op in ("placeholder", "get_attr"):
            live += size
            if node.op == "get_attr" or not backward:
                continue  # the caller holds it
        if node in dies:
            freed[dies[node]] = freed.get(dies[node], 0) + size
    out = [0] * (runs.end + 1)
    run = 0
    out[0] = live
    for node in nodes:
        run = runs.of.get(node, runs.start.get(node, run))
        if node.op == "output":
            out[runs.end] = max(out[runs.end], live)
            break
        if node not in gathers and node not in reductions:
            made = storage_bytes(node) if owner[node] is node and node.op == "call_function" else 0
            live += made
            out[run] = max(out[run], live)
            live -= made if node not in dies else 0
        live -= freed.get(place[node], 0)  # behind a reduction: its gradient, which now is the simulator's to count
    # an empty run holds what is alive between its neighbours
    for i in range(1, runs.end + 1):
        out[i] = out[i] or live
    return out
