"""Verify: the lowered graph launches what the plan says, in its order, and waits for each launch once before using it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node, map_arg

from compiled_fsdp.passes.graph import REDUCE, WAIT, planned_collectives

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext


class GraphIsWrong(RuntimeError):
    """A pass broke the graph. Please report it, with the output of TORCH_LOGS="+compiled_fsdp"."""


def verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Check the lowered graph; changes nothing.

    Raises:
        GraphIsWrong: a collective that the plan does not have, or out of order; a use before its wait; a parameter that is
            written before it is gathered.
    """
    if ctx.verify == "off":
        ctx.changed("verify", "off")
        return gm
    check_graph(gm, after="lower")
    launches = planned_collectives(gm)
    if ctx.plan is not None and not ctx.disabled & {"bucket", "lower"}:
        launched = [("reduce" if n.target is REDUCE else "gather", n.meta.get("reads")) for n in launches]
        planned = [(bucket.kind, bucket.reads) for bucket in ctx.plan.launches]
        if launched != planned:
            raise GraphIsWrong(
                f"compiled_fsdp: the lowered {ctx.phase} graph launches {launched}, planned were {planned}."
            )
    ctx.changed("verify", f"{len(launches)} collectives as planned")
    return gm


def check_graph(gm: GraphModule, after: str) -> None:
    """Invariants of any graph of ours: it lints, every launch is waited for once, no shard is written before it is read."""
    gm.graph.lint()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    launches = planned_collectives(gm)
    for launch in launches:
        if [user.target for user in launch.users] != [WAIT]:
            raise GraphIsWrong(
                f"compiled_fsdp: after {after}: {launch} is used by {list(launch.users)}, not by one wait."
            )
    written = _writes(gm)
    for launch in launches:
        if launch.target is not REDUCE:
            for source in _inputs_of(launch):
                for write in written.get(source, ()):
                    if order[write] < order[launch]:
                        raise GraphIsWrong(
                            f"compiled_fsdp: after {after}: {write} writes {source} before {launch} gathers it."
                        )


def _inputs_of(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current.op == "placeholder":
            found.add(current)
        else:
            stack.extend(current.all_input_nodes)
    return found


def _writes(gm: GraphModule) -> dict[Node, list[Node]]:
    """Inputs of the graph and the nodes that write them, through lists, keywords and views too."""
    writes: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for position, argument in enumerate(schema.arguments):
            if argument.is_write:
                value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                written: list[Node] = []
                map_arg(value, written.append)
                for tensor in map(_viewed, written):
                    writes.setdefault(tensor, []).append(node)
    return writes


def _viewed(node: Node) -> Node:
    """What ``node`` is a view of, or itself."""
    schema = getattr(node.target, "_schema", None)
    while schema is not None and any(result.alias_info is not None for result in schema.returns):
        node = node.all_input_nodes[0]
        schema = getattr(node.target, "_schema", None)
    return node
