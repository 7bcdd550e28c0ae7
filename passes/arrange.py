"""Arrange: put the graph into the planner's order, each read at its first use and each reduction after its gradient.

- A read that needs no communication becomes the shard itself. Several reads of one shard become one.
- The gradients of one parameter (reused or tied) are added, and reduced once.
- Gradients are not cast to their reduction dtype, because packing a bucket does that.
- Nodes computed from gathered parameters alone (views, casts) move to their first use, because they would otherwise
  pull gathers forward.
- Nodes computed from reduced gradients move to the end, because they would otherwise pull waits forward.
- Under a memory budget, a gradient that is a view of larger memory is copied.
"""

# Why: docs/design/planner.md, "A plan is data with milestones"
# Why: docs/design/reads.md, "Kept full parameters are outputs of the graph"

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat.graphs import reorder, stable_topological_sort
from compiled_fsdp.passes.edit import add_call, replace_by_input
from compiled_fsdp.passes.graph import (
    COMPLETION_ORDER,
    ENCODES,
    IS_APART,
    IS_ID,
    IS_SHARD,
    RETAINS,
    argument,
    calls,
    computed_from_parameters,
    cut_ids,
    descendants,
    encoders,
    ops,
    set_argument,
    spec_of,
    value,
)
from compiled_fsdp.passes.lower import gather_alone, reduce_alone
from compiled_fsdp.passes.memory import storage_bytes, tensor_bytes
from compiled_fsdp.passes.regather import cut_pieces_early
from compiled_fsdp.passes.views import memory_of, written_by

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

aten = torch.ops.aten


