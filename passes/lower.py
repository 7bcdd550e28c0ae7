"""Lower: replace compiled_fsdp's ops by tensor operations and ``_c10d_functional`` collectives.

Inductor, logs and profiling tools know those.

    launch([a, b])  gather    ->  cat(a, b) -> all_gather_into_tensor      unpack_gather(w, ..)  ->  slice, reshape
    launch([g, h])  reduce    ->  pad, cat(g, h) -> reduce_scatter_tensor  unpack_reduce(w, ..)  ->  slice, view
                                  or -> all_to_all_single                                            or slices, added
    with a codec encode([a, b]) -> the same, or all_to_all_single                              -> decode or decode_sum
    coalesced  ->  all_gather_into_tensor_coalesced; on the CPU one all_gather_into_tensor each
    launch([w])  all_reduce_shards, or launch([g, h])  all_reduce  ->  all_reduce
    launch([w])  reduce_scatter_parts, all_to_all_parts            ->  cat -> reduce_scatter_tensor, all_to_all_single
                 casts, divisions: in packing and unpacking

With Triton kernels, pack_shards and pack_grads pack a bucket, and unpack_fulls and unpack_shards unpack it
(``buckets/kernels/``). On the CPU, cat_bucket packs a flat bucket, and split_bucket or sum_bucket unpack it
(``buckets/copies.py``).

The nodes that pack a bucket come right before its collective. Only this pass puts names of process groups into graphs.
"""

