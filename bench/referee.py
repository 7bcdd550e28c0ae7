"""One referee for every plan: what a lowered graph takes in time and memory, node by node, with the planner's cost model.

It knows nothing of plans: compute runs in the graph's order, a collective starts when compute has issued it and the ones
before it are done, a wait stops compute. Copies in and out of buckets are compute like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat import hint, tensors_in
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.cost.compute import node_costs
from compiled_fsdp.passes.graph import COLLECTIVES, WAIT, is_gather, is_getitem, memory_of


@dataclass(frozen=True)
class Price:
    """Seconds and peak bytes of a graph; ``persistent`` bytes are not counted."""

    seconds: float
    peak: int
    exposed: float
    collectives: int


def price(
    gm: GraphModule, hardware: Hardware, world: int, *, backward: bool, shards: frozenset[str] = frozenset()
) -> Price:
    """Simulate a lowered graph. ``shards``: names of inputs that are sharded parameters, which are not counted as memory."""
    costs = node_costs(gm, fused=True)
    now = free = exposed = 0.0
    busy: list[tuple[float, float]] = []
    ends: dict[Node, float] = {}
    count = passed = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in COLLECTIVES:
            curve = hardware.curve("gather" if is_gather(node) else "reduce", world)
            sizes = [_bytes(t) for t in tensors_in(_full(node))]
            start = max(now, free)
            free = start + curve.latency + (len(sizes) - 1) * curve.each + sum(sizes) / curve.bytes_per_second
            ends[node] = free
            busy.append((start, free))
            count += 1
        elif node.target is WAIT:
            launch = node.all_input_nodes[0]
            launch = launch.all_input_nodes[0] if is_getitem(launch) else launch
            end = ends.get(launch, now)
            exposed += max(0.0, end - now)
            now = max(now, end)
        else:
            work = costs[node].seconds(hardware)
            while work > 0:  # slower where a collective runs
                while passed < len(busy) and busy[passed][1] <= now:
                    passed += 1
                if passed == len(busy) or now < busy[passed][0]:
                    room = work if passed == len(busy) else min(work, busy[passed][0] - now)
                    now, work = now + room, work - room
                else:
                    slow = 1 + hardware.contention
                    done = min(work, (busy[passed][1] - now) / slow)
                    now, work = now + done * slow, work - done
    return Price(max(now, free), _peak(gm, backward, shards), exposed, count)


def _full(node: Node) -> object:
    """The full tensors of a collective: what a gather gives, what a reduction takes."""
    return node.meta["val"] if is_gather(node) else [i.meta["val"] for i in node.all_input_nodes]


def _bytes(tensor: torch.Tensor) -> int:
    total = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        total *= 1 if isinstance(stride, int) and stride == 0 else hint(size)
    return total


def _peak(gm: GraphModule, backward: bool, shards: frozenset[str]) -> int:
    """The most bytes alive: a result from its node to its last use, a collective's input until its wait."""
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    owner = {node: memory_of(node) for node in nodes}
    dies: dict[Node, int] = {}

    def used(memory: Node, at: int) -> None:
        dies[memory] = max(dies.get(memory, 0), at)

    for node in nodes:
        for i in node.all_input_nodes:
            used(owner[i], place[node])
        if node.target is WAIT:
            launch = node.all_input_nodes[0]
            launch = launch.all_input_nodes[0] if is_getitem(launch) else launch
            for i in launch.all_input_nodes:
                used(owner[i], place[node])
    live, ends = 0, [0] * (len(nodes) + 1)
    for node in nodes:
        if node.op == "placeholder" and node.name not in shards:
            live += _size(node)
            if backward:
                ends[dies.get(node, 0)] += _size(node)
    peak = live
    for i, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            live += _size(node)
            ends[dies.get(node, i)] += _size(node)
        peak = max(peak, live)
        if node.op != "output":
            live -= ends[i]
    return peak


def _size(node: Node) -> int:
    if node.op == "call_function" and any(is_getitem(user) for user in node.users):
        return 0
    return sum(_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))
