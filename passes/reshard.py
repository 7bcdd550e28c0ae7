"""Reshard after forward: mark in the joint graph which parameters backward gathers again.

Whether a full parameter is kept or gathered again was decided when its unit was sharded, or by the planner. The mark
goes on the read *and on everything computed from parameters alone*: with a mark on the read only, the partitioner would
save the transposed, cast or merged weight instead.
"""

# Why: docs/design/graphs-and-passes.md, "Resharding is a recompute decision"
# Why: docs/design/graphs-and-passes.md, "Values of overwritten buffers are saved"

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
    draws_numbers,
    is_getitem,
    ops,
    set_argument,
)
from compiled_fsdp.passes.views import is_view

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

# The partitioner obeys a mark only if it has the number of a checkpointed region; users' regions count up from 0.
_CHECKPOINTED_REGION = 100_000


def reshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark resharded reads, and nodes computed from parameters alone, MUST_RECOMPUTE; mark kept reads MUST_SAVE."""
    reads = calls(gm, ops.unshard.default)
    if ctx.gathered_anyway:
        _gather_anyway(gm, ctx.gathered_anyway)
    resharded = {read for read in reads if not _is_kept(read, ctx)}
    recomputed = computed_from_parameters(gm, lambda node: node in resharded)
    # a node that mixes kept and resharded parameters would, if saved, keep the resharded ones in memory, too
    mixed = computed_from_parameters(gm, lambda node: node.target is ops.unshard.default)
    for node in mixed:
        if node in resharded or (node not in reads and any(i in recomputed for i in node.all_input_nodes)):
            recomputed[node] = None
    for node in cut_ids(gm):  # if saved, each would be an output of forward
        mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    for read in reads:
        if read not in recomputed:
            mark(read, CheckpointPolicy.MUST_SAVE)
    for node in recomputed:
        mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in (*_readers_of_written_inputs(gm), *(_random(gm) if ctx.rules.budget is not None else ())):
        mark(node, CheckpointPolicy.MUST_SAVE)
    for retained in calls(gm, ops.retain.default):
        # if both outputs were one tensor, AOTAutograd would mark both as not differentiable
        retained.meta[IS_APART] = any(user.op == "output" for user in retained.all_input_nodes[0].users)
    gm.graph.lint()
    ctx.changed(
        "reshard",
        f"{len(resharded)} of {len(reads)} reads gathered again in backward, "
        f"with {len(recomputed) - len(resharded)} dependents",
    )
    return gm


def _gather_anyway(gm: GraphModule, indices: frozenset[int]) -> None:
    """Make backward gather these reads: let their gradients depend on the full parameters.

    For example, backward needs the first layer's weight only if the layer's input requires a gradient, and the agreed
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
    """The nodes computed from an input that forward overwrites at its end (a buffer): backward can't recompute them.

    Views of the input are not listed, because they show the new value; nodes computed from the views are.
    """
    writes = calls(gm, torch.ops.aten.copy_.default)
    stack = [write.args[0] for write in writes if isinstance(write.args[0], Node) and write.args[0].op == "placeholder"]
    readers: dict[Node, None] = {}
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user in writes or user in readers:
                continue
            if is_view(user):
                stack.append(user)
            else:
                readers[user] = None
    return [node for reader in readers for node in _with_elements(reader)]


def _random(gm: GraphModule) -> list[Node]:
    """Random operations, and the elements that are taken from their results.

    A partitioner that is asked to save less recomputes them, and they draw other numbers. Those in the user's own
    checkpoints are left out: they have marks already, and the checkpoint restores the generator's state.
    """
    found = []
    for node in gm.graph.nodes:
        if draws_numbers(node) and "recompute" not in node.meta:
            found += _with_elements(node)
    return found


def _with_elements(node: Node) -> list[Node]:
    """A call, and the elements taken from its tuple or list, because elements can be saved and a tuple cannot."""
    return [node, *(user for user in node.users if is_getitem(user))]


def _is_kept(read: Node, ctx: PassContext) -> bool:
    # in a group of one rank nothing is gathered: the shard is the parameter
    keep = bool(argument(read, "keep")) if ctx.kept_reads is None else argument(read, "read") in ctx.kept_reads
    return keep and ctx.has_collective(argument(read, "group_id"), argument(read, "world"))


def mark(node: Node, policy: CheckpointPolicy) -> None:
    """Make torch's partitioner save a node, or compute it again in backward."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _CHECKPOINTED_REGION
