"""Regather: let backward gather over fewer ranks (``reshard_after_forward=8``), from parts that forward saves.

Each rank of the smaller group saves a larger part of the full parameter, here an eighth instead of a 64th:

forward:   full = unshard(shard, ..)             ->  the same, and reshard(full, 8, ..), saved in the shard's place
backward:  full = unshard(shard, .., world=64)   ->  unshard(part, .., world=8), over the smaller group
"""

# Why: docs/design/graphs-and-passes.md, "Backward can gather over fewer ranks"

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import argument, calls, ops, set_argument, value
from compiled_fsdp.passes.views import memory_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def regather(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
    """Let ``forward`` save this rank's part of each full parameter, and ``backward`` gather from the parts."""
    fulls = {argument(node, "read"): node for node in calls(forward, ops.unshard.default)}
    saved = {node.name: node for node in forward.graph.nodes if node.op == "placeholder"}
    output = next(iter(reversed(forward.graph.nodes)))
    count = 0
    for unshard in calls(backward, ops.unshard.default):
        read, shard = ctx.reads[argument(unshard, "read")], argument(unshard, "shard")
        full = fulls.get(read.index)
        if read.backward_group is None or full is None or list(shard.users) != [unshard] or shard.name not in saved:
            continue
        group_id, world = read.backward_group
        if world == argument(unshard, "world"):  # forward gathers from parts already
            continue
        kept = next((user for user in full.users if user.target is ops.retain.default and argument(user, "spec")), None)
        with forward.graph.inserting_before(output):
            if kept is not None:  # this part stays after backward, too (``set_reshard_after_backward(8)``)
                piece = add_call(forward.graph, ops.retained.default, kept)
            else:
                piece = add_call(forward.graph, ops.reshard.default, full, world, group_id, read.dim)
        results = list(output.args[0])
        places = [i for i, result in enumerate(results) if result is saved[shard.name]]
        results[places[-1]] = (
            piece  # the last place, because saved tensors come after the results, and the shard may be a result, too
        )
        output.args = (type(output.args[0])(results),)
        shard.meta["val"] = value(piece)
        # the parts are cut from decoded parameters, and are not encoded again
        for name, given in (("world", world), ("group_id", group_id), ("device", None), ("codec", "")):
            set_argument(unshard, name, given)
        count += 1
    for gm in (forward, backward) if count else ():
        gm.graph.lint()
        gm.recompile()
    ctx.changed("regather", f"{count} of {len(ctx.reads)} reads gathered from pieces")


def cut_pieces_early(gm: GraphModule) -> None:
    """Move each ``reshard`` call right after the last use of its full parameter, which can be freed then."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[Node, Node] = {}
    pieces = calls(gm, ops.reshard.default)
    for node in gm.graph.nodes:
        if node.op == "output" or node in pieces:
            continue
        for used in node.all_input_nodes:
            last[memory_of(used)] = node
    for piece in pieces:
        full = argument(piece, "full")
        last_use = last.get(memory_of(full), full)
        max(last_use, full, key=place.__getitem__).append(piece)
        for user in piece.users:
            if user.target is ops.retained.default:
                piece.append(user)
