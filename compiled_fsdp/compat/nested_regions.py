"""Nested regions and other higher-order ops: notes while Dynamo traces their bodies, and inlining of the bodies."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch

from compiled_fsdp.compat.dynamo import _dynamo
from compiled_fsdp.compat.graphs import copy_of

_notes: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

# Attribute that is set on Dynamo's output: its table of side effects at the last look.
_TABLE = "_compiled_fsdp_table"


def notes_of_bodies() -> list[list[Any]]:
    """While Dynamo traces the body of a higher-order op (a nested region, a checkpoint): return lists to keep notes in.

    For example, a unit's forward hooks note there that the unit is open. They cannot change the unit itself, because
    torch does not reuse the graph of a body that changes an object outside. A body's list is gone as soon as Dynamo has
    traced the body or traces it again, because Dynamo traces a body as a whole or not at all.

    Returns:
        The body's own list, then those of the bodies around it; none outside of bodies.
    """
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    tracer = None if tx is None else tx.output.current_tracer
    found = []
    while tracer is not None and tracer.parent is not None:
        found.append(_notes.setdefault(tracer, []))
        tracer = tracer.parent
    return found


@torch.compiler.assume_constant_result
def in_lasting_body() -> bool:
    """While Dynamo traces: whether it is in the body of a higher-order op that stays in the graph.

    For example, a checkpoint is such an op. Code in its body cannot store a tensor outside. The body of a nested region
    does not count, because it replaces the region's calls in the graph.
    """
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    tracer = None if tx is None else tx.output.current_tracer
    while tracer is not None and tracer.parent is not None:
        if tracer.source_target is not torch.ops.higher_order.invoke_subgraph:
            return True
        tracer = tracer.parent
    return False


@torch.compiler.assume_constant_result
def keep_writes_after_bodies() -> None:
    """While Dynamo traces: keep Dynamo from losing the attribute writes of the code that follows.

    After the body of ``torch.cond``, ``map``, ``while_loop`` or a tensor's hook, Dynamo goes on with a copy of its
    table of side effects. But objects that it had seen before still write to the original table, which is then dropped
    (torch 2.13 and 2.14).
    """
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    if tx is None:
        return
    output: Any = tx.output
    table = output.side_effects
    if vars(output).setdefault(_TABLE, table) is table:
        return
    setattr(output, _TABLE, table)
    for variable in table.id_to_variable.values():
        attributes: Any = getattr(getattr(variable, "dict_vt", None), "items", None)
        if "side_effects" in getattr(attributes, "__dict__", ()):  # torch 2.15 looks the table up at each write
            attributes.side_effects = table


def inline_nested_regions(gm: torch.fx.GraphModule) -> None:
    """Replace the calls of each ``torch.compiler.nested_compile_region`` by its body, in nested graphs, too.

    Every call gets its own copies of the body's nodes and nested graphs.

    Raises:
        NotImplementedError: a region has options, with which it would be compiled alone.
    """
    for _, body in _bodies(gm):
        if body.meta.get("nested_region_config") is not None:
            raise NotImplementedError(
                "compiled_fsdp: torch.compiler.nested_compile_region(options=...) compiles a region by itself, so "
                "no compute outside of it could hide its collectives. Leave its options out."
            )
        inline_nested_regions(body)
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    for call in calls:
        _inline(gm, call)
    if calls:
        gm.delete_all_unused_submodules()
        gm.recompile()


def _bodies(gm: torch.fx.GraphModule) -> list[tuple[str, torch.fx.GraphModule]]:
    return [(name, child) for name, child in gm.named_children() if isinstance(child, torch.fx.GraphModule)]


def _inline(gm: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    attribute: Any = call.args[0]
    body: Any = getattr(gm, attribute.target)
    values: dict[torch.fx.Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True)  # after body and name
    )
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            values[node] = copied = gm.graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                copied.target = _adopt(gm, node.target, getattr(body, node.target))
    results: Any = torch.fx.map_arg(body.graph.output_node().args[0], values.__getitem__)
    for user in list(call.users):  # a body's result is a tuple
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    if not attribute.users:
        gm.graph.erase_node(attribute)


def _adopt(gm: torch.fx.GraphModule, name: str, value: Any) -> str:
    """Set an attribute of ``gm`` under a free name, and return that name."""
    number = 0
    while hasattr(gm, free := f"{name}_{number}"):
        number += 1
    setattr(gm, free, _deep_copy_of(value) if isinstance(value, torch.fx.GraphModule) else value)
    return free


def _deep_copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    out = copy_of(gm)
    for name, body in _bodies(out):
        setattr(out, name, _deep_copy_of(body))
    return out
