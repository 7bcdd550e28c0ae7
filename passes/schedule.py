"""Schedule: the order of launches and waits among compute.

Compute keeps its order. A gather's launch stands before the wait of the bucket used before it (``prefetch="before"``), its
wait before its first use; a reduction's launch stands behind the last of its gradients, its wait behind the next
reduction's launch. So one gather and one reduction are in flight while compute runs, and at most two buckets of each are
held. What is computed from parameters alone moves to its first use, or it would pull waits forward.

The order of launches is the plan. All ranks must launch in one order, so it is agreed on before the graph is rewritten,
and a rank whose graph differs (other batch sizes) follows the agreed order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.compat import reorder
from compiled_fsdp.passes.graph import argument, calls, from_parameters_alone, ops
from compiled_fsdp.passes.plan import Bucket, GraphPlan

if TYPE_CHECKING:
    from compiled_fsdp.passes.pipeline import PassContext


class PlanDoesNotFit(RuntimeError):
    """This rank's graph cannot follow the plan that the ranks agreed on."""


def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Put launches and waits where the agreed plan and this graph's compute want them."""
    flights = [
        _Flight(launch, _wait_of(launch), _bucket_of(launch, ctx))
        for launch in calls(gm, ops.launch_gather.default, ops.launch_reduce.default)
    ]
    proposal = _Emitter(gm, flights, ctx).run()
    plan = ctx.agree(GraphPlan(ctx.phase, tuple(flight.bucket for flight in proposal.launched)))
    order = _in_order_of(plan, flights, ctx)
    emitted = proposal if order == proposal.launched else _Emitter(gm, flights, ctx, order).run()
    reorder(gm.graph, list(emitted.nodes))
    gm.graph.lint()
    ctx.plan = plan
    ctx.changed(
        "schedule",
        f"{len(flights)} launches in order " + " ".join(_label(flight.bucket) for flight in emitted.launched),
    )
    return gm


@dataclass(frozen=True, eq=False)
class _Flight:
    """A bucket's launch and wait in the graph."""

    launch: Node
    wait: Node
    bucket: Bucket

    @property
    def gathers(self) -> bool:
        return self.bucket.kind == "gather"


def _wait_of(launch: Node) -> Node:
    (wait,) = launch.users
    return wait


def _bucket_of(launch: Node, ctx: PassContext) -> Bucket:
    reads = tuple(argument(launch, "reads"))
    kind = "gather" if launch.target is ops.launch_gather.default else "reduce"
    return Bucket(kind, reads, argument(launch, "mesh"), sum(ctx.reads[read].bytes for read in reads))


def _label(bucket: Bucket) -> str:
    return f"{'U' if bucket.kind == 'gather' else 'P'}{bucket.reads[0]}"


def _in_order_of(plan: GraphPlan, flights: list[_Flight], ctx: PassContext) -> list[_Flight]:
    mine = {flight.bucket: flight for flight in flights}
    if len(plan.launches) != len(flights) or any(bucket not in mine for bucket in plan.launches):
        theirs = set(plan.launches)
        extra = [str(b) for b in mine if b not in theirs]
        missing = [str(b) for b in plan.launches if b not in mine]
        raise PlanDoesNotFit(
            f"compiled_fsdp: the {ctx.phase} graph of this rank does not have the collectives of the agreed plan; only here: {extra or 'none'}; "
            f"only in the plan: {missing or 'none'}."
        )
    return [mine[bucket] for bucket in plan.launches]


