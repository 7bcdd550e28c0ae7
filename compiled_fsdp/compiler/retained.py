"""Full parameters, or parts of them, that checkpoints in a graph read, and that stay for the next microbatch.

With ``set_reshard_after_backward(False)`` a forward keeps its full parameters. Dynamo stores those that are read
outside of checkpoints (``schema.retain``), but lets code in a checkpoint store nothing. All ranks have to keep the same
ones, and some ranks may run a layer without a checkpoint. So the graph returns the others, too, and the code's caller
stores them (``shared_code.py``).
"""

# Why: docs/design/reads.md, "Kept full parameters are outputs of the graph"

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat.graphs import call_without_grad
from compiled_fsdp.ops import schema
from compiled_fsdp.passes.graph import argument
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of


def return_retained(gm: GraphModule, parameters: Mapping[Node, ShardedParameter]) -> tuple[int, ...]:
    """Append the full parameters to a Dynamo graph's results.

    Args:
        gm: the graph; its reads have their numbers.
        parameters: the parameter of each read.

    Returns: the indices of their reads, in the order of the new results.
    """
    if not torch.is_grad_enabled():  # no backward will come
        return ()
    known = [argument(node.args[0], "read") for node in gm.graph.nodes if node.target is schema.retain]
    new: list[int] = []
    texts: list[str] = []

    def stays(node: Node) -> bool:
        if node.target is not schema.unshard or not (unit := unit_of(parameters[node])).retain_across_microbatches:
            return False
        read = argument(node, "read")
        if read in known or read in new or argument(node, "world") == 1 or unit.has_retained(parameters[node]):
            return False
        new.append(read)
        texts.append(parameters[node].part_text(unit.ranks_of_parts) if unit.ranks_of_parts else "")
        return True

    results = []
    for full, text in zip(_returned_by_checkpoints(gm, stays), texts, strict=True):
        with gm.graph.inserting_before(full.next):
            results.append(call_without_grad(gm.graph, schema.retain, full, text))
    _add_results(gm, results)
    return tuple(new)


def _returned_by_checkpoints(gm: GraphModule, wanted: Callable[[Node], bool], *, inside: bool = False) -> list[Node]:
    """Let checkpoints return those of their nodes that are ``wanted``, where gradients are enabled.

    Returns the nodes of ``gm`` that stand for them; if ``gm`` is inside of a checkpoint, also its own wanted nodes.
    """
    returned: list[Node] = []
    grad = True
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif inside and grad and wanted(node):
            returned.append(node)
        elif grad and node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(gm, node.args[0].target)
            if found := _returned_by_checkpoints(body, wanted, inside=True):
                first = _add_results(body, found)
                with gm.graph.inserting_before(node.next):
                    places = range(first, first + len(found))
                    returned += [gm.graph.call_function(operator.getitem, (node, place)) for place in places]
    return returned


def _add_results(gm: GraphModule, results: list[Node]) -> int:
    """Append ``results`` to the graph's results; return the place of the first one."""
    output: Any = gm.graph.output_node()
    before = output.args[0]
    output.args = ((*before, *results),)
    gm.recompile()
    return len(before)
