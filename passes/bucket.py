"""Bucket: one collective for the gathers, and one for the reductions, of each unit or repeated block.

    unshard(shard_0), unshard(shard_1), ..   ->  launch_gather([shard_0, shard_1, ..]) -> wait_tensor -> unpack_gather, ..
    reduce_grad(grad_0), reduce_grad(grad_1) ->  launch_reduce([grad_0, grad_1, ..])   -> wait_tensor -> unpack_reduce, ..

Inside a bucket the order is registration order, which is FSDP2's. Reads of one shard in one graph are one gather.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.compat import stable_topological_sort
from compiled_fsdp.passes.graph import WAIT, add_call, argument, calls, ops, replace_by_input, take_full, value

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext


def bucket(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace ``unshard`` and ``reduce_grad`` by buckets. What needs no communication becomes the tensor itself."""
    take_full(gm)  # an inference graph has seen no other pass
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    reads, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    gathers = _grouped(_one_per_shard(_communicating(reads, ctx)), ctx)
    for members in gathers:
        _gather(gm.graph, members, order)
    reduces = _grouped([[node] for node in _communicating(reductions, ctx)], ctx)
    for members in reduces:
        _reduce(gm.graph, [node for (node,) in members], order)
    stable_topological_sort(gm.graph)  # a sum of two gradients of one bucket stood before the bucket's end
    gm.graph.lint()
    ctx.changed(
        "bucket",
        f"{len(reads)} reads in {len(gathers)} gathers, {len(reductions)} gradients in {len(reduces)} reductions",
    )
    return gm


def _communicating(nodes: list[Node], ctx: PassContext) -> list[Node]:
    remaining = []
    for node in nodes:
        if ctx.has_collective(argument(node, "world")):
            remaining.append(node)
            continue
        replace_by_input(node)
    return remaining


def _one_per_shard(reads: list[Node]) -> list[list[Node]]:
    by_shard: dict[Any, list[Node]] = {}
    for read in reads:
        by_shard.setdefault(argument(read, "shard"), []).append(read)
    return list(by_shard.values())


def _grouped(items: list[list[Node]], ctx: PassContext) -> list[list[list[Node]]]:
    """Items (nodes that stand for one tensor) by bucket, each bucket in registration order."""
    groups: dict[Any, list[list[Node]]] = defaultdict(list)
    for item in items:
        read = ctx.reads[argument(item[0], "read")]
        key = (read.bucket, read.mesh, read.dtype) if ctx.bucket == "module" else read.index
        groups[key].append(item)
    for members in groups.values():
        members.sort(key=lambda item: (ctx.reads[argument(item[0], "read")].position, argument(item[0], "read")))
    return list(groups.values())


def _gather(graph: Graph, members: list[list[Node]], order: dict[Node, int]) -> None:
    firsts = [item[0] for item in members]
    shards = [argument(node, "shard") for node in firsts]
    slot, world, mesh = (argument(firsts[0], name) for name in ("slot", "world", "mesh"))
    reads = [argument(node, "read") for node in firsts]
    # shards are inputs, so the launch may stand before any of the reads
    with graph.inserting_before(min((node for item in members for node in item), key=order.__getitem__)):
        launch = add_call(graph, ops.launch_gather.default, shards, slot, world, mesh, reads)
        wait = add_call(graph, WAIT, launch)
    offset = 0
    for item, shard in zip(members, shards, strict=True):
        with graph.inserting_before(min(item, key=order.__getitem__)):
            full = add_call(graph, ops.unpack_gather.default, wait, offset, argument(item[0], "size"), world)
        offset += value(shard).numel()
        for node in item:
            node.replace_all_uses_with(full)
            graph.erase_node(node)


def _reduce(graph: Graph, members: list[Node], order: dict[Node, int]) -> None:
    grads = [argument(node, "grad") for node in members]
    sizes = [argument(node, "shard_size") for node in members]
    numels = [math.prod(size) for size in sizes]
    slot, world, mesh = (argument(members[0], name) for name in ("slot", "world", "mesh"))
    reads = [argument(node, "read") for node in members]
    with graph.inserting_before(max(members, key=order.__getitem__).next):
        launch = add_call(graph, ops.launch_reduce.default, grads, slot, numels, world, mesh, reads)
        wait = add_call(graph, WAIT, launch)
        offset = 0
        for node, size, numel in zip(members, sizes, numels, strict=True):
            node.replace_all_uses_with(add_call(graph, ops.unpack_reduce.default, wait, offset, size))
            offset += numel
    for node in members:
        graph.erase_node(node)
