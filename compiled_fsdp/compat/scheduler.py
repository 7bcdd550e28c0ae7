"""Passes that keep launches and waits in order in Inductor's scheduler.

Inductor fuses two kernels without regard to the nodes between them, and puts the fused kernel where its first part was.
For example, the statistics of a norm need no parameter, but the product with the norm's weight comes after the weight's
wait. If Inductor fuses both, the wait moves in front of the statistics: before launches that came after them, or before
compute that was to hide the gather.

No data dependency keeps collectives in order. Inductor adds dependencies of its own between launches. The pass before
fusion adds the same between waits, and the pass after fusion puts each kernel where its last part was.
"""

# Why: docs/design/torch.md, "Waits keep their place while Inductor fuses"

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

# The nodes of Inductor's scheduler, in order.
Nodes = list[Any]


class PlannedOrder:
    """Two passes for the scheduler of one graph: before kernels are fused, and after it.

    Args:
        key: part of the compile cache's key.
        ordered: whether calls of an op keep their order among all calls of such ops.
        trusted: whether an op's results are as its fake says, so that the code does not assert each of them in each
            call.
    """

    def __init__(
        self,
        key: bytes,
        ordered: Callable[[torch._ops.OpOverload], bool],
        trusted: Callable[[torch._ops.OpOverload], bool],
    ) -> None:
        self._ordered, self._trusted = ordered, trusted
        self._place: dict[str, int] = {}
        self.options = {
            "_pre_fusion_custom_pass": _scheduler_pass(self._before_fusion, key),
            "_post_fusion_custom_pass": _scheduler_pass(self._after_fusion, key),
        }

    def _before_fusion(self, nodes: Nodes) -> Nodes:
        from torch._inductor.dependencies import WeakDep

        self._place = {part.get_name(): place for place, node in enumerate(nodes) for part in node.get_nodes()}
        for before, node in pairwise(filter(self._keeps_order, nodes)):
            mutating = next(iter(node.get_buffer_names()))
            for name in before.get_buffer_names():
                # a fake dependency does not make the buffer live longer
                node.add_fake_dep(WeakDep(name, mutating_buf=mutating, is_fake=True))
        _update_ancestors(nodes)
        for node in nodes:
            if hasattr(node.node, "skip_size_stride_alignment_checks"):  # one of an op's several results
                op = _op_of(node.node.inputs[0])
                node.node.skip_size_stride_alignment_checks |= op is not None and self._trusted(op)
        return nodes

    def _keeps_order(self, node: Any) -> bool:
        op = _op_of(node.node)
        return op is not None and self._ordered(op) and bool(node.get_buffer_names())

    def _after_fusion(self, nodes: Nodes) -> Nodes:
        """Sort the kernels: each goes where its last part was, or in front of the first kernel that needs it."""
        producers = _producers(nodes)
        place = {node: max(self._place.get(part.get_name(), 0) for part in node.get_nodes()) for node in nodes}
        for node in reversed(nodes):
            for producer in producers[node]:
                if not self._keeps_order(producer):
                    place[producer] = min(place[producer], place[node])
        return sorted_by(nodes, producers, place)


def sorted_by(nodes: Nodes, producers: dict[Any, list[Any]], place: dict[Any, int]) -> Nodes:
    """Return the nodes in topological order.

    Among nodes that are ready, the one with the lowest place comes first; among equal places, the one that was first.
    """
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    missing = {node: len(producers[node]) for node in nodes}
    for node in nodes:
        for producer in producers[node]:
            users[producer].append(node)
    number = {node: i for i, node in enumerate(nodes)}
    ready = [(place[node], number[node]) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    out: Nodes = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        out.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], number[user]))
    assert len(out) == len(nodes), "a circle of kernels"
    return out


def _op_of(kernel: Any) -> torch._ops.OpOverload | None:
    """Return the op that a kernel calls as it is; None for a kernel that Inductor generates."""
    op = getattr(kernel, "op_overload", None)
    return op if isinstance(op, torch._ops.OpOverload) else None


def _producers(nodes: Nodes) -> dict[Any, list[Any]]:
    """Return for each node the other nodes whose buffers it needs."""
    maker = {name: node for node in nodes for name in node.get_buffer_names()}
    found = {}
    for node in nodes:
        made = (maker.get(dep.name) for dep in node.unmet_dependencies)
        found[node] = list(dict.fromkeys(other for other in made if other is not None and other is not node))
    return found


def _update_ancestors(nodes: Iterable[Any]) -> None:
    """Update the nodes' ancestors, because fusion looks at them to avoid a cycle."""
    by_buffer: dict[str, set[str]] = {}
    for node in nodes:
        above: set[str] = set()
        for dep in node.unmet_dependencies:
            above |= by_buffer.get(dep.name, set())
        node.ancestors |= above
        own = above | {part.get_name() for part in node.get_nodes()}
        by_buffer |= dict.fromkeys(node.get_buffer_names(), own)


def _scheduler_pass(function: Callable[[Nodes], Nodes], key: bytes) -> Any:
    from torch._inductor import custom_graph_pass

    # torch 2.11 has no CustomSchedulerPass
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class SchedulerPass(base):  # type: ignore[misc]
        def __call__(self, nodes: Nodes) -> Nodes:
            return function(nodes)

        def uuid(self) -> bytes:
            return key

        def __reduce__(self) -> Any:  # the cache pickles the configuration, this object in it, into its key
            return bytes, (key,)

    return SchedulerPass()
