"""Follow: replace reads and reductions by calls of the runtime, in a graph that the other ranks do not have.

    unshard(shard, ..)    ->  follow_unshard(shard, ..)
    reduce_grad(grad, ..) ->  follow_reduce(grad, ..) -> expand

The other ranks run code that was compiled for an agreed plan, and the runtime takes part in that plan's collectives.
So compiled_fsdp puts no collectives and no buckets into this graph, and the planner does not see it. For example, rank
0 alone prints in a forward, and a graph break divides it into two graphs there. Both follow the plan of the other
ranks' single graph.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import argument, calls, ops, set_argument

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def follow(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Let the runtime gather the graph's parameters and reduce its gradients."""
    gathers, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
    # Compiled autograd's graph takes part in a plan of its own, which does not count pending gradients.
    waits = () if calls(gm, ops.accumulate_grad.default) else calls(gm, ops.accumulate.default)
    gradients = [argument(node, "read") for node in (*reductions, *waits)]
    kind = "training" if ctx.grad_enabled else "inference"
    for node in gathers:
        with gm.graph.inserting_before(node):
            given = [argument(node, name) for name in ("shard", "param_id", "spec")]
            full = add_call(gm.graph, ops.follow_unshard.default, *given, kind)
        node.replace_all_uses_with(full)
        gm.graph.erase_node(node)
    for node in reductions:
        with gm.graph.inserting_before(node):
            reduce_text, dtype = argument(node, "reduce"), argument(node, "dtype")
            if ReduceSpec.parse(reduce_text).sync is GradSync.SHARDS_ONLY:
                dtype = getattr(torch, ReduceSpec.parse(reduce_text).dtype)
            grad, param_id, size = (argument(node, name) for name in ("grad", "param_id", "reduced_size"))
            zero = add_call(gm.graph, ops.follow_reduce.default, grad, param_id, dtype, reduce_text)
            stand_in = add_call(gm.graph, torch.ops.aten.expand.default, zero, size)
        node.replace_all_uses_with(stand_in)
        gm.graph.erase_node(node)
    for node in waits:
        set_argument(node, "follows", True)
    ctx.followed_gradients = tuple(gradients)
    gm.graph.lint()
    ctx.changed("follow", f"{len(gathers)} gathers and {len(reductions)} reductions follow another plan")
    return gm
