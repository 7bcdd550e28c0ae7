"""A compiled graph as plain data: an entry of ``graphs`` in ``Explanation.to_dict()``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from compiled_fsdp.reporting.report import CollectiveReport, GraphReport
from compiled_fsdp.tools.timeline import Task, of_report
from compiled_fsdp.tools.verdict import peak_parts


def graph_data(report: GraphReport, name: str) -> dict[str, Any]:
    """Return one graph as numbers, strings, lists and dictionaries.

    Returns:
        ``name``, ``phase``, ``from_cache``, ``graph_break`` (reason and code line, or None), ``batch``, ``any_batch``,
        ``hardware`` (the hardware that it is planned for, and the source of those figures);
        ``compute_s`` (without collectives), ``comm_s`` (of compiled_fsdp's collectives, on the wires), ``step_s``
        (planned), ``exposed_s``, ``contention_s`` (compute takes longer beside collectives), ``lower_bound_s``;
        ``peak_bytes``, ``peak_parts_bytes`` (``persistent``, ``unsharded``, ``activations``, ``buckets``),
        ``peak_lower_bound_bytes``, ``budget_bytes`` (None for no limit), ``for_backward`` (what a forward leaves for
        its backward under a budget, the attributes of ``ForBackward``), ``held`` (the part ``activations`` of the
        peak by module, each with the attributes of ``HeldByModule``);
        ``collectives`` in launch order, each with its places in the compiled graph; ``tasks``, the plan in time, as
        ``tools/timeline.py`` describes it. Seconds and bytes are for one call on one rank. A figure that the graph does
        not have is None.
    """
    numbers, peak, timeline = report.numbers, peak_parts(report), of_report(report, name)
    return {
        "name": name,
        "phase": report.phase,
        "from_cache": report.from_cache,
        "graph_break": None if report.graph_break is None else list(report.graph_break),
        "batch": report.batch,
        "any_batch": report.any_batch,
        "hardware": report.hardware,
        "compute_s": None if report.tasks is None else report.tasks.seconds_before[-1],
        "comm_s": sum(collective.seconds for collective in report.collectives),
        "step_s": None if numbers is None else numbers.simulated,
        "exposed_s": None if numbers is None else numbers.exposed,
        "contention_s": None if numbers is None else numbers.contention,
        "lower_bound_s": None if numbers is None else numbers.bound,
        "peak_bytes": None if numbers is None else numbers.peak,
        "peak_parts_bytes": None if peak is None else peak._asdict(),
        "peak_lower_bound_bytes": None if numbers is None else numbers.least_peak,
        "budget_bytes": report.budget,
        "for_backward": None if report.for_backward is None else asdict(report.for_backward),
        "held": [asdict(held) for held in report.held],
        "collectives": [_collective(collective) for collective in report.collectives],
        "tasks": [] if timeline is None else [_task(task) for task in timeline.tasks],
    }


def _task(task: Task) -> dict[str, Any]:
    return {**asdict(task), "members": [asdict(member) for member in task.members]}


def _collective(collective: CollectiveReport) -> dict[str, Any]:
    return {
        "kind": collective.bucket.kind,
        "form": collective.bucket.form,
        "bytes": collective.bucket.bytes,
        "parameters": list(collective.names),
        "launch": collective.launch,
        "wait": collective.wait,
        "nodes": collective.nodes,
        "compute_between": collective.compute_between,
        "seconds": collective.seconds,
        "exposed_s": collective.exposed,
        "reason": collective.reason,
        "crosses_graph": collective.crosses_graph,
    }