def arrange(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Leave one gather per shard, at its first use, and one reduction per parameter, after its complete gradient."""
    for retained in calls(gm, ops.retain.default):
        _return_retained(retained)
    reads, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    for node in encoders(gm):
        if node.op == "call_function":
            node.meta[ENCODES] = True
        else:  # an input: no read is of it directly, and its users run before everything else
            node.meta.setdefault(IS_SHARD, ())
    gathers = _one_per_shard(_communicating(reads, ctx))
    reduces = _one_per_parameter(gm, _communicating(reductions, ctx))
    _leave_casts_to_buckets(reduces)
    if ctx.rules.budget is not None:
        _copy_parts(reduces)
    stable_topological_sort(gm.graph)
    reorder(gm.graph, list(_arranged(gm, gathers, reduces)))
    cut_pieces_early(gm)
    for number, node in enumerate(calls(gm, ops.reduce_grad.default)):
        for publish in descendants([node]):
            publish.meta[COMPLETION_ORDER] = number  # for compiled autograd's graph, because buckets change the order
    gm.graph.lint()
    ctx.changed(
        "arrange",
        f"{len(reads)} reads are {len(gathers)} gathers, {len(reductions)} gradients {len(reduces)} reductions",
    )
    return gm


def _return_retained(retained: Node) -> None:
    """Replace a ``retain`` call by the gathered tensor itself, which needs no copy because nobody writes to it.

    If the graph returns that tensor twice, ``retained`` makes a second one over the same memory. If only a part stays,
    ``reshard`` cuts it out.
    """
    full = retained.args[0]
    assert isinstance(full, Node)
    if argument(retained, "spec"):
        retained.graph.output_node().meta[RETAINS] = True
        world, group_id, dim = (argument(retained, name) for name in ("world", "group_id", "dim"))
        with retained.graph.inserting_before(retained):
            part = add_call(retained.graph, ops.reshard.default, full, world, group_id, dim)
        retained.replace_all_uses_with(part)
        retained.graph.erase_node(retained)
        return
    if memory_of(full).op == "placeholder" or not retained.users:
        replace_by_input(retained)
        return
    retained.graph.output_node().meta[RETAINS] = True
    if retained.meta.get(IS_APART):
        with retained.graph.inserting_before(retained):
            full = add_call(retained.graph, ops.retained.default, full)
    retained.replace_all_uses_with(full)
    retained.graph.erase_node(retained)


def _communicating(nodes: list[Node], ctx: PassContext) -> list[Node]:
    """Return the reads and reductions that need communication, and replace the others by local operations."""
    remaining = []
    for node in nodes:
        spec, reads = spec_of(node), node.target is ops.unshard.default
        if ctx.has_collective(spec.group_id, spec.world) if reads else ctx.has_reduction(spec):
            remaining.append(node)
        elif reads:
            meta = memory_of(argument(node, "shard")).meta
            meta[IS_SHARD] = (*meta.get(IS_SHARD, ()), argument(node, "read"))
            gather_alone(node)
        else:
            reduce_alone(node)
    return remaining


def _one_per_shard(reads: list[Node]) -> list[Node]:
    """Merge reads of the same shard into the first one; return the remaining reads."""
    first: dict[Any, Node] = {}
    for read in reads:
        same = first.setdefault(argument(read, "shard"), read)
        if same is not read:
            read.replace_all_uses_with(same)
            read.graph.erase_node(read)
    return list(first.values())


def _one_per_parameter(gm: GraphModule, reductions: list[Node]) -> list[Node]:
    """Replace reductions of one parameter whose results are only added by one reduction of the sum of the gradients.

    Returns the remaining reductions.
    """
    by_read: dict[int, list[Node]] = defaultdict(list)
    for node in reductions:
        by_read[argument(node, "read")].append(node)
    for nodes in by_read.values():
        while (pair := _added(nodes)) is not None:
            total, first, second = pair
            with gm.graph.inserting_before(total):
                grads = [argument(node, "grad") for node in (first, second)]
                grad = add_call(gm.graph, aten.add.Tensor, *grads)
                merged = gm.graph.node_copy(first)
                merged.args = (grad, *first.args[1:])
                merged.meta["val"] = total.meta["val"]
            total.replace_all_uses_with(merged)
            for gone in (total, first, second):
                gm.graph.erase_node(gone)
            nodes[:] = [merged, *(node for node in nodes if node not in (first, second))]
    return [node for nodes in by_read.values() for node in nodes]


def _added(nodes: list[Node]) -> tuple[Node, Node, Node] | None:
    """Find an addition of two of ``nodes`` that have no other users; return the addition and the two."""
    for node in nodes:
        for user in node.users:
            if user.target is aten.add.Tensor and len(user.args) == 2 and not user.kwargs:
                first, second = user.args
                if first in nodes and second in nodes and first is not second:
                    assert isinstance(first, Node)
                    assert isinstance(second, Node)
                    if len(first.users) == len(second.users) == 1:
                        return user, first, second
    return None


def _leave_casts_to_buckets(reductions: list[Node]) -> None:
    """Remove casts of complete gradients to the reduction dtype; autograd of torch 2.15 makes them."""
    for node in reductions:
        grad, reduction = argument(node, "grad"), spec_of(node).reduction
        dtype = getattr(torch, reduction.dtype)
        if (
            grad.target is aten._to_copy.default
            and grad.kwargs == {"dtype": dtype}
            and len(grad.users) == 1
            and value(grad.args[0]).is_floating_point()
            and not reduction.any_dtype
        ):
            replace_by_input(grad)


def _copy_parts(reductions: list[Node]) -> None:
    """Copy gradients that are views of larger memory, because their reductions would keep all of it alive.

    For example, the gradient of a merged weight is one tensor, and those of its parts are views of it. The planner
    counts the bytes of the parts alone.
    """
    for node in reductions:
        grad = argument(node, "grad")
        if storage_bytes(memory_of(grad)) > tensor_bytes(value(grad)):
            with node.graph.inserting_after(grad):
                copied = add_call(node.graph, aten.clone.default, grad)
            set_argument(node, "grad", copied)


def _writes_what_is_read(gm: GraphModule, late: set[Node], gathers: list[Node]) -> bool:
    """Whether one of ``late`` writes to a shard that is gathered, or to memory that a later node reads."""
    shards = {memory_of(argument(gather, "shard")) for gather in gathers}
    written: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "output" and written and not written.isdisjoint(map(memory_of, node.all_input_nodes)):
            return True
        if node in late:
            written.update(written_by(node))
            if not written.isdisjoint(shards):
                return True
    return False


def _arranged(gm: GraphModule, gathers: list[Node], reductions: list[Node]) -> dict[Node, None]:
    """Return the graph's nodes in their new order."""
    gathered = set(gathers)
    lazy = set(computed_from_parameters(gm, lambda node: node in gathered)) | gathered
    reduced = set(reductions)
    late = descendants(reductions)
    if _writes_what_is_read(gm, late, gathers):  # an update of a shard keeps its place among that shard's readers
        late = set()
    order: dict[Node, None] = {}

    def emit(node: Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [i for i in current.all_input_nodes if i not in order]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if current in order:
                continue
            order[current] = None
            for user in current.users:
                if user in reduced and user not in order and all(i in order for i in user.all_input_nodes):
                    order[user] = None

    output = next(iter(reversed(gm.graph.nodes)))
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            order[node] = None
    for node in cut_ids(gm):  # to the top, like inputs, because no plan has a place for them
        node.meta[IS_ID] = True
        emit(node)
    for node in gm.graph.nodes:
        if ENCODES in node.meta:
            emit(node)
    for node in gm.graph.nodes:
        if node not in lazy and node not in late and node not in reduced and node is not output:
            emit(node)
    # A gather that only the output uses goes after all compute, because its wait comes first in its segment.
    for comes in (
        lambda node: node not in gathered and node not in late,
        lambda node: node in gathered,
        lambda _: True,
    ):
        for node in gm.graph.nodes:
            if node is not output and comes(node):
                emit(node)
    order[output] = None
    return order
