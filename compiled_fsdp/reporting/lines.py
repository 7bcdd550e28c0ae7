"""Log lines: one per graph (TORCH_LOGS=compiled_fsdp), one per collective and per pass (TORCH_LOGS=+compiled_fsdp)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from compiled_fsdp.reporting.report import CollectiveReport, GraphReport

log = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_NAMES = 3  # a line names at most this many parameters of a bucket


def best_effort(what: str, make: Callable[[], T], otherwise: T) -> T:
    """Return ``make()``; if it raises, log a warning that there is no ``what``, and return ``otherwise``.

    Use it for output that only informs people, because such output must not fail a compile.
    """
    try:
        return make()
    except Exception as error:
        log.warning("no %s: %r", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return otherwise


class LazyText:
    """Text that is made only when a handler writes the log line."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __str__(self) -> str:
        try:
            return self._make()
        except Exception as error:  # a handler is writing a line, so this error gets no line of its own
            return f"no line here: {error!r}"


def collective_line(report: CollectiveReport) -> str:
    """Describe one collective in a line."""
    more = len(report.names) - _MOST_NAMES
    names = ", ".join(report.names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    overlap = "nothing in between: exposed"
    if report.crosses_graph:
        overlap = (
            "in flight before the graph" if report.bucket.kind == "gather" else "left in flight at the graph's end"
        )
    elif report.compute_between:
        overlap = f"{report.compute_between} compute ops in between"
    return (
        f"{report.bucket.kind:6} {report.bucket.bytes / 1e6:9.3f} MB  launch at {report.launch}, wait at {report.wait} "
        f"of {report.nodes} ({overlap}), {1e3 * report.seconds:.3f} ms, {1e3 * report.exposed:.3f} exposed, "
        f"{report.bucket.form}, {report.reason}: {names}"
    )


def graph_line(report: GraphReport) -> str:
    """Describe one graph in a line."""
    gathered = sum(c.bucket.bytes for c in report.collectives if c.bucket.kind == "gather")
    reduced = sum(c.bucket.bytes for c in report.collectives if c.bucket.kind == "reduce")
    cached = ", from the cache" if report.from_cache else ""
    return (
        f"{report.phase} graph{cached}: {len(report.reads)} parameters read, {report.count('gather')} gathers of "
        f"{gathered / 1e6:.3f} MB, {report.count('reduce')} reductions of {reduced / 1e6:.3f} MB"
    )


def log_graph(log: logging.Logger, report: GraphReport) -> None:
    """Log a compiled graph: a few lines at INFO, and one line for each collective at DEBUG."""
    log.info("%s", LazyText(partial(graph_line, report)))
    if report.simulation is not None:
        log.info("  %s", LazyText(lambda: str(report.numbers)))
    if report.balance is not None:
        log.info("  %s", report.balance)
    for collective in report.collectives:
        log.debug("  %s", LazyText(partial(collective_line, collective)))
    if report.graph_break:
        log.info("  graph break after it: %s, at %s", *report.graph_break)
