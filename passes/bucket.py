"""Bucket: the plan's buckets in place of single reads and reductions.

    unshard(shard_0), unshard(shard_1), ..  -> launch_gather([shard_0, shard_1, ..]) -> wait_tensor -> unpack_gather, ..
    reduce_grad(grad_0), reduce_grad(grad_1) -> launch_reduce([grad_0, grad_1, ..]) -> wait_tensor -> unpack_reduce, ..

With replicas there is a ``launch_all_reduce`` and another wait after the first one.

A coalesced bucket has ``launch_gathers`` or ``launch_reduces``, and a wait for each tensor.

Where the graph is one of several of a forward, its first gather is taken from what is in flight already, its last one
starts the next graph's (``all_gather_prefetched``, ``all_gathers_prefetched``), and reductions that the plan waits for
at the end are left in flight (``reduce_scatter_deferred``). They are the same collectives as without that: whether a
rank defers is its own affair.
"""

# Why: docs/design.md, note N25; docs/design.md, note N28

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.collectives import offsets
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import COALESCED, FLAT
from compiled_fsdp.buckets.transport import WAIT, wire_dtype
from compiled_fsdp.compat import stable_topological_sort
from compiled_fsdp.passes.copy_kernels import by_kernel
from compiled_fsdp.passes.graph import add_call, argument, calls, is_given, memory_of, ops, prims, value
from compiled_fsdp.passes.op_schema import schema_of
from compiled_fsdp.passes.plan import Bucket
from compiled_fsdp.passes.plan.tasks import CollectiveTask

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def bucket(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace ``unshard`` and ``reduce_grad`` by the plan's buckets."""
    if ctx.planned is None:  # switched off
        ctx.changed("bucket", "no plan")
        return gm
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    nodes, grads = _by_read(gathers), _by_read(reductions)
    # gathers of pieces (reshard_after_forward=8, all-gather extensions) stay inside: other graphs do not know them
    whole = [
        b.kind == "gather"
        and b.group_id == ctx.reads[b.reads[0]].group_id
        and not any(ctx.reads[read].piece for read in b.reads)
        for b in ctx.planned.plan.launches
    ]
    taken = [i for i, eligible in enumerate(whole) if eligible] if ctx.rules.is_fragment else []
    uses = {task.read: (n, task) for n, task in enumerate(ctx.planned.tasks.gathers)} if ctx.planned.tasks else {}
    agreed: list[AgreedBucket] = []
    for number, planned in enumerate(ctx.planned.plan.launches):
        edge = None
        if planned.kind == "gather":
            members = [nodes[read].popleft() for read in planned.reads]
            at_an_edge = number in (*taken[:1], *taken[-1:])
            edge = (number == taken[0], number == taken[-1], ctx.recheck_prefetched) if at_an_edge else None
            launch = _gather(gm, planned, members, edge, ctx)
        else:
            members = [grads[read].popleft() for read in planned.reads]
            at_the_end = ctx.planned.schedule[number].wait == ctx.planned.end
            if ctx.rules.is_fragment and ctx.phase == "backward" and at_the_end and _only_returned(members):
                launch = _defer_reduction(gm, planned, members)
            else:
                launch = _reduce(gm, planned, members, ctx)
        launch.meta["bucket"] = number
        agreed.append(
            AgreedBucket(
                kind=planned.kind,
                reads=planned.reads,
                uses=tuple(_until(uses, read) for read in planned.reads) if planned.kind == "gather" else (),
                coalesced=planned.form == COALESCED,
                all_to_all=planned.transport == "all_to_all",
                by_kernel=planned.form != COALESCED and _is_by_kernel(launch),
                edge=None if edge is None else edge[:2],
            )
        )
    ctx.agreed_buckets = tuple(agreed)
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    ctx.changed(
        "bucket", f"{len(gathers)} gathers and {len(reductions)} reductions in {len(ctx.planned.plan.launches)} buckets"
    )
    return gm


def _until(uses: Mapping[int, tuple[int, CollectiveTask]], read: int) -> tuple[int, int]:
    """A gather's number in the order of first use, and how many gathers are due before its last use."""
    number, task = uses[read]
    return number, sum(other.first <= task.last for _, other in uses.values())


def _is_by_kernel(launch: Node) -> bool:
    """Whether a Triton kernel packs the bucket."""
    names = schema_of(launch.target).arguments
    return "by_kernel" in names and bool(argument(launch, "by_kernel"))


def _by_read(nodes: list[Node]) -> dict[int, deque[Node]]:
    """Calls in the graph's order, which is ``schedule_of``'s."""
    out: dict[int, deque[Node]] = defaultdict(deque)
    for node in nodes:
        out[argument(node, "read")].append(node)
    return out


def _gather(
    gm: GraphModule, planned: Bucket, members: list[Node], edge: tuple[bool, bool, bool] | None, ctx: PassContext
) -> Node:
    graph = gm.graph
    shards = [argument(node, "shard") for node in members]
    slot, world, group_id, dtype, device, codec = (
        argument(members[0], name) for name in ("param_id", "world", "group_id", "dtype", "device", "codec")
    )
    coalesced = planned.form == COALESCED
    kernel = not codec and device is None and edge is None and by_kernel(ctx, shards, dtype)
    if coalesced:  # which is copied where it is cast alone
        kernel = kernel and sum(value(shard).dtype != dtype for shard in shards) > 1
    first = next(node for node in graph.nodes if not is_given(node))
    with graph.inserting_before(first):  # shards are inputs; schedule moves it to its place
        reads = list(planned.reads)
        if edge is not None:
            numbers = [argument(node, "param_id") for node in members]
            op = ops.all_gathers_prefetched.default if coalesced else ops.all_gather_prefetched.default
            encoded = [codec] if codec else []
            launch = add_call(graph, op, shards, numbers, world, group_id, dtype, reads, *edge, device, *encoded)
        else:
            op = ops.launch_gathers.default if coalesced else ops.launch_gather.default
            how = [False, codec] if codec else [True] * kernel
            launch = add_call(graph, op, shards, slot, world, group_id, dtype, reads, device, *how)
        waits = _waits(gm, launch, len(members)) if coalesced else [add_call(graph, WAIT, launch)] * len(members)
    places = offsets([0 if coalesced else value(shard).numel() for shard in shards], kernel, codec)
    received = [codec, dtype] if codec or wire_dtype(dtype) != dtype else []
    for node, place, wait in zip(members, places, waits, strict=False):
        with graph.inserting_before(node):
            size, dim = argument(node, "size"), argument(node, "dim")
            full = add_call(graph, ops.unpack_gather.default, wait, place, size, world, dim, *received)
        node.replace_all_uses_with(full)
        graph.erase_node(node)
    return launch


def _reduce(gm: GraphModule, planned: Bucket, members: list[Node], ctx: PassContext) -> Node:
    graph = gm.graph
    grads, numbers, numels, dims, world, group_id, spec = _of_reductions(members)
    coalesced, use_all_to_all = planned.form == COALESCED, planned.transport == "all_to_all"
    parsed = ReduceSpec.parse(spec)
    kernel = not parsed.adds_accumulated and not parsed.codec and by_kernel(ctx, grads, getattr(torch, parsed.dtype))
    if ctx.rules.is_fragment and not coalesced:  # where another rank may have deferred it, which packs without gaps
        kernel = False
    num_pieces, encoded = world if use_all_to_all else 1, parsed.codec
    with graph.inserting_before(max(members).next):  # nodes compare by their places
        op = ops.launch_reduces.default if coalesced else ops.launch_reduce.default
        reads = list(planned.reads)
        common = world, group_id, spec, reads, use_all_to_all
        launch = add_call(graph, op, grads, numbers, numels, dims, *common, *[True] * kernel)
        waits = _waits(gm, launch, len(members)) if coalesced else [add_call(graph, WAIT, launch)]
        if ctx.has_replicas(group_id) and parsed.sync is GradSync.ALL:
            shares = [([n], [m]) for n, m in zip(numbers, numels, strict=True)] if coalesced else [(numbers, numels)]
            all_reduce = ops.launch_all_reduce.default
            waits = [
                add_call(graph, WAIT, add_call(graph, all_reduce, wait, *share, group_id, spec, num_pieces))
                for wait, share in zip(waits, shares, strict=True)
            ]
            num_pieces, encoded = 1, ""
        places = offsets([0 if coalesced else numel for numel in numels], kernel, encoded)
        for i, (node, place) in enumerate(zip(members, places, strict=False)):
            size, dtype = argument(node, "shard_size"), argument(node, "dtype")
            wait = waits[i if coalesced else 0]
            unpacked = add_call(graph, ops.unpack_reduce.default, wait, place, size, dtype, spec, num_pieces, group_id)
            node.replace_all_uses_with(unpacked)
    for node in members:
        graph.erase_node(node)
    return launch


def _of_reductions(members: list[Node]) -> tuple[Any, ...]:
    """Gradients, slots, numbers of elements and dimensions of several reductions, and what they have in common."""
    grads, numbers, dims = ([argument(node, name) for node in members] for name in ("grad", "param_id", "dim"))
    numels = [math.prod(argument(node, "shard_size")) for node in members]
    return grads, numbers, numels, dims, *(argument(members[0], name) for name in ("world", "group_id", "spec_text"))


def _only_returned(members: list[Node]) -> bool:
    """Whether the reduced gradients are the graph's results and nothing else."""
    return all(user.op == "output" for node in members for user in node.users)


def _is_used_once(grad: Node) -> bool:
    """Whether nothing but one call sees a gradient's memory, which this graph has made."""
    memory, seen = memory_of(grad), grad
    while seen is not memory and len(seen.users) == 1 and isinstance(seen.args[0], Node):
        seen = seen.args[0]  # what it is a view of
    return seen is memory and len(seen.users) == 1 and seen.op == "call_function"


def _defer_reduction(gm: GraphModule, planned: Bucket, members: list[Node]) -> Node:
    """Launch, and return zeros in place of the reduced gradients, which gates find elsewhere."""
    graph = gm.graph
    grads, numbers, numels, _, world, group_id, spec = _of_reductions(members)
    with graph.inserting_before(max(members).next):  # nodes compare by their places
        use_all_to_all, dtype = planned.transport == "all_to_all", argument(members[0], "dtype")
        coalesced, clone = planned.form == COALESCED, torch.ops.aten.clone.default
        if planned.form != FLAT:  # sent as it is, perhaps, and something else may write to its memory meanwhile
            grads = [grad if _is_used_once(grad) else add_call(graph, clone, grad) for grad in grads]
        common = world, group_id, dtype, spec, list(planned.reads), use_all_to_all, *[True] * coalesced
        launch = add_call(graph, ops.reduce_scatter_deferred.default, grads, numbers, numels, *common)
        for node in members:
            size, own = argument(node, "shard_size"), argument(node, "dtype")
            zero = launch if own == dtype else add_call(graph, prims.convert_element_type.default, launch, own)
            node.replace_all_uses_with(add_call(graph, torch.ops.aten.expand.default, zero, size))
    for node in members:
        graph.erase_node(node)
    return launch


def _waits(gm: GraphModule, launch: Node, count: int) -> list[Node]:
    elements = [add_call(gm.graph, operator.getitem, launch, i) for i in range(count)]
    return [add_call(gm.graph, WAIT, element) for element in elements]
