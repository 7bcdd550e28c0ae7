"""One referee for all plans: it prices a lowered graph's time and memory node by node, by the planner's cost model.

It does not know the plans. Compute runs in the graph's order. A collective starts when compute has launched it and all
earlier collectives have ended. A wait stops compute until its collective has ended. Copies into and out of buckets are
compute like any other. Time is the collectives' own, as in ``passes/plan/simulate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.transport import LAUNCHES, WAIT
from compiled_fsdp.compat.graphs import tensors_in
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.cost.compute import node_costs
from compiled_fsdp.passes.graph import is_gather, is_getitem
from compiled_fsdp.passes.memory import peak_bytes, tensor_bytes


@dataclass(frozen=True)
class Price:
    """Seconds and peak bytes of a graph. ``peak`` has no persistent bytes, such as shards and optimizer state."""

    seconds: float
    peak: int
    exposed: float
    collectives: int


def price(
    gm: GraphModule,
    hardware: Hardware,
    world: int,
    *,
    backward: bool,
    shards: frozenset[str] = frozenset(),
    nodes: int | None = None,
) -> Price:
    """Simulate a lowered graph.

    Args:
        gm: the graph.
        hardware: the hardware's costs.
        world: the number of ranks in the group.
        backward: whether it is a backward graph.
        shards: names of inputs that are sharded parameters. They are not counted as memory.
        nodes: the number of nodes that the ranks are on; None: as few as possible.
    """
    costs = node_costs(gm, fused=True)
    now = free = exposed = lag = 0.0
    busy: list[tuple[float, float]] = []
    ends: dict[Node, float] = {}
    count = passed = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in LAUNCHES:
            curve = hardware.curve("gather" if is_gather(node) else "reduce", world, nodes)
            sizes = [tensor_bytes(t) for t in tensors_in(_full(node))]
            start = max(now, free)
            free = start + curve.seconds(sum(sizes), len(sizes))
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
            while work > 0:  # compute is slower while a collective runs
                while passed < len(busy) and busy[passed][1] <= now:
                    passed += 1
                if passed == len(busy) or now < busy[passed][0]:
                    room = work if passed == len(busy) else min(work, busy[passed][0] - now)
                    now, work = now + room, work - room
                else:
                    both = 1 + hardware.contention.collective
                    slow = (1 + costs[node].contention(hardware)) / both
                    done = min(work, (busy[passed][1] - now) / slow)
                    now, work, lag = now + done * slow, work - done, lag + done * slow * (both - 1)
    return Price(max(now, free) + lag, peak_bytes(gm, backward=backward, shards=shards), exposed, count)


def _full(node: Node) -> object:
    """Return the full tensors of a collective: the outputs of a gather, the inputs of a reduction."""
    return node.meta["val"] if is_gather(node) else [i.meta["val"] for i in node.all_input_nodes]
