"""Unpack: where a bucket has several tensors one op cuts them out of it, and not one for each of them.

on GPUs, by our kernels:    unpack_fulls, unpack_shards   one flat tensor, and a view of it for each
on CPUs, by torch's copies: split_bucket, sum_bucket      a tensor for each; Inductor would generate code for copies
"""

# Why: docs/design.md, note N24; docs/design.md, note N57

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.copies import MOST_ADDED
from compiled_fsdp.buckets.kernels.layout import KINDS, inner_of, places
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.edit import add_call, inline, keep_meta
from compiled_fsdp.passes.graph import argument, calls, ops, spec_of, value
from compiled_fsdp.passes.views import is_view

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

Unpack = Callable[[Tensor], Tensor]


def unpack_together(gm: GraphModule, ctx: PassContext) -> int:
    """Cut buckets by one op each; returns how often that was done."""
    count = 0
    for wait in calls(gm, WAIT) if ctx.kernels or ctx.library_copies else ():
        fulls, shards = (
            sorted((user for user in wait.users if user.target is op), key=lambda node: argument(node, "offset"))
            for op in (ops.unpack_gather.default, ops.unpack_reduce.default)
        )
        if ctx.kernels:
            count += _fulls_by_kernel(gm, wait, fulls, ctx) + _shards_by_kernel(gm, wait, shards, ctx)
        else:
            count += _fulls_by_library(gm, wait, fulls) + _shards_by_library(gm, wait, shards, ctx)
    return count


def _cut(gm: GraphModule, wait: Node, members: list[Node], unpack: Sequence[Unpack], op: Any, *args: Any) -> None:
    """Replace the unpacking of ``members`` by ``op(wait, *args)``, and ``unpack`` of its result, or of each of them."""
    with gm.graph.inserting_before(wait.next):
        together = add_call(gm.graph, op, wait, *args)
        added = [together]
        if isinstance(value(together), list):
            added += [add_call(gm.graph, operator.getitem, together, i) for i in range(len(members))]
    for node in added:
        node.meta |= keep_meta(members[0])
    each = added[1:] or added * len(members)
    for node, element, function in zip(members, each, unpack, strict=True):
        inline(node, function, [element])


# ---- by kernels ------------------------------------------------------------------------------------------------------
def by_kernel(ctx: PassContext, tensors: Sequence[Node], *dtypes: torch.dtype) -> bool:
    """Whether the kernels copy ``tensors`` into or out of a bucket: there are several, of dtypes that the kernels know.

    ``dtypes`` are those that the kernels would cast to.
    """
    known = all(dtype in KINDS for dtype in (*dtypes, *(value(tensor).dtype for tensor in tensors)))
    return ctx.kernels and len(tensors) > 1 and known


def _fulls_by_kernel(gm: GraphModule, wait: Node, fulls: list[Node], ctx: PassContext) -> int:
    """Parameters that leave the graph, for backward, share no tensor with those that do not, and under a memory budget
    with none at all: they would keep each other alive.
    """
    # neither encoded nor of another dtype
    fulls = [node for node in fulls if not argument(node, "codec") and argument(node, "dtype") == value(wait).dtype]
    leaving, count = [node for node in fulls if _leaves(node)], 0
    for members in ([node for node in fulls if node not in leaving], leaving if ctx.rules.budget is None else []):
        if by_kernel(ctx, [wait] * len(members)):
            count += 1
            offsets, sizes, shards, dims = (
                [argument(node, name) for node in members] for name in ("offset", "size", "shard_size", "dim")
            )
            world = argument(members[0], "world")
            numels, inners = [math.prod(shard) for shard in shards], list(map(inner_of, shards, dims))
            unpack = [
                partial(collectives.full_at, place=place, size=size, world=world, dim=dim)
                for place, size, dim in zip(places([world * n for n in numels]), sizes, dims, strict=False)
            ]
            _cut(gm, wait, members, unpack, ops.unpack_fulls.default, offsets, numels, inners, world)
    return count


def _shards_by_kernel(gm: GraphModule, wait: Node, shards: list[Node], ctx: PassContext) -> int:
    """Gradients that are views of their bucket stay that."""
    same: dict[Any, list[Node]] = defaultdict(list)
    for node in shards:
        if _computes(node, wait):
            same[argument(node, "dtype"), argument(node, "reduce")].append(node)
    count = 0
    for (dtype, reduce), members in same.items():
        if by_kernel(ctx, [wait] * len(members), dtype):
            count += 1
            offsets, sizes = ([argument(node, name) for node in members] for name in ("offset", "shard_size"))
            numels, op = [math.prod(size) for size in sizes], ops.unpack_shards.default
            unpack = [
                partial(collectives.shard_at, place=place, size=size)
                for place, size in zip(places(numels), sizes, strict=False)
            ]
            _cut(gm, wait, members, unpack, op, offsets, numels, dtype, _divisor(reduce))
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


# ---- by torch's copies -----------------------------------------------------------------------------------------------
def _fulls_by_library(gm: GraphModule, wait: Node, fulls: list[Node]) -> bool:
    if len(fulls) < 2 or argument(fulls[0], "codec"):
        return False
    specs = [spec_of(node) for node in fulls]
    numels, world = [math.prod(spec.shard_size) for spec in specs], specs[0].world
    if not _fills(wait, fulls, numels, world):
        return False
    unpack = [partial(collectives.unpack_gather, offset=0, spec=spec) for spec in specs]
    _cut(gm, wait, fulls, unpack, ops.split_bucket.default, numels, world)
    return True


def _shards_by_library(gm: GraphModule, wait: Node, shards: list[Node], ctx: PassContext) -> bool:
    """Where an all-to-all left pieces to be added; else gradients are views of the bucket."""
    if len(shards) < 2:
        return False
    num_pieces, spec = argument(shards[0], "num_pieces"), ReduceSpec.parse(argument(shards[0], "reduce"))
    numels = [math.prod(argument(node, "shard_size")) for node in shards]
    # Generated code rounds a sum of narrow numbers once, and adds many pieces in another order.
    as_generated = num_pieces <= MOST_ADDED and value(wait).dtype.itemsize >= 4
    if num_pieces == 1 or spec.codec or not as_generated or not _fills(wait, shards, numels, num_pieces):
        return False
    rank = ctx.groups[argument(shards[0], "group_id")].rank if num_pieces > 2 else 0

    def unpack(node: Node) -> Unpack:
        size, dtype = argument(node, "shard_size"), argument(node, "dtype")
        return lambda piece: collectives.unpack_reduce(piece.view(-1), 0, size, dtype, spec)

    # Views of the sum would save a copy of each, but took a quarter more memory on a model of 67 M parameters.
    average = spec.divide is None
    _cut(gm, wait, shards, list(map(unpack, shards)), ops.sum_bucket.default, numels, num_pieces, rank, average)
    return True


def _fills(wait: Node, members: list[Node], numels: list[int], rows: int) -> bool:
    """Whether a bucket consists of these tensors, one after the other, in each of its rows."""
    *offsets, total = itertools.accumulate(numels, initial=0)
    return offsets == [argument(node, "offset") for node in members] and rows * total == value(wait).numel()
