"""Lower: our ops become tensor operations and ``_c10d_functional`` collectives, which Inductor, logs and tools know.

    launch_gather([a, b])  ->  cat(a, b) -> all_gather_into_tensor        unpack_gather(w, ..)  ->  slice, reshape
    launch_reduce([g, h])  ->  pad, cat(g, h) -> reduce_scatter_tensor    unpack_reduce(w, ..)  ->  slice, view
                               or -> all_to_all_single                                             or slices, added
    launch_gathers([a, b]) ->  all_gather_into_tensor_coalesced; on the CPU one all_gather_into_tensor each

The producers of a collective stand right before it. Process-group names enter the graph here and not earlier.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_fsdp.passes import expand
from compiled_fsdp.passes.graph import BEYOND, COLLECTIVES, argument, calls, inline, ops, replace_by_input, set_argument

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext


def lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace every op of ours; with ``bucket`` switched off also single reads and reductions."""
    count = 0
    for op, lowering in _LOWERINGS.items():
        for node in calls(gm, getattr(ops, op).default):
            lowering(node, ctx)
            count += 1
    for publish in calls(gm, ops.publish.default)[-1:]:
        set_argument(publish, "last", True)  # whatever came before: grouped hooks have heard of all
    gm.graph.lint()
    ctx.changed("lower", f"{count} ops")
    return gm


def _launch_gather(node: Node, ctx: PassContext) -> None:
    _launch(node, ctx, expand.launch_gather, "shards")


def _launch_gathers(node: Node, ctx: PassContext) -> None:
    _launch(node, ctx, expand.launch_gathers, "shards")


def _launch_reduce(node: Node, ctx: PassContext) -> None:
    numels, exchange = argument(node, "numels"), argument(node, "exchange")
    _launch(node, ctx, partial(_with_numels, expand.launch_reduce, numels, exchange), "grads")


def _launch_reduces(node: Node, ctx: PassContext) -> None:
    numels, exchange = argument(node, "numels"), argument(node, "exchange")
    _launch(node, ctx, partial(_with_numels, expand.launch_reduces, numels, exchange), "grads")


def _with_numels(launch: Any, numels: list[int], exchange: bool, grads: Any, world: int, group: str) -> Any:
    return launch(grads, numels, world, group, exchange)


def _launch(node: Node, ctx: PassContext, function: Any, tensors: str) -> None:
    """Inline a launch; its collectives know their bucket and which of its reads are theirs."""
    world, group = argument(node, "world"), ctx.groups[argument(node, "mesh")]
    reads, number = tuple(argument(node, "reads")), node.meta.get("bucket")
    added = inline(node, lambda *given: function(given, world, group), argument(node, tensors))
    collectives = [n for n in added if n.target in COLLECTIVES]
    each = [reads] if len(collectives) == 1 else [(read,) for read in reads]
    for collective, its_reads in zip(collectives, each, strict=True):
        collective.meta["reads"], collective.meta["bucket"] = its_reads, number


def _beyond(node: Node, ctx: PassContext) -> None:
    """It stays, as the collective of its bucket."""
    node.meta |= {"of_bucket": True, "reads": tuple(argument(node, "reads"))}


def _unpack_gather(node: Node, ctx: PassContext) -> None:
    function = partial(
        expand.unpack_gather,
        offset=argument(node, "offset"),
        size=argument(node, "size"),
        world=argument(node, "world"),
    )
    inline(node, function, [argument(node, "bucket")])


def _unpack_reduce(node: Node, ctx: PassContext) -> None:
    function = partial(
        expand.unpack_reduce,
        offset=argument(node, "offset"),
        shard_size=argument(node, "shard_size"),
        parts=argument(node, "parts"),
        rank=ctx.ranks[argument(node, "mesh")]
        if argument(node, "parts") > 2
        else 0,  # of two the order makes no difference
    )
    inline(node, function, [argument(node, "bucket")])


def _unshard(node: Node, ctx: PassContext) -> None:
    world, size = argument(node, "world"), argument(node, "size")

    def gather(shard: Tensor) -> Tensor:
        if not ctx.has_collective(world):
            return shard.clone()
        bucket = expand.launch_gather([shard], world, ctx.groups[argument(node, "mesh")])
        return expand.unpack_gather(expand.wait(bucket), 0, size, world)

    inline(node, gather, [argument(node, "shard")])


def _reduce_grad(node: Node, ctx: PassContext) -> None:
    world, shard_size = argument(node, "world"), argument(node, "shard_size")

    def reduce(grad: Tensor) -> Tensor:
        if not ctx.has_collective(world):
            return grad.clone()
        bucket = expand.launch_reduce([grad], [math.prod(shard_size)], world, ctx.groups[argument(node, "mesh")])
        return expand.unpack_reduce(expand.wait(bucket), 0, shard_size)

    inline(node, reduce, [argument(node, "grad")])


def _use(node: Node, ctx: PassContext) -> None:
    replace_by_input(node)


def _zero_grad(node: Node, ctx: PassContext) -> None:
    inline(node, torch.zeros_like, [argument(node, "full")])


# by name: the ops are registered by whoever imports them, perhaps later
_LOWERINGS = {
    "launch_gather": _launch_gather,
    "launch_gathers": _launch_gathers,
    "launch_reduce": _launch_reduce,
    "launch_reduces": _launch_reduces,
    **dict.fromkeys(BEYOND, _beyond),
    "unpack_gather": _unpack_gather,
    "unpack_reduce": _unpack_reduce,
    "unshard": _unshard,
    "reduce_grad": _reduce_grad,
    "use": _use,
    "zero_grad": _zero_grad,
}
