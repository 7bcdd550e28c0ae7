"""What is alive while a graph runs, besides shards, gathered parameters and complete gradients.

Those are counted by the simulator, because the plan decides how long they live.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from compiled_fsdp.passes.graph import IS_SHARD, argument, calls, ops, waited_for
from compiled_fsdp.passes.memory import Lifetimes
from compiled_fsdp.passes.segments import Segments


@dataclass(frozen=True)
class HeldByModule:
    """The tensors of one module, or of equal layers together, that are alive at a graph's peak."""

    # The module that computed them in forward, with ``*`` for numbers; "" for the model itself.
    module: str
    # "input": of the graph. "saved": for backward, or returned. "temporary": everything else.
    kind: str
    # On one rank.
    bytes: int
    tensors: int


class Alive:
    """The tensors that are alive while each node of a graph runs.

    Args:
        gm: the graph that ``arrange`` has put in order.
        segments: its segments.
        backward: whether it is a backward, whose inputs die with their last uses.
    """

    def __init__(self, gm: GraphModule, segments: Segments, *, backward: bool) -> None:
        self._nodes, self._segments, self._backward = list(gm.graph.nodes), segments, backward
        self._memory = memory = Lifetimes(gm, _held_by_waits, backward=backward)
        reads, reductions = calls(gm, ops.unshard.default), calls(gm, ops.reduce_grad.default)
        shards = {memory.owner[argument(node, "shard")] for node in reads}
        shards |= {node for node in self._nodes if IS_SHARD in node.meta}
        self._planned = {*reads, *reductions}
        self._uncounted = self._planned | shards

    def last_segment(self, node: Node, default: int) -> int:
        """The segment in which a node's memory is used last; ``default`` if nothing uses it."""
        place = self._memory.dies.get(node)
        return default if place is None else self._segments.at(self._nodes[place])

    def most(self) -> list[int]:
        """The most bytes alive in each segment."""
        out = [0] * (self._segments.end + 1)
        size = 0
        for segment, size, _ in self._walk():
            out[segment] = max(out[segment], size)
        # an empty segment holds the bytes that are alive between its neighbours
        return [out[0], *(most or size for most in out[1:])]

    def by_module(self, segment: int) -> tuple[HeldByModule, ...]:
        """What is alive when the most bytes of a segment are, the largest part first."""
        most, tensors = -1, dict[Node, int]()
        for at, size, alive in self._walk():
            if at > segment and most >= 0:
                break
            if at >= segment and size > most:  # if the segment is empty, what the next one begins with
                most, tensors = size, dict(alive)
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for node, size in tensors.items():
            if size:
                found[module_of(node), self._kind(node)].append(size)
        parts = [HeldByModule(*key, sum(sizes), len(sizes)) for key, sizes in found.items()]
        return tuple(sorted(parts, key=lambda part: -part.bytes))

    def _kind(self, node: Node) -> str:
        if node.op == "placeholder":
            return "saved" if self._backward and "tangents" not in node.name else "input"
        ends = self._memory.dies.get(node) == len(self._nodes) - 1
        return "saved" if ends and not self._backward else "temporary"

    def _walk(self) -> Iterator[tuple[int, int, dict[Node, int]]]:
        """Yield the segment of each node in order, the bytes alive while it runs, and what is alive.

        What is alive is the bytes of each tensor by the node that made it: one dictionary, which changes.
        """
        memory, segments = self._memory, self._segments
        counted = [node for node in self._nodes if memory.is_stored(node) and node not in self._uncounted]
        alive = {node: memory.bytes(node) for node in counted if node.op in ("placeholder", "get_attr")}
        size, segment = sum(alive.values()), 0
        freed: dict[int, list[Node]] = defaultdict(list)
        for node in counted:
            held_by_caller = node.op == "get_attr" or (node.op == "placeholder" and not self._backward)
            if not held_by_caller and node in memory.dies:
                freed[memory.dies[node]].append(node)
        yield 0, size, alive
        for place, node in enumerate(self._nodes):
            segment = segments.of.get(node, segments.start.get(node, segment))
            if node.op == "output":
                yield segments.end, size, alive
                return
            if node not in self._planned:
                if node.op == "call_function" and memory.is_stored(node):
                    alive[node] = memory.bytes(node)
                    size += alive[node]
                yield segment, size - memory.overlap(node), alive
                if node not in memory.dies:
                    size -= alive.pop(node, 0) if node.op == "call_function" else 0
            for dead in freed.get(place, ()):  # at a reduction its gradient, which the simulator counts from there on
                size -= alive.pop(dead)


def module_of(node: Node) -> str:
    """The name of the module whose forward computed a node, or whose backward did, with ``*`` for numbers."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values())), "")
    return re.sub(r"\b\d+\b", "*", re.sub(r"^L\['\w+'\]\.?", "", path))


def _held_by_waits(node: Node) -> list[Node]:
    """The inputs of the model's own collectives that a node waits for: they live until then."""
    return [i for launch in waited_for(node) for i in launch.all_input_nodes]
