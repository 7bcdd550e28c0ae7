"""Move reads out of the branches and bodies of a Dynamo graph's control flow, in front of it.

Ranks may take different branches of ``torch.cond``, or run a loop's body a different number of times. A collective in
there would have no counterpart on the other ranks. So every parameter that a branch may need is gathered before, once,
and is an operand of the control flow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat.graphs import is_higher_order

_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
"""Ops whose last argument is a tuple of all values from outside, which are the last inputs of their bodies."""


def hoist_reads(gm: GraphModule, reads: tuple[Any, ...]) -> None:
    """Move calls of ``reads`` out of branches and bodies, in place."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not is_higher_order(node.target):
            continue
        bodies = [getattr(gm, str(arg.target)) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        if node.target.name() in _CONTROL_FLOW and all(isinstance(body, GraphModule) for body in bodies):
            for body in bodies:
                hoist_reads(body, reads)
            _hoist_out_of(gm, node, bodies, reads)


def _hoist_out_of(gm: GraphModule, node: Node, bodies: list[GraphModule], reads: tuple[Any, ...]) -> None:
    *others, lifted = node.args
    operands: list[Any] = list(lifted)  # type: ignore[arg-type]
    inputs_of = {body: body.graph.find_nodes(op="placeholder")[-len(operands) :] for body in bodies if operands}
    moved: dict[Any, Node] = {}
    read_by: set[Any] = set()
    found: list[tuple[GraphModule, Node, Any]] = []
    for body, inputs in inputs_of.items():
        outside = dict(zip(inputs, operands, strict=True))
        for read in [each for each in body.graph.nodes if each.target in reads]:
            if not all(each in outside for each in read.all_input_nodes):
                continue  # it reads a value that the body itself has made
            key = read.target, torch.fx.map_arg(read.args, outside.__getitem__)
            if key not in moved:
                with gm.graph.inserting_before(node):
                    moved[key] = gm.graph.call_function(*key)
                moved[key].meta = dict(read.meta)
            found.append((body, read, key))
            read_by.update(outside[each] for each in read.all_input_nodes)
    for body, inputs in inputs_of.items():
        for outer in moved.values():
            with body.graph.inserting_after(inputs[-1]):
                inputs.append(body.graph.placeholder(outer.name))
            inputs[-1].target = inputs[-1].name  # names of arguments and results share one namespace
            inputs[-1].meta = dict(outer.meta)
    operands += moved.values()
    for body, read, key in found:
        read.replace_all_uses_with(inputs_of[body][operands.index(moved[key])])
        body.graph.erase_node(read)
    # Remove operands that only the moved reads have used (shards).
    stays = [
        operand not in read_by or any(inputs[i].users for inputs in inputs_of.values())
        for i, operand in enumerate(operands)
    ]
    for body, inputs in inputs_of.items():
        for each, is_taken in zip(inputs, stays, strict=True):
            if not is_taken:
                body.graph.erase_node(each)
        body.recompile()
    node.args = (*others, tuple(each for each, is_taken in zip(operands, stays, strict=True) if is_taken))
