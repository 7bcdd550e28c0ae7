"""Schedule: launches and waits go to the plan's places. Compute keeps its order.

A launch stands right before the run that the plan names, behind all launches that the plan has before it. A gather's wait
stands before its first use, with all that a flat bucket unpacks; a reduction's wait where the plan has it.

A reduction that goes on over replicas does so once the next one is launched, or where it is waited for: the first half has had the
time in between.

In compiled autograd's graphs a gradient is published right behind its wait, but not before its parameter's last gather was
waited for: a hook may update the shard.
"""

# Why: docs/design.md, note N17; docs/design.md, note N12; docs/design.md, note N30

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.compat import reorder
from compiled_fsdp.passes.graph import (
    BEYOND,
    COMPLETE,
    argument,
    behind,
    calls,
    is_getitem,
    ops,
    set_argument,
    waits_of,
)
from compiled_fsdp.passes.plan.tasks import Launch

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext, Planned


def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Put every launch and wait where the plan has it."""
    launches = calls(gm, *(getattr(ops, name).default for name in LAUNCHES))
    if ctx.planned is None or not launches:
        ctx.changed("schedule", "nothing to order")
        return gm
    flights = [_Flight(node, ctx.planned.schedule[node.meta["bucket"]]) for node in launches]
    flights.sort(key=lambda flight: flight.launch.meta["bucket"])
    reorder(gm.graph, list(_Emitter(gm, flights, ctx.planned).run()))
    gm.graph.lint()
    order = " ".join(f"{'U' if flight.gathers else 'P'}{argument(flight.launch, 'reads')[0]}" for flight in flights)
    ctx.changed("schedule", f"{len(flights)} launches in order {order}")
    return gm


LAUNCHES = ("launch_gather", "launch_gathers", "launch_reduce", "launch_reduces", *BEYOND)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A bucket's launch in the graph, and where it goes."""

    launch: Node
    to: Launch

    @property
    def gathers(self) -> bool:
        return self.to.gathers

    @property
    def nodes(self) -> list[Node]:
        """The launch, elements, waits and what is unpacked from them, in order."""
        waits = self.last_waits
        return [*self.first_half, *waits, *(user for wait in waits for user in wait.users)]

    @property
    def first_half(self) -> list[Node]:
        """The launch, up to what goes on over replicas, if anything does."""
        elements = [user for user in self.launch.users if is_getitem(user)]
        across = self._across
        return [self.launch, *elements, *(waits_of(self.launch) if across else ()), *across]

    @property
    def last_waits(self) -> list[Node]:
        """Those behind which the bucket is complete."""
        return [wait for across in self._across for wait in waits_of(across)] or waits_of(self.launch)

    @property
    def _across(self) -> list[Node]:
        op = ops.launch_all_reduce.default
        return [user for wait in waits_of(self.launch) for user in wait.users if user.target is op]

    @property
    def of_wait(self) -> dict[Node, list[Node]]:
        """What is unpacked from each wait."""
        return {wait: list(wait.users) for wait in self.last_waits}


class _Emitter:
    """Lists the graph's nodes in their new order."""

    def __init__(self, gm: GraphModule, flights: list[_Flight], planned: Planned) -> None:
        self.gm, self.flights, self.run_of = gm, flights, planned.run_of
        self.end = planned.end
        self.place = {flight: i for i, flight in enumerate(flights)}
        self.lazy = {node for flight in flights for node in flight.nodes}
        self.by_launch = {flight.launch: flight for flight in flights}
        self.unpacked_with = {node: users for flight in flights for node, users in flight.of_wait.items()}
        self.launches_at: dict[int, list[_Flight]] = defaultdict(list)
        self.waits_at: dict[int, list[_Flight]] = defaultdict(list)
        for flight in flights:
            self.launches_at[flight.to.at].append(flight)
            if not flight.gathers:
                self.waits_at[flight.to.wait].append(flight)
        publishes = calls(gm, ops.publish.default)
        self.publishes_of = _publishes_of(flights) if publishes else {}
        self.gathers_of = {
            read: [f for f in flights if f.gathers and read in argument(f.launch, "reads")]
            for read in {argument(node, "read") for node in publishes}
        }
        self.to_publish: dict[Node, None] = {}
        self.order: dict[Node, None] = {}
        self.run_now = -1

    def run(self) -> dict[Node, None]:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.order[node] = None
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._enter(max([*self.launches_at, *self.waits_at, self.run_now]))
                for flight in self.flights:  # a gather that nothing uses is waited for, too
                    self._wait(flight)
            if node not in self.lazy:
                self._enter(self.run_of.get(node, self.run_now))
                self.emit(node)
        return self.order

    def _enter(self, run: int) -> None:
        """Launches and waits at the starts of all runs up to ``run``: waits that free memory first."""
        while self.run_now < run:
            self.run_now += 1
            due = self.waits_at.get(self.run_now, [])
            for flight in (f for f in due if f.launch in self.order):
                self._wait(flight)
            for flight in self.launches_at.get(self.run_now, []):
                self.emit(flight.launch)
            for flight in due:
                self._wait(flight)
            self._publish()

    def _publish(self) -> None:
        """Publish the gradients that are reduced, and whose parameters are not to be gathered any more."""
        published = [node for node in self.to_publish if node not in self.order and self._complete(node)]
        published.sort(key=lambda node: node.meta.get(COMPLETE, 0))  # as gradients became complete
        for node in published:
            self.emit(node)
        if published:
            set_argument(published[-1], "last", True)
        self.to_publish = {node: None for node in self.to_publish if node not in self.order}

    def _complete(self, publish: Node) -> bool:
        gathers = self.gathers_of[argument(publish, "read")]
        if any(node not in self.order for flight in gathers for node in flight.nodes):
            return False
        stack = list(publish.all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in self.order:
                # another reduction that is added, or compute that is not behind reductions
                if node in self.lazy or self.run_of.get(node, self.end) < self.end:
                    return False
                stack += node.all_input_nodes
        return True

    def _wait(self, flight: _Flight) -> None:
        for node in flight.nodes:
            self.emit(node)
        for node in self.publishes_of.get(flight, ()):
            self.to_publish[node] = None

    def emit(self, node: Node) -> None:
        """Put ``node`` here, behind what it needs; a launch behind the launches that the plan has before it."""
        if node in self.order:
            return
        flight = self.by_launch.get(node)
        if flight is not None:
            for earlier in self.flights[: self.place[flight]]:
                if earlier.launch not in self.order:
                    self.emit(earlier.launch)
                if not flight.gathers and not earlier.gathers:
                    for half in earlier.first_half:
                        self.emit(half)
        for i in node.all_input_nodes:
            self.emit(i)
        self.order[node] = None
        for unpacked in self.unpacked_with.get(node, ()):
            self.emit(unpacked)


def _publishes_of(flights: list[_Flight]) -> dict[_Flight, list[Node]]:
    """The publishes behind each reduction."""
    reductions = [flight for flight in flights if not flight.gathers]
    publish = ops.publish.default
    return {flight: [node for node in behind(flight.nodes) if node.target is publish] for flight in reductions}
