"""An explanation as HTML for a notebook: plain tables, every name escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.words import bucket_name, count, megabytes, milliseconds


def as_html(lines: Sequence[str], graphs: Sequence[GraphReport]) -> str:
    """Return the verdict as it is printed, and for each graph a table of its collectives that unfolds."""
    out = [f"<pre>{escape(chr(10).join(lines))}</pre>"]
    head = ("", "size", "time", "exposed", "form", "why not earlier", "parameters")
    for number, graph in enumerate(graphs):
        rows = [
            (
                collective.bucket.kind,
                megabytes(collective.bucket.bytes),
                milliseconds(collective.seconds),
                milliseconds(collective.exposed),
                collective.bucket.form,
                collective.reason,
                bucket_name(collective.names),
            )
            for collective in graph.collectives
        ]
        out.append(
            f"<details><summary>[{number}] {escape(graph.phase)}: {count(len(rows), 'collective')}</summary><table>"
            f"{_row('th', head)}{''.join(_row('td', row) for row in rows)}</table></details>"
        )
    return "\n".join(out)


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
