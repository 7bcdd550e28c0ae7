"""Lower: our ops become tensor operations and ``_c10d_functional`` collectives, which Inductor, logs and tools know.

    launch_gather([a, b])  ->  cat(a, b) -> all_gather_into_tensor        unpack_gather(w, ..)  ->  slice, reshape
    launch_reduce([g, h])  ->  pad, cat(g, h) -> reduce_scatter_tensor    unpack_reduce(w, ..)  ->  slice, view
                               or -> all_to_all_single                                             or slices, added
    with a codec encode([a, b]) -> the same, or all_to_all_single                               -> decode or decode_sum
    launch_gathers([a, b]) ->  all_gather_into_tensor_coalesced; on the CPU one all_gather_into_tensor each
    launch_all_reduce(w)   ->  all_reduce                                 casts, divisions: while packing and unpacking

With kernels a bucket is packed by pack_shards or pack_grads, and unpacked by unpack_fulls or unpack_shards
(``buckets/kernels/``); on the CPU flat ones by cat_bucket, and by split_bucket or sum_bucket (``buckets/copies.py``).

The producers of a collective stand right before it. Process-group names enter the graph here and not earlier.
"""

# Why: docs/design.md, note N23; docs/design.md, note N45

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.transport import LAUNCHES
from compiled_fsdp.passes.copy_kernels import unpack_together
from compiled_fsdp.passes.graph import CROSSING_LAUNCHES, argument, calls, inline, ops, replace_by_input, value
from compiled_fsdp.passes.library_copies import unpack_by_library

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace every op of ours; with ``bucket`` switched off also single reads and reductions."""
    together, by_library = unpack_together(gm, ctx), unpack_by_library(gm, ctx)
    count = 0
    for op, lowering in _LOWERINGS.items():
        for node in calls(gm, getattr(ops, op).default):
            lowering(node, ctx)
            count += 1
    gm.graph.lint()
    packed = len(calls(gm, ops.pack_shards.default, ops.pack_grads.default))
    kernels = f"; kernels pack {packed} buckets and unpack {together}" if ctx.kernels else ""
    library = f"; torch's own copies unpack {by_library} buckets" if by_library else ""
    ctx.changed("lower", f"{count} ops{kernels}{library}")
    return gm


def _launch_gather(node: Node, ctx: PassContext) -> None:
    _gather(node, ctx, partial(collectives.launch_gather, cat=_cat(ctx)))


def _launch_gathers(node: Node, ctx: PassContext) -> None:
    _gather(node, ctx, collectives.launch_gathers)


def _cat(ctx: PassContext) -> collectives.Cat:
    return ops.cat_bucket.default if ctx.library_copies else torch.cat


def _gather(node: Node, ctx: PassContext, launch: Any) -> None:
    world, dtype, device, by_kernel = (argument(node, name) for name in ("world", "dtype", "device", "by_kernel"))
    group, codec = ctx.groups[argument(node, "group_id")].all_gather, argument(node, "codec")
    _launch(
        node, lambda *shards: launch(shards, world, group, dtype, device, by_kernel, codec), argument(node, "shards")
    )


def _launch_reduce(node: Node, ctx: PassContext) -> None:
    _reduce(node, ctx, partial(collectives.launch_reduce, cat=_cat(ctx)))


def _launch_reduces(node: Node, ctx: PassContext) -> None:
    _reduce(node, ctx, collectives.launch_reduces)


def _reduce(node: Node, ctx: PassContext, launch: Any) -> None:
    numels, dims, world, use_all_to_all, by_kernel = (
        argument(node, name) for name in ("numels", "dims", "world", "use_all_to_all", "by_kernel")
    )
    group, spec = ctx.groups[argument(node, "group_id")].reduce_scatter, ReduceSpec.parse(argument(node, "spec_text"))

    def run(*given: Tensor) -> Any:
        count = len(numels)
        return launch(given[:count], numels, dims, world, group, spec, given[count:], use_all_to_all, by_kernel)

    _launch(node, run, [*argument(node, "grads"), *(argument(node, "param_ids") if spec.takes_parameters else ())])


def _launch_all_reduce(node: Node, ctx: PassContext) -> None:
    numels, num_pieces, group_id = (argument(node, name) for name in ("numels", "num_pieces", "group_id"))
    group, spec = ctx.groups[group_id].replicate, ReduceSpec.parse(argument(node, "spec_text"))
    assert group is not None

    def run(bucket: Tensor, *slots: Tensor) -> Tensor:
        return collectives.launch_all_reduce(bucket, group, spec, slots, numels, num_pieces, _rank(node, ctx))

    inline(node, run, [argument(node, "bucket"), *(argument(node, "param_ids") if spec.adds_accumulated else ())])


def _launch(node: Node, function: Any, tensors: list[Node]) -> None:
    """Inline a launch; its collectives know their bucket and which of its reads are theirs."""
    reads, number = tuple(argument(node, "reads")), node.meta.get("bucket")
    added = inline(node, function, tensors)
    launched = [n for n in added if n.target in LAUNCHES]
    each = [reads] if len(launched) == 1 else [(read,) for read in reads]
    for collective, its_reads in zip(launched, each, strict=True):
        collective.meta["reads"], collective.meta["bucket"] = its_reads, number


def _keep_launch(node: Node, ctx: PassContext) -> None:
    """The launch stays, as the collective of its bucket."""
    node.meta |= {"of_bucket": True, "reads": tuple(argument(node, "reads"))}


def _rank(node: Node, ctx: PassContext) -> int:
    # pieces of two ranks can be added in any order
    return ctx.groups[argument(node, "group_id")].rank if argument(node, "num_pieces") > 2 else 0


def _unpack_gather(node: Node, ctx: PassContext) -> None:
    names = ("offset", "size", "world", "dim", "codec", "dtype")
    function = partial(collectives.unpack_gather, **{name: argument(node, name) for name in names})
    inline(node, function, [argument(node, "bucket")])


def _unpack_reduce(node: Node, ctx: PassContext) -> None:
    function = partial(
        collectives.unpack_reduce,
        offset=argument(node, "offset"),
        size=argument(node, "shard_size"),
        dtype=argument(node, "dtype"),
        spec=ReduceSpec.parse(argument(node, "spec_text")),
        num_pieces=argument(node, "num_pieces"),
        rank=_rank(node, ctx),
    )
    inline(node, function, [argument(node, "bucket")])


def _unshard(node: Node, ctx: PassContext) -> None:
    names = ("world", "size", "dim", "dtype", "device", "codec")
    world, size, dim, dtype, device, codec = (argument(node, name) for name in names)
    if not ctx.has_collective(world):
        gather_alone(node)
        return

    def gather(shard: Tensor) -> Tensor:
        bucket = collectives.launch_gather(
            [shard], world, ctx.groups[argument(node, "group_id")].all_gather, dtype, device, codec=codec
        )
        return collectives.unpack_gather(transport.wait(bucket), 0, size, world, dim, codec, dtype)

    inline(node, gather, [argument(node, "shard")])


def gather_alone(node: Node) -> None:
    """A read that needs no communication: the shard itself, or a cast of it."""
    dtype, device = argument(node, "dtype"), argument(node, "device")
    shard = value(argument(node, "shard"))
    if shard.dtype == dtype and device is None:
        replace_by_input(node)
    else:
        inline(node, lambda s: collectives.to_compute(s, dtype, device), [argument(node, "shard")])


def reduce_alone(node: Node) -> None:
    """A reduction that needs no communication: the gradient itself, or what casts and waiting gradients make of it."""
    spec = ReduceSpec.parse(argument(node, "spec_text"))
    size, dim, dtype = (argument(node, name) for name in ("shard_size", "dim", "dtype"))
    grad = value(argument(node, "grad"))
    if (
        grad.dtype == dtype
        and str(dtype) == f"torch.{spec.dtype}"
        and not spec.adds_accumulated
        and spec.before == spec.after == 1
    ):
        replace_by_input(node)
        return

    def reduce(grad: Tensor, *slots: Tensor) -> Tensor:
        return collectives.reduce_alone(grad, math.prod(size), dim, size, dtype, spec, slots)

    inline(node, reduce, [argument(node, "grad"), *([argument(node, "param_id")] if spec.adds_accumulated else [])])


def _reduce_grad(node: Node, ctx: PassContext) -> None:
    world, groups = argument(node, "world"), ctx.groups[argument(node, "group_id")]
    if not ctx.has_collective(world) and groups.replicate is None:
        reduce_alone(node)
        return
    spec = ReduceSpec.parse(argument(node, "spec_text"))
    size, dim, dtype = (argument(node, name) for name in ("shard_size", "dim", "dtype"))

    def reduce(grad: Tensor, *slots: Tensor) -> Tensor:
        numels = [math.prod(size)]
        bucket = transport.wait(
            collectives.launch_reduce([grad], numels, [dim], world, groups.reduce_scatter, spec, slots)
        )
        pieces = (world, groups.rank) if spec.codec else (1, 0)
        if groups.replicate is not None and spec.sync is GradSync.ALL:
            launched = collectives.launch_all_reduce(bucket, groups.replicate, spec, slots, numels, *pieces)
            bucket, pieces = transport.wait(launched), (1, 0)
        return collectives.unpack_reduce(bucket, 0, size, dtype, spec, *pieces)

    inline(node, reduce, [argument(node, "grad"), *([argument(node, "param_id")] if spec.takes_parameters else [])])


def _reshard(node: Node, ctx: PassContext) -> None:
    world, dim, rank = argument(node, "world"), argument(node, "dim"), ctx.groups[argument(node, "group_id")].rank
    inline(node, lambda full: collectives.reshard(full, world, rank, dim), [argument(node, "full")])


def _use(node: Node, ctx: PassContext) -> None:
    replace_by_input(node)


def _zero_grad(node: Node, ctx: PassContext) -> None:
    def zeros(full: Tensor) -> Tensor:
        return torch.full(full.shape, 0.0, dtype=full.dtype, device=full.device)  # Inductor has no zeros_like

    inline(node, zeros, [argument(node, "full")])


# by name: the ops are registered by whoever imports them, perhaps later
_LOWERINGS = {
    "launch_gather": _launch_gather,
    "launch_gathers": _launch_gathers,
    "launch_reduce": _launch_reduce,
    "launch_reduces": _launch_reduces,
    "launch_all_reduce": _launch_all_reduce,
    **dict.fromkeys(CROSSING_LAUNCHES, _keep_launch),
    "unpack_gather": _unpack_gather,
    "unpack_reduce": _unpack_reduce,
    "unshard": _unshard,
    "reduce_grad": _reduce_grad,
    "reshard": _reshard,
    "use": _use,
    "zero_grad": _zero_grad,
}
