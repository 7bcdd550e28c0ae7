"""Timelines as files: a page to look at, or a trace for Perfetto."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compiled_fsdp.base.files import write_text
from compiled_fsdp.tools.timeline import COMPUTE, GraphTimeline, Task, Timeline
from compiled_fsdp.tools.words import bucket_name, size_unit, why_not_earlier

COLOURS = {COMPUTE: "#4c78a8", "gather": "#54a24b", "reduce": "#e45756"}
OTHER = "#b279a2"  # every other collective, such as the model's own
MEMORY = "#9d7bd8"
MOST_NAMES = 3  # the most parameters that a bucket's name lists
MOST_GRAPHS = 4  # the most graphs that a page's title lists
_HELP = "Hatched: compute waits for it. Drag to zoom, double-click to see all."


def write(timeline: Timeline, file: Path) -> None:
    """Draw a timeline: FILE.html is a page that needs no other file, FILE.json is a trace for Perfetto and Chrome.

    Raises:
        ValueError: the file has another ending.
        ModuleNotFoundError: the page needs plotly, which is not installed (``pip install plotly``).
    """
    if file.suffix == ".json":
        write_text(file, json.dumps({"traceEvents": list(trace_events(timeline)), "displayTimeUnit": "ms"}))
    elif file.suffix == ".html":
        page(timeline, file)
    else:
        raise ValueError(f"timeline: {str(file)!r} must end in .html (a page) or .json (a trace for Perfetto).")


def rows(timeline: Timeline) -> Iterator[tuple[str, GraphTimeline, Task]]:
    """Yield each task with its graph and its lane's name.

    If a graph was measured, the names of lanes begin with "planned: " or "measured: ".
    """
    measured = any(graph.measured for graph in timeline.graphs)
    for graph in timeline.graphs:
        for task in graph.tasks:
            yield f"planned: {task.stream}" if measured else task.stream, graph, task
        for task in graph.measured:
            yield f"measured: {task.stream}", graph, task


def title(task: Task) -> str:
    """Name a task by few of its parameters: "a, b, c and 2 more"."""
    more = len(task.members) - MOST_NAMES
    return task.name if more <= 0 else ", ".join(m.name for m in task.members[:MOST_NAMES]) + f" and {more} more"


def facts(graph: GraphTimeline, task: Task) -> dict[str, Any]:
    """Return the other facts about a task, as names and values for people."""
    known: dict[str, Any] = {"graph": graph.name, "ms": round(1e3 * task.duration_s, 6)}
    if task.kind == COMPUTE:
        return known
    known |= {"kind": task.kind, "MB": task.bytes / 1e6, "exposed ms": round(1e3 * task.exposed_s, 6)}
    if task.launch_s is not None:
        known["launched at ms"] = round(1e3 * task.launch_s, 6)
    if task.wait_s is not None:
        known["waited for at ms"] = round(1e3 * task.wait_s, 6)
    if task.reason:
        known["not earlier because"] = why_not_earlier(task.reason, task.kind)
    return known


# ---- Perfetto --------------------------------------------------------------------------------------------------------
def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield Chrome's trace events ("Trace Event Format"): a thread for each lane, and a counter of the memory."""
    lanes: dict[str, int] = {}
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "compiled_fsdp"}}
    for lane, graph, task in rows(timeline):
        if lane not in lanes:
            lanes[lane] = len(lanes)
            yield {"ph": "M", "pid": 0, "tid": lanes[lane], "name": "thread_name", "args": {"name": lane}}
        yield {
            "ph": "X", "pid": 0, "tid": lanes[lane], "name": title(task), "cat": task.kind,
            "ts": 1e6 * task.start_s, "dur": 1e6 * task.duration_s, "args": facts(graph, task),
        }  # fmt: skip
    for graph in timeline.graphs:
        for at, held in graph.memory:
            yield {"ph": "C", "pid": 0, "name": "memory", "ts": 1e6 * at, "args": {"bytes": held}}


