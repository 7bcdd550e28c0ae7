"""Merges the reads of one parameter in a Dynamo graph, so that its gradients are summed before they are reduced."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.ops import schema
from compiled_fsdp.ops.autograd import attach
from compiled_fsdp.ops.pieces import is_hook_code

READS = (schema.read, schema.unshard, attach)


class _IdsOfBlocks:
    """Takes one ``param_id`` out of a block's numbers in a Dynamo graph, with one node for each number."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Node, int], Node] = {}
        # The read that the number is for.
        self.read: Any = None

    def __call__(self, ids: Any, position: int) -> Any:
        if (ids, position) not in self._nodes:
            with self.read.graph.inserting_before(self.read):
                node = self.read.graph.call_function(torch.narrow, (ids, 0, position, 1))
            if (value := ids.meta.get("example_value")) is not None:
                node.meta["example_value"] = value.narrow(0, position, 1)
            self._nodes[ids, position] = node
        return self._nodes[ids, position]


def merge_reads(gm: GraphModule) -> None:
    """Merge the reads of one parameter in one graph and grad mode into one node."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        id_at = _IdsOfBlocks()
        grad, inference = True, 0
        first: dict[Any, Node] = {}
        for node in list(module.graph.nodes):
            if node.op != "call_function":
                continue
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                grad = bool(node.args[0])
            elif name in ("_enter_inference_mode", "_exit_inference_mode"):
                inference += 1 if name.startswith("_enter") else -1
            elif node.target in READS:
                if node.target is schema.read:
                    id_at.read = node
                    node.target, node.args = schema.unshard, schema.unshard_args(id_at, *node.args)
                key = (grad, inference, node.args)
                if not node.users:  # read but not used, as in next(self.parameters()).dtype
                    module.graph.erase_node(node)
                elif key in first:
                    node.replace_all_uses_with(first[key])
                    module.graph.erase_node(node)
                else:
                    first[key] = node
            elif is_hook_code(node.target) or (node.target is operator.getitem and is_hook_code(node.args[0].target)):
                same = first.setdefault((grad, inference, node.target, node.args), node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    module.graph.erase_node(node)
        module.recompile()