# Why: docs/design/graphs-and-passes.md, "Lowering records the eager functions"
# Why: docs/design/communication.md, "CPU gathers write into a given tensor"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.transport import LAUNCHES, TRANSPORTS
from compiled_fsdp.passes.edit import inline, replace_by_input
from compiled_fsdp.passes.graph import IS_ID, IS_SECOND, argument, calls, ops, spec_of, value
from compiled_fsdp.passes.unpack import unpack_together

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace every compiled_fsdp op, also single reads and reductions if the pass ``bucket`` is switched off."""
    together, count = unpack_together(gm, ctx), 0
    for op, lowering in _LOWERINGS.items():
        for node in calls(gm, getattr(ops, op).default):
            lowering(node, ctx)
            count += 1
    for node in [node for node in gm.graph.nodes if IS_ID in node.meta and not node.users]:
        gm.graph.erase_node(node)  # only reductions of pending gradients and edges of fragments need numbers
    gm.graph.lint()
    packed = len(calls(gm, ops.pack_shards.default, ops.pack_grads.default))
    kernels = f"; kernels pack {packed} buckets and unpack {together}" if ctx.kernels else ""
    library = f"; torch's own copies unpack {together} buckets" if together and not ctx.kernels else ""
    ctx.changed("lower", f"{count} ops{kernels}{library}")
    return gm


def _launch(node: Node, ctx: PassContext) -> None:
    """Replace a launch by collectives; note on each the number of its bucket and the reads that it carries.

    The launch of a bucket at an edge of its graph stays.
    """
    spec, number = spec_of(node), node.meta.get("bucket")
    if spec.edge is not None:
        node.meta |= {"of_bucket": True, "reads": spec.reads}
        return
    tensors, takes = argument(node, "tensors"), bool(spec.reduce) and spec.reduction.takes_parameters
    count, groups = len(tensors), ctx.groups[spec.group_id]

    def run(*given: Tensor) -> list[Tensor]:
        return collectives.launch(given[:count], given[count:], spec, groups)

    added = inline(node, run, [*tensors, *(argument(node, "param_ids") if takes else ())])
    if TRANSPORTS[spec.transport].is_second:  # it belongs to the bucket whose reduction it continues
        for n in added:
            n.meta[IS_SECOND] = True
        return
    launched = [n for n in added if n.target in LAUNCHES]
    each = [spec.reads] if len(launched) == 1 else [(read,) for read in spec.reads]
    for collective, its_reads in zip(launched, each, strict=True):
        collective.meta["reads"], collective.meta["bucket"] = its_reads, number


def _unpack_gather(node: Node, ctx: PassContext) -> None:
    function = partial(collectives.unpack_gather, offset=argument(node, "offset"), spec=spec_of(node))
    inline(node, function, [argument(node, "bucket")])


def _unpack_reduce(node: Node, ctx: PassContext) -> None:
    bucket, offset, size, dtype, reduction, pieces = (
        argument(node, name) for name in ("bucket", "offset", "reduced_size", "dtype", "reduction", "num_pieces")
    )
    given = offset, size, dtype, reduction, pieces, ctx.place_of_addends(spec_of(node), pieces)
    inline(node, lambda received: collectives.unpack_reduce(received, *given), [bucket])


def _unshard(node: Node, ctx: PassContext) -> None:
    spec = spec_of(node)
    if not ctx.has_collective(spec.group_id, spec.world):
        gather_alone(node)
        return
    inline(node, partial(collectives.unshard, spec=spec, groups=ctx.groups[spec.group_id]), [argument(node, "shard")])


def gather_alone(node: Node) -> None:
    """Replace a read that needs no communication by the shard itself, or by a cast or copy to the device of it."""
    dtype, device = argument(node, "dtype"), argument(node, "device")
    shard = value(argument(node, "shard"))
    if shard.dtype == dtype and device is None:
        replace_by_input(node)
    else:
        inline(node, lambda s: collectives.to_compute(s, dtype, device), [argument(node, "shard")])


def reduce_alone(node: Node) -> None:
    """Replace a reduction that needs no communication by the gradient: cast, divided, plus the pending gradients."""
    spec, dtype, grad = spec_of(node), argument(node, "dtype"), value(argument(node, "grad"))
    reduction = spec.reduction
    if (
        grad.dtype == dtype
        and str(dtype) == f"torch.{reduction.dtype}"
        and not reduction.adds_accumulated
        and reduction.before == reduction.after == 1
    ):
        replace_by_input(node)
        return

    def reduce(grad: Tensor, *slots: Tensor) -> Tensor:
        return collectives.reduce_alone(grad, slots, spec, dtype)

    inline(
        node, reduce, [argument(node, "grad"), *([argument(node, "param_id")] if reduction.adds_accumulated else [])]
    )


def _reduce_grad(node: Node, ctx: PassContext) -> None:
    spec, dtype = spec_of(node), argument(node, "dtype")
    groups = ctx.groups[spec.group_id]
    if not ctx.has_reduction(spec):
        reduce_alone(node)
        return

    def reduce(grad: Tensor, *slots: Tensor) -> Tensor:
        return collectives.reduce_grad(grad, slots, spec, dtype, groups)

    takes = spec.reduction.takes_parameters
    inline(node, reduce, [argument(node, "grad"), *([argument(node, "param_id")] if takes else [])])


def _reshard(node: Node, ctx: PassContext) -> None:
    world, dim, rank = argument(node, "world"), argument(node, "dim"), ctx.groups[argument(node, "group_id")].rank
    inline(node, lambda full: collectives.reshard(full, world, rank, dim), [argument(node, "full")])


def _use(node: Node, ctx: PassContext) -> None:
    replace_by_input(node)


def _zero_grad(node: Node, ctx: PassContext) -> None:
    def zeros(full: Tensor) -> Tensor:
        return torch.full(full.shape, 0.0, dtype=full.dtype, device=full.device)  # Inductor has no zeros_like

    inline(node, zeros, [argument(node, "full")])


# by name, because the ops are registered when their modules are imported, perhaps after this one
_LOWERINGS = {
    "launch": _launch,
    "unpack_gather": _unpack_gather,
    "unpack_reduce": _unpack_reduce,
    "unshard": _unshard,
    "reduce_grad": _reduce_grad,
    "reshard": _reshard,
    "use": _use,
    "zero_grad": _zero_grad,
}
