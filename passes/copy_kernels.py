"""Which buckets the kernels copy. In a graph their unpacking is one op, and a view of it for each tensor."""

# Why: docs/design.md, note N24

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.kernels.layout import KINDS, inner_of, places
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import shard_size
from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.graph import add_call, argument, calls, inline, is_view, keep_meta, ops, value

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def by_kernel(ctx: PassContext, tensors: Sequence[Node], *dtypes: torch.dtype) -> bool:
    """Whether the kernels copy ``tensors`` into or out of a bucket: there are several, of dtypes that the kernels know.

    ``dtypes`` are those that the kernels would cast to.
    """
    known = all(dtype in KINDS for dtype in (*dtypes, *(value(tensor).dtype for tensor in tensors)))
    return ctx.kernels and len(tensors) > 1 and known


def unpack_together(gm: GraphModule, ctx: PassContext) -> int:
    """Replace the unpacking of every bucket that the kernels unpack; returns how many there were.

    Parameters that leave the graph, for backward, share no tensor with those that do not, and under a memory budget
    with none at all: they would keep each other alive. Gradients that are views of their bucket stay that.
    """
    count = 0
    for wait in calls(gm, WAIT) if ctx.kernels else ():
        fulls = [user for user in wait.users if user.target is ops.unpack_gather.default]
        fulls = [node for node in fulls if argument(node, "dtype") is None]  # neither encoded nor of another dtype
        leaving = [node for node in fulls if _leaves(node)]
        for members in ([node for node in fulls if node not in leaving], leaving if ctx.rules.budget is None else []):
            if by_kernel(ctx, [wait] * len(members)):
                _unpack_fulls(gm, wait, members)
                count += 1
        same: dict[Any, list[Node]] = defaultdict(list)
        for user in list(wait.users):
            if user.target is ops.unpack_reduce.default and _computes(user, wait):
                same[argument(user, "dtype"), argument(user, "reduce")].append(user)
        for shards in same.values():
            if by_kernel(ctx, [wait] * len(shards), argument(shards[0], "dtype")):
                _unpack_shards(gm, wait, shards)
                count += 1
    return count


def _leaves(node: Node) -> bool:
    return any(user.op == "output" or (is_view(user) and _leaves(user)) for user in node.users)


def _computes(node: Node, wait: Node) -> bool:
    """Whether a gradient is cast or divided after its reduction, and not summed."""
    if argument(node, "num_pieces") > 1:
        return False
    return argument(node, "dtype") != value(wait).dtype or _divisor(argument(node, "reduce")) != 1


def _divisor(reduce_text: str) -> float:
    spec = ReduceSpec.parse(reduce_text)
    return 1.0 if spec.sync is GradSync.SHARDS_ONLY else float(spec.after)


def _unpack_fulls(gm: GraphModule, wait: Node, members: list[Node]) -> None:
    world = argument(members[0], "world")
    offsets = [argument(node, "offset") for node in members]
    sizes, dims = ([argument(node, name) for node in members] for name in ("size", "dim"))
    shards = [shard_size(size, world, dim) for size, dim in zip(sizes, dims, strict=True)]
    numels, inners = [math.prod(shard) for shard in shards], list(map(inner_of, shards, dims))
    with gm.graph.inserting_after(wait):
        flat = add_call(gm.graph, ops.unpack_fulls.default, wait, offsets, numels, inners, world)
    flat.meta |= keep_meta(members[0])
    where = places([world * numel for numel in numels])
    for node, place, size, dim in zip(members, where, sizes, dims, strict=False):
        inline(node, partial(collectives.full_at, place=place, size=size, world=world, dim=dim), [flat])


def _unpack_shards(gm: GraphModule, wait: Node, members: list[Node]) -> None:
    offsets, sizes = ([argument(node, name) for node in members] for name in ("offset", "shard_size"))
    numels, dtype = [math.prod(size) for size in sizes], argument(members[0], "dtype")
    divisor = _divisor(argument(members[0], "reduce"))
    with gm.graph.inserting_after(wait):
        flat = add_call(gm.graph, ops.unpack_shards.default, wait, offsets, numels, dtype, divisor)
    flat.meta |= keep_meta(members[0])
    for node, place, size in zip(members, places(numels), sizes, strict=False):
        inline(node, partial(collectives.shard_at, place=place, size=size), [flat])
