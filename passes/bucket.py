"""Bucket: replace single reads and reductions by the plan's buckets.

    unshard(shard_0), unshard(shard_1), ..   -> launch([shard_0, shard_1, ..]) -> wait_tensor -> unpack_gather, ..
    reduce_grad(grad_0), reduce_grad(grad_1) -> launch([grad_0, grad_1, ..]) -> wait_tensor -> unpack_reduce, ..

With replicas (HSDP), the first wait is followed by the launch of an all-reduce and a second wait. If there is one shard
only (``replicate``), the first launch is the all-reduce. With a working copy in each node (``ReduceSpec.within``), the
launch of another reduce-scatter follows. A coalesced bucket has a wait for each tensor.

If the graph is a fragment (one of several graphs of a forward), collectives may cross its edges (``BucketSpec.edge``).
Its first gather may be in flight before the graph runs, its last gather also starts the next graph's first one, and
reductions whose wait the plan has at the end are deferred: they are left in flight. The collectives are the same in any
case, so that each rank may decide by itself whether it defers.
"""

# Why: docs/design/graph-breaks.md, "Fragments: the graphs of a broken forward"
# Why: docs/design/graph-breaks.md, "Deferred reductions bypass autograd"

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.collectives import offsets
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.buckets.spec import COALESCED, FLAT, LIBRARY, TORCH, TRITON, BucketSpec, Kind
from compiled_fsdp.buckets.transport import TRANSPORTS, WAIT, reduced_again
from compiled_fsdp.compat.graphs import stable_topological_sort
from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import argument, calls, is_given, ops, prims, spec_of, value
from compiled_fsdp.passes.plan import Bucket
from compiled_fsdp.passes.plan.tasks import CollectiveTask
from compiled_fsdp.passes.unpack import by_kernel
from compiled_fsdp.passes.views import memory_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def bucket(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace ``unshard`` and ``reduce_grad`` calls by the plan's buckets."""
    if ctx.planned is None:  # the pass ``plan`` is switched off
        ctx.changed("bucket", "no plan")
        return gm
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    nodes, grads = _by_read(gathers), _by_read(reductions)
    # only gathers of whole parameters cross edges: other graphs do not know the parts of reshard_after_forward=8, or
    # the pieces of all-gather extensions
    whole = [
        b.kind == "gather"
        and b.group_id == ctx.reads[b.reads[0]].group_id
        and not any(ctx.reads[read].piece for read in b.reads)
        for b in ctx.planned.plan.launches
    ]
    taken = [number for number, is_whole in enumerate(whole) if is_whole] if _crosses_edges(ctx) else []
    first, last = taken[:1], taken[-1:] if ctx.rules.is_fragment else []
    uses = {task.read: (n, task) for n, task in enumerate(ctx.planned.tasks.gathers)} if ctx.planned.tasks else {}
    agreed: list[AgreedBucket] = []
    for number, planned in enumerate(ctx.planned.plan.launches):
        edge = None
        if planned.kind == "gather":
            members = [nodes[read].popleft() for read in planned.reads]
            edge = (number in first, number in last) if number in (*first, *last) else None
            launch = _gather(gm, planned, members, edge, ctx)
        else:
            members = [grads[read].popleft() for read in planned.reads]
            at_the_end = ctx.planned.schedule[number].wait == ctx.planned.end
            if at_the_end and _runtime_can_reduce(planned, ctx) and _only_returned(members):
                launch = _defer_reduction(gm, planned, members)
            else:
                launch = _reduce(gm, planned, members, ctx)
        launch.meta["bucket"] = number
        agreed.append(
            AgreedBucket(
                kind=planned.kind,
                reads=planned.reads,
                uses=tuple(_until(uses, read) for read in planned.reads) if planned.kind == "gather" else (),
                form=planned.form,
                transport=spec_of(launch).transport,
                copier=TRITON if spec_of(launch).has_gaps else TORCH,
                edge=edge,
            )
        )
    ctx.agreed_buckets = tuple(agreed)
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    ctx.changed(
        "bucket", f"{len(gathers)} gathers and {len(reductions)} reductions in {len(ctx.planned.plan.launches)} buckets"
    )
    return gm


def _crosses_edges(ctx: PassContext) -> bool:
    """Whether gathers may be in flight before the graph is called, or after it."""
    return ctx.rules.is_fragment or (ctx.rules.gathers_ahead and ctx.phase == "forward")


def _until(uses: Mapping[int, tuple[int, CollectiveTask]], read: int) -> tuple[int, int]:
    """The read's number among the gathers, in order of first use, and how many gathers are due before its last use."""
    number, task = uses[read]
    return number, sum(other.first <= task.last for _, other in uses.values())


def _by_read(nodes: list[Node]) -> dict[int, deque[Node]]:
    """Group calls by their read, in graph order, because ``schedule_of`` counts on that order."""
    out: dict[int, deque[Node]] = defaultdict(deque)
    for node in nodes:
        out[argument(node, "read")].append(node)
    return out


def _gather(
    gm: GraphModule, planned: Bucket, members: list[Node], edge: tuple[bool, bool] | None, ctx: PassContext
) -> Node:
    graph = gm.graph
    shards, numbers = ([argument(node, name) for node in members] for name in ("shard", "param_id"))
    world, group_id, dtype, device, codec = (
        argument(members[0], name) for name in ("world", "group_id", "dtype", "device", "codec")
    )
    kernel = not codec and device is None and edge is None and by_kernel(ctx, shards, dtype)
    if planned.form == COALESCED:  # only shards that are cast are copied
        kernel = kernel and sum(value(shard).dtype != dtype for shard in shards) > 1
    by, numels = planned.transport or Kind.GATHER.usual_transport, tuple(value(shard).numel() for shard in shards)
    spec = BucketSpec(
        Kind.GATHER, planned.form, by, world, numels, group_id,
        reads=planned.reads, dtype=dtype, codec=codec, copier=_copier(ctx, kernel), device=device, edge=edge,
        recheck=ctx.recheck_prefetched or edge is None,
    )  # fmt: skip
    first = next(node for node in graph.nodes if not is_given(node))
    with graph.inserting_before(first):  # possible because shards are inputs; ``schedule`` moves it to its place
        launch = add_call(graph, ops.launch.default, shards, numbers if edge else numbers[:1], str(spec))
        waits = _waits(gm, launch, spec)
    for node, place, wait in zip(members, offsets(spec), waits, strict=False):
        with graph.inserting_before(node):
            full = add_call(graph, ops.unpack_gather.default, wait, place, argument(node, "spec"))
        node.replace_all_uses_with(full)
        graph.erase_node(node)
    return launch


def _copier(ctx: PassContext, kernel: bool) -> str:
    return TRITON if kernel else LIBRARY if ctx.library_copies else TORCH


def _reduce(gm: GraphModule, planned: Bucket, members: list[Node], ctx: PassContext) -> Node:
    graph, numbers = gm.graph, [argument(node, "param_id") for node in members]
    grads, spec = _of_reductions(planned, members)
    reduction = spec.reduction
    kernel = not reduction.adds_accumulated and not spec.codec
    kernel = kernel and by_kernel(ctx, grads, getattr(torch, reduction.dtype))
    if ctx.rules.is_fragment and not spec.coalesced:  # another rank may defer it, and deferred buckets have no gaps
        kernel = False
    spec = replace(spec, copier=_copier(ctx, kernel))
    pieces = spec.world if TRANSPORTS[spec.transport].leaves_pieces else 1
    with graph.inserting_before(max(members).next):  # nodes compare by their places
        launch = add_call(graph, ops.launch.default, grads, numbers, str(spec))
        waits, received = _waits(gm, launch, spec), spec
        again = ctx.has_replicas(spec.group_id) and reduction.sync is GradSync.ALL
        if again and spec.transport != "all_reduce":
            received = reduced_again(replace(spec, codec=""), spec_of(members[0]).parts, pieces)
            waits = _reduce_again(gm, waits, numbers, replace(received, codec=spec.codec), spec.form)
            received = replace(received, form=spec.form)
            pieces = received.world if TRANSPORTS[received.transport].leaves_pieces else 1
        for node, place, wait in zip(members, offsets(received), waits, strict=False):
            given = argument(node, "spec"), argument(node, "dtype"), pieces
            unpacked = add_call(graph, ops.unpack_reduce.default, wait, place, *given)
            node.replace_all_uses_with(unpacked)
    for node in members:
        graph.erase_node(node)
    return launch


def _reduce_again(gm: GraphModule, waits: list[Node], numbers: list[Node], spec: BucketSpec, form: str) -> list[Node]:
    """Reduce the tensors of ``waits`` for the second time; return the waits. ``form``: of the first reduction."""
    count, found = len(waits), []
    for share in [slice(i, i + 1) for i in range(count)] if form == COALESCED else [slice(count)]:
        its = replace(spec, numels=spec.numels[share])
        launch = add_call(gm.graph, ops.launch.default, [waits[share][0]], numbers[share], str(its))
        found += _waits(gm, launch, its)
    return found


def _of_reductions(planned: Bucket, members: list[Node]) -> tuple[list[Node], BucketSpec]:
    """The gradients of a bucket of reductions, and the spec that says how they are sent."""
    grads, specs = [argument(node, "grad") for node in members], [spec_of(node) for node in members]
    numels, dims = tuple(math.prod(spec.shard_size) for spec in specs), tuple(spec.dim for spec in specs)
    first, by = specs[0], planned.transport or Kind.REDUCE.usual_transport
    return grads, BucketSpec(
        Kind.REDUCE, planned.form, by, first.world, numels, first.group_id, dims, planned.reads, reduce=first.reduce,
        codec=first.reduction.codec,
    )  # fmt: skip


def _runtime_can_reduce(planned: Bucket, ctx: PassContext) -> bool:
    """Whether a bucket of reductions may be deferred: left in flight for the runtime to wait for."""
    if not ctx.rules.is_fragment or ctx.phase != "backward":
        return False
    read = ctx.reads[planned.reads[0]]
    if planned.group_id != read.group_id and read.reduces_within is None:  # only this graph knows the group
        return False
    return planned.form != COALESCED or not ctx.has_replicas(planned.group_id)  # the second reduction takes one tensor


def _only_returned(members: list[Node]) -> bool:
    """Whether the reduced gradients have no use but as outputs of the graph."""
    return all(user.op == "output" for node in members for user in node.users)


def _is_used_once(grad: Node) -> bool:
    """Whether this graph has made a gradient's memory, and only one call uses it."""
    memory, seen = memory_of(grad), grad
    while seen is not memory and len(seen.users) == 1 and isinstance(seen.args[0], Node):
        seen = seen.args[0]  # the tensor that it is a view of
    return seen is memory and len(seen.users) == 1 and seen.op == "call_function"


def _defer_reduction(gm: GraphModule, planned: Bucket, members: list[Node]) -> Node:
    """Launch a reduction that is waited for after the graph, and return zeros in place of the reduced gradients.

    The gates get the reduced gradients from the runtime (``runtime/reducer.py``).
    """
    graph, numbers = gm.graph, [argument(node, "param_id") for node in members]
    grads, spec = _of_reductions(planned, members)
    with graph.inserting_before(max(members).next):  # nodes compare by their places
        dtype, clone = argument(members[0], "dtype"), torch.ops.aten.clone.default
        if planned.form != FLAT:  # a gradient may be sent without a copy, and its memory must not be written meanwhile
            grads = [grad if _is_used_once(grad) else add_call(graph, clone, grad) for grad in grads]
        spec = replace(spec, dtype=dtype, edge=(False, True))
        launch = add_call(graph, ops.launch.default, grads, numbers, str(spec))
        result = add_call(graph, operator.getitem, launch, 0)
        for node in members:
            size, own = argument(node, "shard_size"), argument(node, "dtype")
            zero = result if own == dtype else add_call(graph, prims.convert_element_type.default, result, own)
            node.replace_all_uses_with(add_call(graph, torch.ops.aten.expand.default, zero, size))
    for node in members:
        graph.erase_node(node)
    return launch


def _waits(gm: GraphModule, launch: Node, spec: BucketSpec) -> list[Node]:
    """Add the waits of a launch; return one for each tensor, for a flat bucket the same one each time."""
    count = len(spec.numels)
    elements = [add_call(gm.graph, operator.getitem, launch, i) for i in range(count if spec.coalesced else 1)]
    waits = [add_call(gm.graph, WAIT, element) for element in elements]
    return waits if spec.coalesced else waits * count
