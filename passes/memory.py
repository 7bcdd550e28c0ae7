"""The most bytes that a lowered graph holds at once, counted from the graph itself.

Memory is counted by storage: a result lives from its node to its last use, also through views. The inputs and outputs
of a collective live until its wait.
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.transport import LAUNCHES, WAIT
from compiled_fsdp.compat.graphs import hint, strides_of, tensors_in
from compiled_fsdp.passes.graph import is_getitem, kind_of
from compiled_fsdp.passes.views import memory_of


def peak_bytes(gm: GraphModule, *, backward: bool, shards: frozenset[str]) -> int:
    """Bytes at the peak of a graph, without the inputs named in ``shards``.

    Args:
        backward: inputs die with their last use, as those of a backward do; else the caller holds them to the end.
        shards: names of the placeholders that are not counted.
    """
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    owner = {node: memory_of(node) for node in nodes}
    dies: dict[Node, int] = {}
    for node in nodes:
        used = node.all_input_nodes
        if node.target is WAIT:
            launch = node.all_input_nodes[0]
            launch = launch.all_input_nodes[0] if is_getitem(launch) else launch
            of_model = kind_of(launch) is not None and not launch.meta.get("of_bucket")
            used = [*used, *(launch.all_input_nodes if launch.target in LAUNCHES or of_model else [])]
        for i in used:
            dies[owner[i]] = max(dies.get(owner[i], 0), place[node])
    live, freed = 0, [0] * (len(nodes) + 1)
    for node in nodes:
        if node.op == "placeholder" and node.name not in shards:
            live += storage_bytes(node)
            if backward:
                freed[dies.get(node, 0)] += storage_bytes(node)
    peak = live
    for i, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            live += storage_bytes(node)
            freed[dies.get(node, i)] += storage_bytes(node)
        peak = max(peak, live)
        if node.op != "output":
            live -= freed[i]
    return peak


def storage_bytes(node: Node) -> int:
    """Bytes of the tensors that a node returns; 0 for a tuple whose elements are taken, because those count."""
    if node.op == "call_function" and any(is_getitem(user) for user in node.users):
        return 0
    return sum(tensor_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; expanded dimensions count once."""
    numel = 1
    for size, stride in zip(tensor.shape, strides_of(tensor), strict=True):
        if not (isinstance(stride, int) and stride == 0):
            numel *= hint(size)
    return numel * tensor.element_size()
