"""Memory that nodes of a graph share: views, in-place results, written inputs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import transport
from compiled_fsdp.compat.graphs import fake_mode_of
from compiled_fsdp.passes.graph import argument, aten, is_getitem, ops, value
from compiled_fsdp.passes.op_schema import schema_of


def is_view(node: Node) -> bool:
    """Whether a call's result shares memory with its inputs, and the call writes no input.

    So do the lists that ``split`` and ``unbind`` return, and the elements that are taken from these.
    """
    if node.op != "call_function":
        return False
    if is_getitem(node):
        return is_view(node.all_input_nodes[0])
    return _returns_view(node.target)


@functools.cache  # passes ask for each node, many times
def _returns_view(target: Any) -> bool:
    if target is transport.WAIT:
        return False
    if target is aten._unsafe_view.default:  # its schema hides it
        return True
    schema = schema_of(target)
    return schema.aliases and not schema.written


def memory_of(node: Node) -> Node:
    """The node that made the memory of ``node``, through views, in-place ops, out-variants, tuples and waits."""
    while node.op == "call_function":
        unseen = node.target in (transport.WAIT, aten._unsafe_view.default)  # their schemas hide the shared memory
        if unseen or (is_getitem(node) and is_view(node)):
            node = node.all_input_nodes[0]
        elif (source := _aliased(node)) is not None:
            node = source
        else:
            break
    return node


def _aliased(node: Node) -> Node | None:
    """The argument whose memory a call's result shares; None if there is none."""
    for given in _given(node, schema_of(node.target).shown):
        if isinstance(given, Node):
            return given
    return None


def written_by(node: Node) -> list[Node]:
    """The nodes that made the memory which a call writes, through lists, keywords and views; empty for most calls."""
    found: list[Node] = []
    if node.op == "call_function" and (written := schema_of(node.target).written):
        torch.fx.map_arg(_given(node, written), lambda each: found.append(memory_of(each)))
    return found


def _given(node: Node, arguments: Iterable[tuple[int, str]]) -> tuple[Any, ...]:
    """The values that a call has for these arguments, each given by its position and its name."""
    return tuple(node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in arguments)


def show_shared_memory(gm: GraphModule) -> None:
    """Give fake values the aliases that the tensors will have: ``retain`` and ``use`` will be replaced by their inputs.

    AOTAutograd asks the fake values of a forward which saved tensors only the backward holds. It donates those to
    Inductor, which overwrites them. For example, a full parameter that stays unsharded is saved for backward and is an
    output of the graph, too, so that Inductor must not overwrite it.
    """
    shared: set[Node] = set()
    for node in gm.graph.nodes:
        target, given = node.target, node.args
        if (target is ops.retain.default and not argument(node, "spec")) or target is ops.use.default:
            target, given = aten.alias.default, node.args[:1]
        elif not (is_view(node) or is_getitem(node)) or shared.isdisjoint(node.all_input_nodes):
            continue
        fakes, named = (torch.fx.map_arg(each, value) for each in (given, node.kwargs))
        with fake_mode_of(fakes):
            node.meta["val"] = target(*fakes, **named)
        shared.add(node)
