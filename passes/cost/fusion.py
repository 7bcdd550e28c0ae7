"""Which nodes of a graph become one kernel, and which results are never stored, if Inductor generates the code.

Pointwise operations and reductions that depend on each other, with no matrix product or other library kernel in
between, become one kernel. A result that only its own kernel reads is not written to memory. Inductor also computes
some results again in each kernel that reads them; here those count as stored, so that no memory is left out.
"""

# Why: docs/design/memory.md, "What a fused kernel does not store"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from compiled_fsdp.passes.graph import NOT_STORED, OVERWRITES, is_getitem
from compiled_fsdp.passes.views import is_view, memory_of

aten = torch.ops.aten

# Library kernels, which always read their inputs from memory and write their output to it, because nothing fuses them.
_LIBRARY_KERNELS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten._scaled_mm,
    aten.sort, aten.topk, aten.index_put, aten.index_put_, aten.scatter_add, aten.embedding_dense_backward,
}  # fmt: skip
# Kernels whose operations torch does not count, each with the kernel whose formula is used instead.
COUNTED_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": aten._scaled_dot_product_flash_attention_backward,
}
# Namespaces of ops that do not count as compute: compiled_fsdp's ops and collectives, which have their own prices.
_PRICED_BY_CURVES = ("compiled_fsdp", "_c10d_functional", "c10d_functional")


# Library kernels that write their result into their first argument, if nothing else reads that later.
_SCATTERS = {aten.index_put, aten.scatter_add}


class Fusion:
    """The kernels that Inductor makes of a graph's nodes.

    Attributes:
        levels: the number of library kernels that come before each node. Nodes with the same number may be fused.
        unstored: the nodes whose results no kernel writes to memory.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.levels = _levels(gm)
        self.unstored: set[Node] = set()
        for node in gm.graph.nodes:
            if computes(node) and not self._is_stored(node):
                self.unstored.add(node)

    def sources(self, node: Node) -> list[Node]:
        """The stored tensors from which a node is computed, directly or through results that are not stored."""
        return stored_sources(node, self.unstored.__contains__)

    def _is_stored(self, node: Node) -> bool:
        return is_library(node) or not all(
            computes(user) and not is_library(user) and self.levels[user] == self.levels[node]
            for user in users_of(node)
        )


def stored_sources(node: Node, is_unstored: Callable[[Node], bool]) -> list[Node]:
    """The tensors from which a node is computed, where ``is_unstored`` says which nodes only hand on what they read."""
    found: dict[Node, None] = {}
    stack = [base_of(source) for source in node.all_input_nodes]
    while stack:
        source = stack.pop()
        if is_unstored(source):
            stack += [base_of(each) for each in source.all_input_nodes]
        else:
            found[source] = None
    return list(found)


def mark_memory(gm: GraphModule) -> Fusion:
    """Mark what Inductor's kernels do with memory: ``NOT_STORED`` and ``OVERWRITES``, keys of ``Node.meta``.

    Returns the kernels.
    """
    fusion = Fusion(gm)
    unstored = fusion.unstored
    for node in gm.graph.nodes:
        if not computes(node) or memory_of(node) is not node:
            continue
        if node in unstored:
            node.meta[NOT_STORED] = True
        elif getattr(call_of(node)[0], "overloadpacket", None) in _SCATTERS or is_pointwise(node):
            node.meta[OVERWRITES] = True
    return fusion


def _levels(gm: GraphModule) -> dict[Node, int]:
    """The number of library kernels on the longest path to each node.

    A pointwise operation whose users are all further down counts as one of theirs, because Inductor computes it where
    it is read.
    """
    levels: dict[Node, int] = {}
    for node in gm.graph.nodes:
        above = max((levels[i] for i in node.all_input_nodes), default=0)
        levels[node] = above + 1 if computes(node) and is_library(node) else above
        if node.op == "call_function" and not computes(node) and not is_view(node) and not is_getitem(node):
            levels[node] = above + 1  # a collective
    for node in reversed(gm.graph.nodes):
        if computes(node) and is_pointwise(node):
            users = users_of(node)
            below = {levels[user] for user in users}
            if len(below) == 1 and all(computes(user) and not is_library(user) for user in users):
                levels[node] = below.pop()
    return levels


def is_pointwise(node: Node) -> bool:
    """Whether each element of a node's result is computed from one element of each input."""
    return torch.Tag.pointwise in getattr(call_of(node)[0], "tags", ())


def is_library(node: Node) -> bool:
    """Whether a node is always a kernel of its own, which is never fused."""
    op = call_of(node)[0]
    if getattr(op, "overloadpacket", None) is None:
        return node.op == "call_function" and not is_getitem(node)
    return _is_library_kernel(op)


@functools.cache  # asked for each node, many times
def _is_library_kernel(op: Any) -> bool:
    return is_library_op(op.overloadpacket) or not _is_aten(op)


def is_library_op(packet: Any) -> bool:
    """Whether an op of torch is always a kernel of its own, which is never fused."""
    return packet in _LIBRARY_KERNELS or packet in flop_registry or packet.__name__ in COUNTED_AS


def computes(node: Node) -> bool:
    """Whether a node counts as compute. Views and collectives do not."""
    if node.op != "call_function" or is_view(node) or is_getitem(node):
        return False
    return getattr(node.target, "namespace", "") not in _PRICED_BY_CURVES


def base_of(node: Node) -> Node:
    """The node that a kernel reads: the node itself, or the source of a view. Elements of lists are read alone."""
    while node.op == "call_function" and is_view(node) and not is_getitem(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def users_of(node: Node) -> list[Node]:
    """The nodes that read a node, directly or through views; elements of lists count as readers."""
    found, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and is_view(user) and not is_getitem(user):
            stack += list(user.users)
        else:
            found.append(user)
    return found


def call_of(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that a node runs, and its arguments.

    In a checkpoint, random ops are wrapped: ``run_and_save_rng_state(op, *args)`` in forward, and
    ``run_with_rng_state(state, op, *args)`` in backward. For example attention, because it may have dropout. Such nodes
    have no ``meta["val"]``.
    """
    if not getattr(node.target, "__name__", "").endswith("rng_state"):
        return node.target, node.args, node.kwargs
    places = (i for i, argument in enumerate(node.args) if hasattr(argument, "overloadpacket"))
    if (place := next(places, None)) is not None:
        kwargs = {name: given for name, given in node.kwargs.items() if name != "rng_state"}
        return node.args[place], node.args[place + 1 :], kwargs
    return node.target, node.args, node.kwargs


def _is_aten(op: Any) -> bool:
    return getattr(op, "namespace", "") in ("aten", "prims")
