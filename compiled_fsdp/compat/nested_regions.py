"""Nested regions and other higher-order ops: notes made while Dynamo traces their bodies, and bodies put in place."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch

from compiled_fsdp.compat.dynamo import _dynamo
from compiled_fsdp.compat.graphs import copy_of

_notes: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

# What Dynamo's output gets: its table of what traced code has written, when it was last looked at.
_TABLE = "_compiled_fsdp_table"


def notes_of_bodies() -> list[list[Any]]:
    """While Dynamo traces the body of a higher-order op (a nested region, a checkpoint): a list to keep notes in.

    It is gone when the body has been traced, or is traced once more: a body is traced as a whole or not at all. Code in
    it that changes an object outside would keep torch from taking the body's graph for equal calls.

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
    """While Dynamo traces: whether it is the body of a higher-order op (a checkpoint) that it does not put in place.

    A nested region that changes something outside is put in place, and so is no such body.
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
    """While Dynamo traces: let what the code writes to attributes from here on be kept.

    After the body of ``torch.cond``, ``map``, ``while_loop`` or a tensor's hook Dynamo goes on with a copy of its table
    of writes. Objects that it had seen before write to the table that was copied, which is then dropped (torch 2.13 and
    2.14).
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
        if "side_effects" in getattr(attributes, "__dict__", ()):  # torch 2.15 looks it up
            attributes.side_effects = table


def inline_nested_regions(gm: torch.fx.GraphModule) -> None:
    """Put the body of each ``torch.compiler.nested_compile_region`` in the place of its calls, in nested graphs, too.

    Every call gets nodes and nested graphs of its own.

    Raises:
        NotImplementedError: for a region with options, which would be compiled alone.
    """
    for _, body in _bodies(gm):
        if body.meta.get("nested_region_config") is not None:
            raise NotImplementedError(
                "compiled_fsdp: torch.compiler.nested_compile_region(options=...) compiles a region alone, and the "
                "collectives inside of it would be hidden by nothing. Leave its options out."
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
    """Give ``gm`` an attribute; returns under which name."""
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
