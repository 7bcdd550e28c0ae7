"""Bucket: the plan's buckets in place of single reads and reductions.

    unshard(shard_0), unshard(shard_1), ..   ->  launch_gather([shard_0, shard_1, ..]) -> wait_tensor -> unpack_gather, ..
    reduce_grad(grad_0), reduce_grad(grad_1) ->  launch_reduce([grad_0, grad_1, ..])   -> wait_tensor -> unpack_reduce, ..

A coalesced bucket has ``launch_gathers`` or ``launch_reduces``, and a wait for each tensor.

Where the graph is one of several of a forward, its first gather is taken from what is in flight already, its last one starts
the next graph's (``take_gather``), and reductions that the plan waits for at the end are left in flight (``leave_reduce``).
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat import stable_topological_sort
from compiled_fsdp.passes.graph import WAIT, add_call, argument, calls, ops, value
from compiled_fsdp.passes.plan import Bucket
from compiled_fsdp.passes.plan.tasks import COALESCED

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext


def bucket(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace ``unshard`` and ``reduce_grad`` by the plan's buckets."""
    if ctx.plan is None:  # switched off
        ctx.changed("bucket", "no plan")
        return gm
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    nodes, grads = _by_read(gathers), _by_read(reductions)
    taken = [i for i, planned in enumerate(ctx.plan.launches) if planned.kind == "gather"] if ctx.part else []
    for number, planned in enumerate(ctx.plan.launches):
        if planned.kind == "gather":
            members = [nodes[read].popleft() for read in planned.reads]
            edge = (
                (number == taken[0], number == taken[-1], ctx.recheck) if number in (*taken[:1], *taken[-1:]) else None
            )
            launch = _gather(gm, planned, members, edge)
        else:
            members = [grads[read].popleft() for read in planned.reads]
            leave = ctx.part and ctx.phase == "backward" and ctx.schedule[number].wait == ctx.end
            launch = _leave(gm, planned, members) if leave and _ends(members) else _reduce(gm, planned, members)
        launch.meta["bucket"] = number
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    ctx.changed(
        "bucket", f"{len(gathers)} gathers and {len(reductions)} reductions in {len(ctx.plan.launches)} buckets"
    )
    return gm


def _by_read(nodes: list[Node]) -> dict[int, deque[Node]]:
    """Calls in the graph's order, which is ``schedule_of``'s."""
    out: dict[int, deque[Node]] = defaultdict(deque)
    for node in nodes:
        out[argument(node, "read")].append(node)
    return out


def _gather(gm: GraphModule, planned: Bucket, members: list[Node], edge: tuple[bool, bool, bool] | None) -> Node:
    graph = gm.graph
    shards = [argument(node, "shard") for node in members]
    slot, world, mesh = (argument(members[0], name) for name in ("slot", "world", "mesh"))
    coalesced = planned.form == COALESCED and edge is None
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):  # shards are inputs; schedule moves it to its place
        if edge is not None:
            numbers = [argument(node, "slot") for node in members]
            launch = add_call(graph, ops.take_gather.default, shards, numbers, world, mesh, list(planned.reads), *edge)
        else:
            op = ops.launch_gathers.default if coalesced else ops.launch_gather.default
            launch = add_call(graph, op, shards, slot, world, mesh, list(planned.reads))
        waits = _waits(gm, launch, len(members)) if coalesced else [add_call(graph, WAIT, launch)] * len(members)
    offset = 0
    for node, shard, wait in zip(members, shards, waits, strict=True):
        with graph.inserting_before(node):
            full = add_call(graph, ops.unpack_gather.default, wait, offset, argument(node, "size"), world)
        offset += 0 if coalesced else value(shard).numel()
        node.replace_all_uses_with(full)
        graph.erase_node(node)
    return launch


def _reduce(gm: GraphModule, planned: Bucket, members: list[Node]) -> Node:
    graph = gm.graph
    grads = [argument(node, "grad") for node in members]
    sizes = [argument(node, "shard_size") for node in members]
    numels = [math.prod(size) for size in sizes]
    slot, world, mesh = (argument(members[0], name) for name in ("slot", "world", "mesh"))
    coalesced, exchange = planned.form == COALESCED, planned.via == "all_to_all"
    parts = (world, mesh) if exchange else ()
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_before(max(members, key=order.__getitem__).next):
        op = ops.launch_reduces.default if coalesced else ops.launch_reduce.default
        launch = add_call(graph, op, grads, slot, numels, world, mesh, list(planned.reads), exchange)
        waits = _waits(gm, launch, len(members)) if coalesced else [add_call(graph, WAIT, launch)] * len(members)
        offset = 0
        for node, size, numel, wait in zip(members, sizes, numels, waits, strict=True):
            unpacked = add_call(graph, ops.unpack_reduce.default, wait, offset, size, *parts)
            node.replace_all_uses_with(unpacked)
            offset += 0 if coalesced else numel
    for node in members:
        graph.erase_node(node)
    return launch


def _ends(members: list[Node]) -> bool:
    """Whether the reduced gradients are the graph's results and nothing else."""
    return all(user.op == "output" for node in members for user in node.users)


def _leave(gm: GraphModule, planned: Bucket, members: list[Node]) -> Node:
    """Launch, and return zeros in place of the reduced gradients, which gates find elsewhere."""
    graph = gm.graph
    grads = [argument(node, "grad") for node in members]
    sizes = [argument(node, "shard_size") for node in members]
    numbers, numels = [argument(node, "slot") for node in members], [math.prod(size) for size in sizes]
    world, mesh = argument(members[0], "world"), argument(members[0], "mesh")
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_before(max(members, key=order.__getitem__).next):
        exchange = planned.via == "all_to_all"
        launch = add_call(
            graph, ops.leave_reduce.default, grads, numbers, numels, world, mesh, list(planned.reads), exchange
        )
        for node, size in zip(members, sizes, strict=True):
            node.replace_all_uses_with(add_call(graph, torch.ops.aten.expand.default, launch, size))
    for node in members:
        graph.erase_node(node)
    return launch


def _waits(gm: GraphModule, launch: Node, count: int) -> list[Node]:
    pieces = [add_call(gm.graph, operator.getitem, launch, i) for i in range(count)]
    return [add_call(gm.graph, WAIT, piece) for piece in pieces]