class _Emitter:
    """Lists the graph's nodes in their new order; launches in the given order, or in the best one it finds."""

    def __init__(
        self, gm: GraphModule, flights: list[_Flight], ctx: PassContext, order: list[_Flight] | None = None
    ) -> None:
        self.gm, self.flights, self.order, self.ctx = gm, flights, order, ctx
        self.place = {flight: i for i, flight in enumerate(order or ())}
        self.by_wait = {flight.wait: flight for flight in flights}
        gathered = {flight.wait for flight in flights if flight.gathers}
        # what moves to where it is needed: waits, and all that follows from gathered parameters alone
        self.lazy = set(from_parameters_alone(gm, lambda node: node in gathered))
        for flight in flights:
            self.lazy |= {flight.launch, flight.wait}
            if not flight.gathers:
                self.lazy |= set(flight.wait.users)
        self.gathers = self._by_first_use()
        self.next_gather = dict(zip(self.gathers, self.gathers[1:], strict=False))
        # reductions by the gradients that they still miss
        self.missing = {f: set(f.launch.all_input_nodes) for f in flights if not f.gathers}
        self.missed_by: dict[Node, list[_Flight]] = defaultdict(list)
        for flight, inputs in self.missing.items():
            for i in inputs:
                self.missed_by[i].append(flight)
        self.complete: list[_Flight] = []
        self.unwaited: list[_Flight] = []
        self.nodes: dict[Node, None] = {}
        self.open: set[Node] = set()
        self.launched: list[_Flight] = []

    def _by_first_use(self) -> list[_Flight]:
        seen: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node not in seen:
                for i in node.all_input_nodes:
                    if i in self.lazy:
                        visit(i)
                seen[node] = None

        for node in self.gm.graph.nodes:
            if node not in self.lazy:
                visit(node)
        used = [self.by_wait[node] for node in seen if node in self.by_wait and self.by_wait[node].gathers]
        return list(dict.fromkeys([*used, *(flight for flight in self.flights if flight.gathers)]))

    def run(self) -> _Emitter:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._place(node)
        if self.gathers and self.ctx.overlap:
            self._launch_early(self.gathers[0])
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._finish()
            if node not in self.lazy:
                self.emit(node)
                self._launch_complete_reductions()
        return self

    def _finish(self) -> None:
        for flight in self.gathers:
            self.emit(flight.wait)
        for flight in self.order or self.flights:
            self.launch(flight)
        for node in self.gm.graph.nodes:
            if node in self.lazy:
                self.emit(node)

    def emit(self, node: Node) -> None:
        """Put ``node`` here, behind what it needs."""
        if node in self.nodes:
            return
        if node in self.open:
            raise PlanDoesNotFit(
                f"compiled_fsdp: the {self.ctx.phase} graph of this rank cannot launch its collectives in the agreed order: "
                f"{node} would have to come before itself."
            )
        self.open.add(node)
        flight = self.by_wait.get(node)
        if flight is not None:
            self.launch(flight)
            following = self.next_gather.get(flight)
            if following is not None and self.ctx.overlap and self.ctx.prefetch == "before":
                self._launch_early(following)
            if flight in self.unwaited:
                self.unwaited.remove(flight)
        for i in node.all_input_nodes:
            self.emit(i)
        self.open.discard(node)
        self._place(node)

    def _place(self, node: Node) -> None:
        self.nodes[node] = None
        for flight in self.missed_by.get(node, ()):
            self.missing[flight].discard(node)
            if not self.missing[flight]:
                self.complete.append(flight)

    def launch(self, flight: _Flight) -> None:
        """Launch here, behind all launches that the order has before it, whatever compute they need."""
        for due in self.order[: self.place[flight] + 1] if self.order else [flight]:
            if due.launch in self.nodes:
                continue
            for i in due.launch.all_input_nodes:
                self.emit(i)
            if due.launch not in self.nodes:  # or what a gradient needs has launched it
                self._place(due.launch)
                self.launched.append(due)
                if not due.gathers:
                    self.unwaited.append(due)

    def _launch_early(self, flight: _Flight) -> None:
        """Launch ahead of need, if no reduction that has to come first is still without its gradients."""
        before = self.order[: self.place[flight]] if self.order else []
        if not any(self.missing.get(earlier) for earlier in before if earlier.launch not in self.nodes):
            self.launch(flight)

    def _launch_complete_reductions(self) -> None:
        for flight in [f for f in self.complete if f.launch not in self.nodes]:
            self._launch_early(flight)
        self.complete = [f for f in self.complete if f.launch not in self.nodes]
        # a reduction is waited for once the next one is on its way
        for earlier in self.unwaited[: -1 if self.ctx.overlap else None]:
            self.emit(earlier.wait)
            for unpack in earlier.wait.users:
                self.emit(unpack)
