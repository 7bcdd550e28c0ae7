"""Flat buckets on the CPU are packed and unpacked by torch's own copies; Inductor would generate code for them."""

# Why: docs/design.md, note N57

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.copies import MOST_ADDED
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import shard_size
from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.graph import add_call, argument, calls, inline, keep_meta, ops, value

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def unpack_by_library(gm: GraphModule, ctx: PassContext) -> int:
    """Cut each flat bucket into its tensors by one op; returns how many buckets there were."""
    count = 0
    for wait in calls(gm, WAIT) if ctx.library_copies else ():
        for unpack, cut in ((ops.unpack_gather.default, _cut_gathered), (ops.unpack_reduce.default, _cut_reduced)):
            members = sorted(
                (user for user in wait.users if user.target is unpack), key=lambda node: argument(node, "offset")
            )
            count += len(members) > 1 and cut(gm, wait, members, ctx)
    return count


def _cut_gathered(gm: GraphModule, wait: Node, members: list[Node], ctx: PassContext) -> bool:
    world = argument(members[0], "world")
    if argument(members[0], "codec"):
        return False
    numels = [math.prod(shard_size(*(argument(node, name) for name in ("size", "world", "dim")))) for node in members]
    if not _fills(wait, members, numels, world):
        return False

    def unpack(node: Node) -> Callable[[Tensor], Tensor]:
        names = ("size", "world", "dim", "dtype")
        return partial(collectives.unpack_gather, offset=0, **{name: argument(node, name) for name in names})

    _cut(gm, wait, members, unpack, ops.split_bucket.default, numels, world)
    return True


def _cut_reduced(gm: GraphModule, wait: Node, members: list[Node], ctx: PassContext) -> bool:
    """Where an all-to-all left pieces to be added; else gradients are views of the bucket."""
    num_pieces, spec = argument(members[0], "num_pieces"), ReduceSpec.parse(argument(members[0], "reduce"))
    numels = [math.prod(argument(node, "shard_size")) for node in members]
    # Generated code rounds a sum of narrow numbers once, and adds many pieces in another order.
    as_generated = num_pieces <= MOST_ADDED and value(wait).dtype.itemsize >= 4
    if num_pieces == 1 or spec.codec or not as_generated or not _fills(wait, members, numels, num_pieces):
        return False
    rank = ctx.groups[argument(members[0], "group_id")].rank if num_pieces > 2 else 0

    def unpack(node: Node) -> Callable[[Tensor], Tensor]:
        size, dtype = argument(node, "shard_size"), argument(node, "dtype")
        return lambda piece: collectives.unpack_reduce(piece.view(-1), 0, size, dtype, spec)

    # Views of the sum would save a copy of each, but took a quarter more memory on a model of 67 M parameters.
    _cut(gm, wait, members, unpack, ops.sum_bucket.default, numels, num_pieces, rank, spec.divide is None)
    return True


def _fills(wait: Node, members: list[Node], numels: list[int], rows: int) -> bool:
    """Whether a bucket consists of these tensors, one after the other, in each of its rows."""
    *offsets, total = itertools.accumulate(numels, initial=0)
    return offsets == [argument(node, "offset") for node in members] and rows * total == value(wait).numel()


def _cut(
    gm: GraphModule, wait: Node, members: list[Node], unpack: Callable[[Node], Callable[[Tensor], Tensor]], op: Any,
    *args: Any,
) -> None:  # fmt: skip
    """Replace the unpacking of ``members`` by ``op(wait, *args)``, and ``unpack`` of each of its results."""
    with gm.graph.inserting_before(wait.next):
        pieces = add_call(gm.graph, op, wait, *args)
        elements = [gm.graph.call_function(operator.getitem, (pieces, i)) for i in range(len(members))]
    for element, fake in zip(elements, value(pieces), strict=True):
        element.meta["val"] = fake
    for added in (pieces, *elements):
        added.meta |= keep_meta(members[0])
    for node, element in zip(members, elements, strict=True):
        inline(node, unpack(node), [element])
