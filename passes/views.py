"""What shows whose memory in a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import transport
from compiled_fsdp.compat.graphs import fake_mode_of
from compiled_fsdp.passes.graph import aten, is_getitem, ops, value
from compiled_fsdp.passes.op_schema import schema_of


def is_view(node: Node) -> bool:
    """Whether a call's result shows memory of its inputs, and writes none of it."""
    if node.op != "call_function" or node.target is transport.WAIT:
        return False
    if node.target is aten._unsafe_view.default:  # its schema hides it
        return True
    schema = schema_of(node.target)
    return schema.aliases and not schema.written


def memory_of(node: Node) -> Node:
    """The node that made the memory which ``node`` shows: through views, in-place and out-variants, tuples, waits."""
    while node.op == "call_function":
        unseen = node.target in (transport.WAIT, aten._unsafe_view.default)  # by their schemas
        if unseen or (is_getitem(node) and is_view(node.all_input_nodes[0])):
            node = node.all_input_nodes[0]
        elif (source := _aliased(node)) is not None:
            node = source
        else:
            break
    return node


def _aliased(node: Node) -> Node | None:
    for given in _given(node, schema_of(node.target).shown):
        if isinstance(given, Node):
            return given
    return None


def written_by(node: Node) -> list[Node]:
    """What made the memory that a call writes to, through lists, keywords and views; empty for most calls."""
    found: list[Node] = []
    if node.op == "call_function" and (written := schema_of(node.target).written):
        torch.fx.map_arg(_given(node, written), lambda each: found.append(memory_of(each)))
    return found


def _given(node: Node, arguments: Iterable[tuple[int, str]]) -> tuple[Any, ...]:
    """What a call has for these arguments."""
    return tuple(node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in arguments)


def show_shared_memory(gm: GraphModule) -> None:
    """Let fake values share memory where the tensors will: what an op is replaced by in the end is its input.

    AOTAutograd looks at the fake values of a forward for what only its backward holds, and gives ("donates") that to
    Inductor, which then writes to it. A full parameter that stays unsharded is saved, and an output of the graph too.
    """
    shared: set[Node] = set()
    for node in gm.graph.nodes:
        target, given = node.target, node.args
        if target in (ops.retain.default, ops.use.default):
            target, given = aten.alias.default, node.args[:1]
        elif not (is_view(node) or is_getitem(node)) or shared.isdisjoint(node.all_input_nodes):
            continue
        fakes, named = (torch.fx.map_arg(each, value) for each in (given, node.kwargs))
        with fake_mode_of(fakes):
            node.meta["val"] = target(*fakes, **named)
        shared.add(node)
