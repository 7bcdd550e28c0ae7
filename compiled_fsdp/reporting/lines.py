"""Log lines: one per graph (TORCH_LOGS=compiled_fsdp), one per collective and per pass (TORCH_LOGS=+compiled_fsdp)."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch.fx import GraphModule, Node

from compiled_fsdp.passes.graph import COLLECTIVES, crosses_graph, planned_collectives, waits_of
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.explain_plan import why_not_earlier

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext
    from compiled_fsdp.reporting.report import Flight, GraphReport

log = logging.getLogger(__name__)
T = TypeVar("T")


def told(what: str, make: Callable[[], T], otherwise: T) -> T:
    """What ``make`` returns. Where it raises ``otherwise``, and a line that says so: nothing that only tells people of a compile is worth
    failing it."""
    try:
        return make()
    except Exception as error:
        log.warning("no %s: %r", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return otherwise


class Lazy:
    """Text that is made only if a handler writes it."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __str__(self) -> str:
        try:
            return self._make()
        except Exception as error:  # within a handler: no line of its own
            return f"no line here: {error!r}"


def flights_of(gm: GraphModule, ctx: PassContext, reads: Sequence[Read]) -> tuple[Flight, ...]:
    """The planned collectives as they stand in the lowered graph."""
    from compiled_fsdp.reporting.report import Flight

    if ctx.planned is None:
        return ()
    plan, simulation, tasks = ctx.planned.plan, ctx.planned.simulation, ctx.planned.tasks
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    launches: dict[int, list[Node]] = {}
    for node in planned_collectives(gm):
        if node.meta.get("bucket") is not None:
            launches.setdefault(node.meta["bucket"], []).append(node)
    if simulation is None or tasks is None or len(launches) != len(plan.launches):
        return ()
    compute = [i for node, i in place.items() if node.op == "call_function" and not node.meta.get("of_bucket")]
    limit = simulation.peak if ctx.budget is None else ctx.budget
    flights = []
    for number, bucket in enumerate(plan.launches):
        launch = min(place[node] for node in launches[number])
        waits = [place[wait] for node in launches[number] for wait in waits_of(node)]
        wait = min(waits, default=len(place))  # of what is left in flight there is none
        between = max(bisect_left(compute, wait) - bisect_right(compute, launch), 0)
        timed = simulation.timings[number]
        beyond = any(map(crosses_graph, launches[number]))
        taken = any(node.target not in COLLECTIVES for node in launches[number])
        flights.append(
            Flight(bucket, tuple(reads[i].name for i in bucket.reads), launch, wait, between, len(place), timed.end - timed.start,
                   timed.exposed, why_not_earlier(tasks, simulation, number, limit), beyond, taken)
        )  # fmt: skip
    return tuple(flights)


def flight_line(flight: Flight) -> str:
    """One collective in a line."""
    names = ", ".join(flight.names[:3]) + (f" and {len(flight.names) - 3} more" if len(flight.names) > 3 else "")
    hidden = f"{flight.hidden_behind} compute ops in between" if flight.hidden_behind else "nothing in between: exposed"
    if flight.beyond:
        hidden = "in flight before the graph" if flight.bucket.kind == "gather" else "left in flight at the graph's end"
    return (
        f"{flight.bucket.kind:6} {flight.bucket.bytes / 1e6:9.3f} MB  launch at {flight.launch}, wait at {flight.wait} of {flight.nodes} ({hidden}), "
        f"{1e3 * flight.seconds:.3f} ms, {1e3 * flight.exposed:.3f} exposed, {flight.bucket.form}, {flight.reason}: {names}"
    )


def graph_line(report: GraphReport) -> str:
    """One graph in a line."""
    gathered = sum(f.bucket.bytes for f in report.flights if f.bucket.kind == "gather")
    reduced = sum(f.bucket.bytes for f in report.flights if f.bucket.kind == "reduce")
    return (
        f"{report.phase} graph: {len(report.reads)} parameters read, {report.count('gather')} gathers of {gathered / 1e6:.3f} MB, "
        f"{report.count('reduce')} reductions of {reduced / 1e6:.3f} MB"
    )


def log_graph(log: logging.Logger, report: GraphReport) -> None:
    """Log a compiled graph: a line at INFO, its collectives at DEBUG."""
    log.info("%s", Lazy(partial(graph_line, report)))
    if report.simulation is not None:
        log.info("  %s", Lazy(lambda: str(report.numbers)))
    if report.balance is not None:
        log.info("  %s", report.balance)
    for flight in report.flights:
        log.debug("  %s", Lazy(partial(flight_line, flight)))
    if report.graph_break:
        log.info("  graph break after it: %s, at %s", *report.graph_break)
