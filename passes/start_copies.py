"""Start copies: let compute hide the copies of activations to host memory and back.

    offload(tensor)         -> start_offload(tensor)        -> wait_copy(copy, tensor), once the copy is done
    reload(host, device)    -> start_reload(host, device)   -> wait_copy(copy, host), before the first use

A copy to host memory starts when its tensor is complete. Its wait, which lets the tensor's memory go, is where the copy
is expected to be done. A copy back starts as late as it can and still be done at its first use. Copies in one direction
run one after the other.
"""

# Why: docs/design/memory.md, "Activations in host memory"

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.host_copies import OFFLOAD, RELOAD, STARTS, WAIT_COPY
from compiled_fsdp.compat.graphs import tensors_in
from compiled_fsdp.passes.cost.compute import node_costs
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import calls
from compiled_fsdp.passes.memory import tensor_bytes
from compiled_fsdp.passes.model_collectives import COPY_LATENCY
from compiled_fsdp.passes.views import memory_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

SLACK = 1.25
"""How many times its planned length a copy may take until compute waits for it."""


def start_copies(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Divide each copy to host memory or back into a start and a wait, with compute in between."""
    copies = calls(gm, *STARTS)
    if not copies:
        return gm
    clock = Clock(gm, ctx)
    places = {**_places_of_offloads(clock, ctx.hardware), **_places_of_reloads(clock, ctx.hardware)}
    for node, place in places.items():
        _divide(node, *(_remaining(clock.nodes, at) for at in place))
    gm.graph.lint()
    ctx.changed("start_copies", f"{len(copies)} copies to host memory or back")
    return gm


def _divide(node: Node, start: Node, wait: Node) -> None:
    """Replace a copy by its start right before one node, and its wait right before another one."""
    graph = node.graph
    with graph.inserting_before(start):
        copy = add_call(graph, STARTS[node.target], *node.args)
    with graph.inserting_before(wait):
        done = add_call(graph, WAIT_COPY, copy, node.args[0])
    node.replace_all_uses_with(done)
    graph.erase_node(node)


def _remaining(nodes: Sequence[Node], place: int) -> Node:
    """The first node from a place on that is not a copy, because copies are replaced."""
    return next(node for node in nodes[place:] if node.target not in STARTS)


class Clock:
    """When each node of a graph runs if nothing waits.

    Attributes:
        nodes: the graph's nodes in order.
        place: the place of each node.
        start: the seconds from the graph's start to each node's start, and last to its end.
    """

    def __init__(self, gm: GraphModule, ctx: PassContext) -> None:
        costs = node_costs(gm, fused=ctx.fused)
        self.nodes = list(gm.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.start = [0.0, *itertools.accumulate(float(costs[node].seconds(ctx.hardware)) for node in self.nodes)]

    def complete(self, node: Node) -> float:
        """Seconds until a node has run."""
        return self.start[self.place[node] + 1]

    def first_use(self, node: Node) -> int:
        """The place of the first node that uses ``node``."""
        return min(self.place[user] for user in node.users)


def _places_of_offloads(clock: Clock, hardware: Hardware) -> dict[Node, tuple[int, int]]:
    """For each copy to host memory the places of its start and of its wait, which go right before the nodes there."""
    found: dict[Node, tuple[int, int]] = {}
    last = _last_uses(clock.nodes)
    end = 0.0
    tensor_of = {node: node.all_input_nodes[0] for node in clock.nodes if node.target is OFFLOAD}
    for node, tensor in sorted(tensor_of.items(), key=lambda pair: clock.place[pair[1]]):
        end = max(end, clock.complete(tensor)) + SLACK * seconds_on_link(node, hardware)
        wait = max(bisect.bisect_left(clock.start, end), last[memory_of(tensor)] + 1)
        found[node] = clock.place[tensor] + 1, min(wait, len(clock.nodes) - 1)
    return found


def _places_of_reloads(clock: Clock, hardware: Hardware) -> dict[Node, tuple[int, int]]:
    """The same for copies back to the device, in the order in which they start."""
    found: dict[Node, tuple[int, int]] = {}
    first = {node: clock.first_use(node) for node in clock.nodes if node.target is RELOAD}
    earliest = next(i for i, node in enumerate(clock.nodes) if node.op == "call_function")
    begin = clock.start[-1]
    for node in sorted(first, key=first.__getitem__, reverse=True):
        begin = min(begin, clock.start[first[node]]) - SLACK * seconds_on_link(node, hardware)
        at = bisect.bisect_right(clock.start, begin, hi=first[node] + 1) - 1
        found[node] = max(at, earliest), first[node]
    return dict(reversed(found.items()))


def _last_uses(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """The place of the last node, without the output and copies to host memory, that uses the memory of each node."""
    found: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        if node.op != "output" and node.target is not OFFLOAD:
            found |= dict.fromkeys(map(memory_of, (node, *node.all_input_nodes)), i)
    return found


def seconds_on_link(node: Node, hardware: Hardware) -> float:
    """Seconds on the link to host memory for a tensor; none if the host computes, because compute itself copies."""
    if hardware.host_computes:
        return 0.0
    return COPY_LATENCY + sum(map(tensor_bytes, tensors_in(node.meta["val"]))) / hardware.host_copy
