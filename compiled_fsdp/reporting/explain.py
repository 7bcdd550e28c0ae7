"""``explain``: what was compiled of a model, with which collectives, and where the graph breaks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from compiled_fsdp.compat import graph_breaks
from compiled_fsdp.frontend.fsdp_module import units_of
from compiled_fsdp.reporting.advice import Advice, advice_for
from compiled_fsdp.reporting.codec_savings import CodecSavings, codec_savings
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.reporting.graph_data import graph_data
from compiled_fsdp.reporting.html import as_html
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.reporting.steps import steps_of
from compiled_fsdp.reporting.table import graph_tables
from compiled_fsdp.reporting.timeline import Timeline, timeline_of
from compiled_fsdp.reporting.timeline_files import write
from compiled_fsdp.reporting.verdict import verdict
from compiled_fsdp.reporting.words import count, wrapped
from compiled_fsdp.runtime.context import RUNTIME


@dataclass(frozen=True)
class Explanation:
    """What the backend did with a model so far, or would do. ``print()`` it to read it.

    Attributes:
        graphs: the compiled graphs that read the model's parameters, in the order of compilation.
        graph_breaks: reason and code line of each graph break, once each.
        parameters: how many sharded parameters the model has.
        units: how many units it has.
        prefetched: what became of gathers across graph breaks, of all models in this process
            (``runtime/prefetcher.py``).
        details: whether it prints tables of all collectives instead of the verdict.
        planned_only: whether the graphs were planned for a call that was not made.
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[tuple[str, str], ...]
    parameters: int
    units: int
    prefetched: Mapping[str, int] = field(default_factory=dict)
    details: bool = False
    planned_only: bool = False

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would make a step quicker, the greatest gain first; each planned again before it is given."""
        return advice_for(steps_of(self.graphs, self.graph_breaks))

    def __str__(self) -> str:
        if self.details:
            return "\n".join([self._head, graph_tables(self.graphs), *self._tail])
        return "\n".join(self._lines)

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, and tables that unfold."""
        return as_html(self._lines, self.graphs)

    def json(self) -> dict[str, Any]:
        """Everything as plain data, for ``json.dumps``.

        Returns:
            ``units``, ``parameters``; ``planned_only``; ``graphs``, each as ``reporting/graph_data.py`` says;
            ``graph_breaks``, each with ``reason`` and ``line``; ``advice``, each with ``kind``, ``text``,
            ``gain_s``, ``step_s``, ``graphs`` (their places in the list) and ``change``; ``codecs``, each as
            ``CodecSavings`` has it; ``prefetched``, counts of gathers across graph breaks.
        """
        return {
            "units": self.units,
            "parameters": self.parameters,
            "planned_only": self.planned_only,
            "graphs": [graph_data(graph, f"{i} {graph.phase}") for i, graph in enumerate(self.graphs)],
            "graph_breaks": [{"reason": reason, "line": line} for reason, line in self.graph_breaks],
            "advice": [advice.json() for advice in self.advice],
            "codecs": [savings.json() for savings in self.codecs],
            "prefetched": dict(self.prefetched),
        }

    @cached_property
    def codecs(self) -> tuple[CodecSavings, ...]:
        """What the codecs of each step save (``WirePolicy``), of gathers and of reductions."""
        return tuple(codec_savings(steps_of(self.graphs, self.graph_breaks)))

    @property
    def _head(self) -> str:
        graphs = "planned" if self.planned_only else "compiled"
        return (
            f"{count(self.units, 'unit')} with {count(self.parameters, 'sharded parameter')}, "
            f"{count(len(self.graphs), f'{graphs} graph')}, {count(len(self.graph_breaks), 'graph break')}"
        )

    @property
    def _lines(self) -> list[str]:
        out = [self._head]
        if not self.graphs and not self.planned_only:
            out += wrapped(
                "  nothing compiled by backend='compiled_fsdp' yet: call the compiled model once, or give explain "
                "the call's arguments",
                "  ",
            )
        for number, graph in enumerate(self.graphs):
            out += verdict(number, graph)
        return out + self._tail

    @property
    def _tail(self) -> list[str]:
        """Graph breaks, gathers across them, advice."""
        out = []
        for reason, where in self.graph_breaks:
            out += [*wrapped(f"graph break: {reason}", "    "), *wrapped(f"    at {where}", "    ")]
        if self.planned_only and self.graph_breaks:
            out.append("    what comes after it is planned when it is first run: take a step, and ask again")
        is_broken = self.graph_breaks or any(graph.is_fragment for graph in self.graphs)
        if is_broken and (counts := self.prefetched):
            out += wrapped(
                f"gathers across graph breaks: {counts.get('taken', 0)} were in flight when they were asked for, "
                f"{counts.get('late', 0)} were not, {counts.get('unused', 0)} were not used, "
                f"{counts.get('stale', 0)} had been written to",
                "    ",
            )
        if self.codecs:
            out.append("codecs:")
        for savings in self.codecs:
            out += wrapped(f"  {savings}", "    ")
        if self.advice:
            out.append("advice, each change alone:")
        for number, advice in enumerate(self.advice, start=1):
            out += wrapped(f"  {number}. {advice.text}", "     ")
        return out

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
        timeline = timeline_of(self.graphs)
        if file is not None:
            write(timeline, Path(file))
        return timeline


def explain_compiled(model: nn.Module, *, details: bool = False) -> Explanation:
    """``explain`` of what was compiled.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.
        details: whether to print tables.

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
    return Explanation(graphs, tuple(dict.fromkeys(breaks)), len(param_ids), len(units), counts, details)


def _code_of(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(module.forward), "__code__", None)
