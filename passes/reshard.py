"""Reshard after forward: decide in the joint graph what is gathered again in backward.

A full parameter is kept or gathered again as its unit was sharded, or as the planner chose. The mark goes on the read
*and everything computed from parameters alone*: marking the read only, the partitioner would save the transposed, cast
or merged weight instead.
"""

# Why: docs/design.md, note N15; docs/design.md, note N41

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import (
    IS_APART,
    argument,
    calls,
    computed_from_parameters,
    cut_ids,
    is_getitem,
    ops,
    set_argument,
)
from compiled_fsdp.passes.op_schema import schema_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

# The partitioner takes a mark seriously only with the number of a checkpointed region; users' regions count up from 0.
_CHECKPOINTED_REGION = 100_000


def reshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark reads that reshard, and what depends on parameters alone, MUST_RECOMPUTE; kept reads MUST_SAVE."""
    reads = calls(gm, ops.unshard.default)
    if ctx.gathered_anyway:
        _gather_anyway(gm, ctx.gathered_anyway)
    resharded = {read for read in reads if not _is_kept(read, ctx)}
    recomputed = computed_from_parameters(gm, lambda node: node in resharded)
    # what mixes kept and resharded parameters would hold on to the resharded ones, too
    mixed = computed_from_parameters(gm, lambda node: node.target is ops.unshard.default)
    for node in mixed:
        if node in resharded or (node not in reads and any(i in recomputed for i in node.all_input_nodes)):
            recomputed[node] = None
    for node in cut_ids(gm):  # cut out of a block's; saved, each would be an output of forward
        _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    for read in reads:
        if read not in recomputed:
            _mark(read, CheckpointPolicy.MUST_SAVE)
    for node in recomputed:
        _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in (*_readers_of_written_inputs(gm), *(_random(gm) if ctx.rules.budget is not None else ())):
        _mark(node, CheckpointPolicy.MUST_SAVE)
    for retained in calls(gm, ops.retain.default):
        # as one tensor AOTAutograd would mark both as not differentiable
        retained.meta[IS_APART] = any(user.op == "output" for user in retained.all_input_nodes[0].users)
    gm.graph.lint()
    ctx.changed(
        "reshard",
        f"{len(resharded)} of {len(reads)} reads gathered again in backward, "
        f"with {len(recomputed) - len(resharded)} dependents",
    )
    return gm


def _gather_anyway(gm: GraphModule, indices: frozenset[int]) -> None:
    """Let the gradients of these reads depend on their parameters in full, and so backward gather them.

    For example, the first layer's weight is needed in backward only if the layer's input requires a gradient, and the
    plan was made for a graph in which it does.
    """
    reductions = {argument(node, "read"): node for node in calls(gm, ops.reduce_grad.default)}
    for read in calls(gm, ops.unshard.default):
        index = argument(read, "read")
        if index in indices and reductions:
            reduction = reductions.get(index) or next(reversed(reductions.values()))
            with gm.graph.inserting_before(reduction):
                grad = add_call(gm.graph, ops.use.default, argument(reduction, "grad"), [read])
            set_argument(reduction, "grad", grad)


def _readers_of_written_inputs(gm: GraphModule) -> list[Node]:
    """What is computed from an input that forward overwrites at its end (a buffer): backward can't compute it again.

    Views of the input are not listed themselves, because they show the new value; what is computed from them is.
    """
    writes = calls(gm, torch.ops.aten.copy_.default)
    stack = [write.args[0] for write in writes if isinstance(write.args[0], Node) and write.args[0].op == "placeholder"]
    readers: dict[Node, None] = {}
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user in writes or user in readers:
                continue
            if schema_of(user.target).aliases:
                stack.append(user)
            else:
                readers[user] = None
    return [node for reader in readers for node in _with_elements(reader)]


def _random(gm: GraphModule) -> list[Node]:
    """Random operations and what is taken from them.

    A partitioner that is asked to save less computes them again, and draws other numbers. Those in the user's own
    checkpoints have their marks already, and their state is restored.
    """
    found = []
    for node in gm.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and "recompute" not in node.meta:
            found += _with_elements(node)
    return found


def _with_elements(node: Node) -> list[Node]:
    """A call and what is taken from its tuple or list: that is saved, a tuple can't be."""
    return [node, *(user for user in node.users if is_getitem(user))]


def _is_kept(read: Node, ctx: PassContext) -> bool:
    # without communication there is nothing to save: in a group of one the shard is the parameter
    keep = bool(argument(read, "keep")) if ctx.kept_reads is None else argument(read, "read") in ctx.kept_reads
    return keep and ctx.has_collective(argument(read, "world"))


def _mark(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _CHECKPOINTED_REGION
