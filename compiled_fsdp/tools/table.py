"""Tables for terminals with the details of an explanation, drawn by rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from compiled_fsdp.passes.alive import HeldByModule
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.words import WIDTH, bucket_name, megabytes

MOST_MODULES = 12
"""Rows of the table of activations; other modules share one row."""


def need_rich() -> None:
    """Raise ImportError, which says how to install rich, if rich is missing."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "explain: details=True draws tables with rich, which is not installed: pip install rich. "
            "The verdict, explain(model), needs no library."
        ) from error


def graph_tables(graphs: Sequence[GraphReport]) -> str:
    """Draw a table for each graph, with a row for each of its collectives, and lines of figures under it.

    Columns: "at", the places of launch and wait among the graph's nodes; "between", how many compute ops run between
    them ("before" or "after" if the collective overlaps with the graph before or after this one); "ms", the time on the
    wires; "exposed", the milliseconds that compute waits for it. Then a table of the activations that are alive at the
    peak: by module, inputs of the graph, tensors saved for backward (or returned), and temporary ones.
    """
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, legacy_windows=False)
    for number, graph in enumerate(graphs):
        console.print(_table(number, graph))
        for line in (graph.numbers, graph.model_collectives, graph.copies, graph.sensitivity, graph.balance):
            if line is not None:
                console.print(str(line), markup=False, highlight=False)
        console.print(_held_table(graph.held) if graph.held else "")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _plain_table(title: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH
    )


def _held_table(held: Sequence[HeldByModule]) -> Any:
    """A row for each module that holds much, and one for all others together."""
    kinds = ("saved", "temporary", "input")
    by_module: dict[str, dict[str, int]] = {}
    for part in held:
        by_module.setdefault(part.module, dict.fromkeys(kinds, 0))[part.kind] += part.bytes
    rows = sorted(by_module.items(), key=lambda row: -sum(row[1].values()))
    if others := [sizes for _, sizes in rows[MOST_MODULES:]]:
        rows[MOST_MODULES:] = [("all others", {kind: sum(sizes[kind] for sizes in others) for kind in kinds})]
    table = _plain_table("activations at the peak")
    for name in (*kinds, "module"):
        is_last = name == "module"
        table.add_column(name, justify="left" if is_last else "right", ratio=1 if is_last else None)
    for module, sizes in rows:
        table.add_row(*(megabytes(sizes[kind]) if sizes[kind] else "" for kind in kinds), module or "the model itself")
    return table


def _table(number: int, graph: GraphReport) -> Any:
    from rich.text import Text

    nodes = graph.collectives[0].nodes if graph.collectives else 0
    title = f"[{number}] {graph.phase}: {len(graph.reads)} parameters read" + (f", {nodes} nodes" if nodes else "")
    table = _plain_table(title)
    for name in ("", "size", "at", "between", "ms", "exposed"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name in ("form", "why not earlier", "parameters"):
        table.add_column(name, overflow="fold", ratio=1 if name == "parameters" else None)
    for collective in graph.collectives:
        between = str(collective.compute_between)
        if collective.crosses_graph:
            between = "before" if collective.bucket.kind == "gather" else "after"
        table.add_row(
            collective.bucket.kind,
            megabytes(collective.bucket.bytes),
            f"{collective.launch}-{collective.wait}",
            between,
            f"{1e3 * collective.seconds:.3f}",
            f"{1e3 * collective.exposed:.3f}",
            collective.bucket.form,
            collective.reason,
            Text(bucket_name(collective.names)),
        )
    return table