# ---- page ------------------------------------------------------------------------------------------------------------
def page(timeline: Timeline, file: Path) -> None:
    """Write a page with lanes above the curve of memory. The page contains plotly's own code."""
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "compiled_fsdp: a timeline's page is drawn by plotly, which is not installed: "
            "pip install plotly, or write a trace: timeline(FILE.json)."
        ) from error

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    by_kind: dict[str, list[tuple[str, GraphTimeline, Task]]] = {}
    for row in rows(timeline):
        by_kind.setdefault(row[2].kind, []).append(row)
    for kind, found in by_kind.items():
        figure.add_trace(
            go.Bar(
                name=kind,
                orientation="h",
                y=[lane for lane, _, _ in found],
                base=[1e3 * task.start_s for _, _, task in found],
                x=[1e3 * task.duration_s for _, _, task in found],
                marker={
                    "color": COLOURS.get(kind, OTHER),
                    # A white line between neighbours. It would hide thin bars, such as the model's own collectives.
                    "line": {"width": 0.5 * (kind in COLOURS and kind != COMPUTE), "color": "white"},
                    "pattern": {"shape": ["/" if task.exposed_s > 0 else "" for _, _, task in found]},
                },
                hovertext=[_hover(graph, task) for _, graph, task in found],
                hoverinfo="text",
            ),
            row=1,
            col=1,
        )
    held = [(1e3 * at, size) for graph in timeline.graphs for at, size in graph.memory]
    held.append((1e3 * timeline.seconds, held[-1][1] if held else 0))
    unit, divisor = size_unit(max(size for _, size in held))
    figure.add_trace(
        go.Scatter(
            name="memory", x=[at for at, _ in held], y=[size / divisor for _, size in held],
            line={"shape": "hv", "color": MEMORY}, fill="tozeroy",
            hovertemplate=f"%{{y:,.1f}} {unit} at %{{x:.3f}} ms<extra></extra>",
        ),
        row=2, col=1,
    )  # fmt: skip
    for graph in timeline.graphs[1:]:
        figure.add_vline(x=1e3 * graph.start_s, line={"dash": "dot", "color": "grey"})
    lanes = len({lane for lane, _, _ in rows(timeline)})
    figure.update_layout(
        title={"text": heading(timeline), "subtitle": {"text": _below(timeline)}},
        barmode="overlay", height=340 + 60 * lanes, margin={"t": 120}, template="plotly_white",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_yaxes(title=f"{unit} on a rank", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title="ms", row=2, col=1)
    drawn = figure.to_html(include_plotlyjs=True)
    write_text(file, drawn.replace("</body>", f"{_exposed(timeline)}</body>"))


def _exposed(timeline: Timeline) -> str:
    """A table of the collectives that compute waits for, the longest wait first; "" if there are none."""
    tasks = [(graph, task) for graph in timeline.graphs for task in graph.tasks if task.exposed_s > 0]
    tasks.sort(key=lambda of: -of[1].exposed_s)
    cells = [
        (
            f"{task.kind} of {bucket_name([member.name for member in task.members]) or task.name}",
            graph.name,
            f"{1e3 * task.exposed_s:,.3f}",
            why_not_earlier(task.reason, task.kind) if task.reason else "",
        )
        for graph, task in tasks
    ]
    if not cells:
        return ""
    head = "<tr><th>compute waits for</th><th>in</th><th>ms</th><th>because</th></tr>"
    lines = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in cells]
    style = "font-family: sans-serif; margin-left: 60px; text-align: left; border-spacing: 16px 2px"
    return f"<table style='{style}'>{head}{''.join(lines)}</table>"


def heading(timeline: Timeline) -> str:
    """Return a page's title: the names of the graphs, their time, and the hardware that they are planned for."""
    graphs = timeline.graphs
    names = ", ".join(graph.name for graph in graphs) if len(graphs) <= MOST_GRAPHS else f"{len(graphs)} graphs"
    end = max((task.end_s for graph in graphs for task in graph.measured), default=None)
    planned = f"{1e3 * timeline.seconds:,.1f} ms" + (f" on {timeline.hardware}" if timeline.hardware else "")
    return f"{names}: {planned}" if end is None else f"{names}: planned {planned}, measured {1e3 * end:,.1f} ms"


def _below(timeline: Timeline) -> str:
    several = len(timeline.graphs) > 1
    if any(graph.measured for graph in timeline.graphs):
        text = "Planned graphs stand one after another, from dotted line to dotted line. " if several else ""
        return f"{text}Memory is as planned. {_HELP}"
    return ("Dotted: where a graph begins. " if several else "") + _HELP


def _hover(graph: GraphTimeline, task: Task) -> str:
    known = "<br>".join(f"{name}: {_text(value)}" for name, value in facts(graph, task).items())
    return f"<b>{html.escape(title(task))}</b><br>{known}"


def _text(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else html.escape(str(value))
