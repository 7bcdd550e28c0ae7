"""Reshard after forward: decide in the joint graph what is gathered again in backward.

A full parameter is kept or gathered again as its unit was sharded. The mark goes on the read *and everything computed from
parameters alone*: marking the read only, the partitioner would save the transposed, cast or merged weight instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from compiled_fsdp.passes.graph import argument, calls, from_parameters_alone, ops

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext

# The partitioner takes a mark seriously only with the number of a checkpointed region; users' regions count up from 0.
_REGION = 100_000


def reshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark reads that reshard, and what depends on parameters alone, MUST_RECOMPUTE; kept reads MUST_SAVE."""
    reads = calls(gm, ops.unshard.default)
    again = {read for read in reads if not _kept(read, ctx)}
    recomputed = from_parameters_alone(gm, lambda node: node in again)
    # what mixes kept and resharded parameters would hold on to the resharded ones, too
    mixed = from_parameters_alone(gm, lambda node: node.target is ops.unshard.default)
    for node in mixed:
        if node in again or (node not in reads and any(i in recomputed for i in node.all_input_nodes)):
            recomputed[node] = None
    for read in reads:
        if read not in recomputed:
            _mark(read, CheckpointPolicy.MUST_SAVE)
    for node in recomputed:
        _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    gm.graph.lint()
    ctx.changed(
        "reshard",
        f"{len(again)} of {len(reads)} reads gathered again in backward, with {len(recomputed) - len(again)} dependents",
    )
    return gm


def _kept(read: Node, ctx: PassContext) -> bool:
    # without communication there is nothing to save: in a group of one the shard is the parameter
    return bool(argument(read, "keep")) and ctx.has_collective(argument(read, "world"))


def _mark(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _REGION
