"""``explain``: what was compiled of a model, with which collectives, and where the graph breaks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from torch import nn

from compiled_fsdp.compat import graph_breaks
from compiled_fsdp.frontend.fsdp_module import units_of
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.reporting.lines import collective_line, graph_line
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.reporting.timeline import Timeline, timeline_of
from compiled_fsdp.runtime.context import RUNTIME


@dataclass(frozen=True)
class Explanation:
    """What the backend did with a model so far. ``str()`` it to read it.

    Attributes:
        graphs: the compiled graphs that read the model's parameters, in the order of compilation.
        graph_breaks: reason and code line of each graph break, once each.
        parameters: how many sharded parameters the model has.
        units: how many units it has.
        prefetched: what became of gathers across graph breaks, of all models in this process
            (``runtime/prefetcher.py``).
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[tuple[str, str], ...]
    parameters: int
    units: int
    prefetched: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        out = [
            f"{self.units} units with {self.parameters} sharded parameters, {len(self.graphs)} compiled graphs, "
            f"{len(self.graph_breaks)} graph breaks"
        ]
        if not self.graphs:
            out.append("  nothing compiled yet: call the compiled model once")
        for i, graph in enumerate(self.graphs):
            out.append(f"[{i}] {graph_line(graph)}")
            lines = graph.numbers, graph.model_collectives, graph.sensitivity, graph.balance
            out += [f"    {line}" for line in lines if line is not None]
            out += [f"      {collective_line(collective)}" for collective in graph.collectives]
        for reason, where in self.graph_breaks:
            out.append(f"graph break: {reason}\n      at {where}")
            out.append(f"      {self._cost_of((reason, where))}")
        if counts := self.prefetched:
            out.append(
                f"gathers across graph breaks: {counts.get('taken', 0)} were in flight when they were asked for, "
                f"{counts.get('late', 0)} were not, {counts.get('unused', 0)} were not used, "
                f"{counts.get('stale', 0)} had been written to"
            )
        return "\n".join(out)

    def timeline(self, file: str | Path | None = None) -> Timeline:
        """A step in time, as planned: lanes of compute and of collectives, and the memory under them.

        Of a broken forward all graphs, one after another in the order of compilation (one that equal layers share is
        there once); else the newest graph of each phase.

        Args:
            file: written, too: FILE.html, a page; FILE.json, a trace for Perfetto.

        Raises:
            ValueError: nothing with collectives is compiled yet, or another ending of ``file``.
            ModuleNotFoundError: a page, without plotly (``pip install compiled_fsdp[tools]``).
        """
        return timeline_of(self.graphs, file)

    def _cost_of(self, graph_break: tuple[str, str]) -> str:
        """What overlap a graph break costs."""
        fragments = [graph for graph in self.graphs if graph.is_fragment]
        around = [graph for graph in fragments if graph.graph_break == graph_break] or fragments
        crossing = [collective for graph in around for collective in graph.collectives if collective.crosses_graph]
        exposed = sum(graph.exposed_across_graphs for graph in around)
        return (
            f"across it one bucket each way overlaps: {1e3 * sum(c.seconds for c in crossing):.3f} ms in "
            f"{len(around)} graphs, of which about {1e3 * exposed:.3f} ms are exposed a call"
        )


def explain(model: nn.Module) -> Explanation:
    """Compiled graphs, their buckets and collectives, and every graph break with its code line.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.

    Raises:
        ValueError: the model has no sharded parameter.
    """
    units = units_of(model)
    if not units:
        raise ValueError("explain: the model has no sharded parameter; call compiled_fsdp.fully_shard(model) first.")
    param_ids = {parameter.param_id for unit in units for parameter in unit.parameters}
    graphs = tuple(report for report in list(COMPILE_LOG.graphs) if report.param_ids & param_ids)
    breaks = [graph.graph_break for graph in graphs if graph.graph_break]
    functions = {code for module in model.modules() if (code := _code_of(module))}
    # Graphs that read no parameter, or are empty, have no report.
    lines = {(code.co_filename, line) for code in functions for _, _, line in code.co_lines()}
    breaks += [(reason, where) for called, reason, where in graph_breaks() if called & lines]
    COMPILE_LOG.collect_failed_frames()
    first_lines = {(code.co_filename, code.co_firstlineno) for code in functions}
    breaks += [
        (frame.reason, frame.where)
        for frame in COMPILE_LOG.failed_frames
        if (frame.filename, frame.line) in first_lines
    ]
    counts = dict(RUNTIME.prefetcher.counts)
    return Explanation(graphs, tuple(dict.fromkeys(breaks)), len(param_ids), len(units), counts)


def _code_of(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(module.forward), "__code__", None)
