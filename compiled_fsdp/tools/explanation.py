"""``Explanation``: a model's compiled or planned graphs, their collectives, and its graph breaks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from compiled_fsdp.base.renamed import warn_renamed
from compiled_fsdp.compat.dynamo import graph_breaks
from compiled_fsdp.compat.previews import backends_of
from compiled_fsdp.compiler.options import BACKEND
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.reporting.compile_log import COMPILE_LOG, UpdateReport
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.tools.advice import Advice
from compiled_fsdp.tools.advice_kinds import advice_for
from compiled_fsdp.tools.choices import Choice, choices_of
from compiled_fsdp.tools.codec_savings import CodecSavings, codec_savings
from compiled_fsdp.tools.graph_data import graph_data
from compiled_fsdp.tools.html import as_html
from compiled_fsdp.tools.steps import ModelCall, Step, calls_of, steps_of
from compiled_fsdp.tools.table import graph_tables
from compiled_fsdp.tools.timeline import Timeline, timeline_of
from compiled_fsdp.tools.timeline_files import write
from compiled_fsdp.tools.verdict import verdict
from compiled_fsdp.tools.words import count, listed, megabytes, milliseconds, number_list, wrapped


@dataclass(frozen=True)
class Explanation:
    """The graphs that the backend has compiled for a model, or would compile. ``print()`` it to read it.

    Attributes:
        graphs: the graphs that read the model's parameters, in the order of compilation.
        graph_breaks: the reason and the code line of each graph break, once each.
        parameters: how many sharded parameters the model has.
        units: how many units it has.
        prefetched: counts of gathers across graph breaks, over all models in this process: "taken", "launched", "late",
            "stale", "unused" (see ``runtime/prefetcher.py``).
        details: whether it prints tables of all collectives instead of the verdict.
        planned_only: whether the graphs were planned for a call that was not made.
        layers: for each graph, how many equal layers of the model have run it.
        given_up: for the code line of a graph break, the forward that Dynamo runs uncompiled because of it.
        uncompiled: names of the parameters that no compiled graph reads.
        other_backends: names of the backends that the model is compiled with, if backend="compiled_fsdp" compiled
            nothing and is not among them.
        updates: the graphs of a compiled update (``TrainStep(compile_update=True)``).
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[tuple[str, str], ...]
    parameters: int
    units: int
    prefetched: Mapping[str, int] = field(default_factory=dict)
    details: bool = False
    planned_only: bool = False
    layers: tuple[int, ...] = ()
    given_up: Mapping[str, str] = field(default_factory=dict)
    uncompiled: tuple[str, ...] = ()
    other_backends: tuple[str, ...] = ()
    updates: tuple[UpdateReport, ...] = ()

    @cached_property
    def calls(self) -> tuple[ModelCall, ...]:
        """The calls of the model with their graphs and times: one call for each batch or phase that was compiled."""
        return tuple(calls_of(self._steps))

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """The changes that would make a step faster, each planned again before it is given.

        The greatest gain comes first. Changes that alter results come after those that do not.
        """
        return advice_for(self.calls)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Other placements of the first training step's parameters, with their times and memory; first as it is.

        For example, print them with ``for choice in explain(model).choices: print(choice)``. It is empty if graph
        breaks separate the step's graphs.
        """
        return next((found for call in self.calls if (found := choices_of(call))), ())

    @cached_property
    def _steps(self) -> list[Step]:
        return steps_of(self.graphs, self.graph_breaks, self.layers)

    @property
    def _layout(self) -> str:
        """The word for all parameters that graphs read: "replicated", or "sharded"."""
        reads = [read for graph in self.graphs for read in graph.reads]
        return "replicated" if reads and all(r.world == 1 and r.replicas > 1 for r in reads) else "sharded"

    def __str__(self) -> str:
        if self.details:
            return "\n".join([*self._head, graph_tables(self.graphs), *self._tail])
        return "\n".join(self._lines)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the verdict, and tables that unfold."""
        return as_html(self._lines, self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for ``json.dumps``.

        Returns:
            ``units``, ``parameters``; ``planned_only``; ``graphs``, each as ``tools/graph_data.py`` describes it, with
            ``layers``, the number of equal layers that run it; ``calls``, each with ``phase``, ``graphs`` (their places
            in the list), ``step_s``, ``exposed_s`` and ``lower_bound_s`` (None if graph breaks separate the graphs);
            ``graph_breaks``, each with ``reason`` and ``line``; ``advice``, each with ``kind``, ``text``, ``gain_s``,
            ``step_s``, ``graphs``, ``change`` and ``changes_results``; ``codecs``, each with the attributes of
            ``CodecSavings``; ``choices``, each with the attributes of ``Choice``; ``prefetched``, counts of gathers
            across graph breaks; ``updates``, each with ``optimizer``, ``parameters`` (how many), ``moved_bytes`` and
            ``step_s``.
        """
        layers = self.layers or (1,) * len(self.graphs)
        return {
            "units": self.units,
            "parameters": self.parameters,
            "planned_only": self.planned_only,
            "graphs": [
                graph_data(graph, f"{i} {graph.phase}") | {"layers": layers[i]} for i, graph in enumerate(self.graphs)
            ],
            "calls": [
                {
                    "phase": call.phase,
                    "graphs": list(call.numbers),
                    "step_s": call.seconds,
                    "exposed_s": call.exposed,
                    "lower_bound_s": call.bound,
                }
                for call in self.calls
            ],
            "graph_breaks": [{"reason": reason, "line": line} for reason, line in self.graph_breaks],
            "advice": [advice.to_dict() for advice in self.advice],
            "codecs": [savings.to_dict() for savings in self.codecs],
            "choices": [choice.to_dict() for choice in self.choices],
            "prefetched": dict(self.prefetched),
            "updates": [
                {
                    "optimizer": update.optimizer,
                    "parameters": len(update.param_ids),
                    "moved_bytes": update.moved,
                    "step_s": self._seconds_of(update),
                }
                for update in self.updates
            ],
        }

    def json(self) -> dict[str, Any]:
        """Return ``to_dict()``, whose old name this is."""
        warn_renamed("Explanation.json()", "to_dict()")
        return self.to_dict()

    def _seconds_of(self, update: UpdateReport) -> float:
        """Planned seconds of an update: of a kernel that is bound by the device's memory."""
        hardware = next((graph.planned_for for graph in self.graphs if graph.planned_for is not None), None)
        return 0.0 if hardware is None else hardware.kernel + update.moved / hardware.copy

    @property
    def _update_line(self) -> str:
        """Say how long the compiled update takes, alone and with the last call of the model."""
        seconds = sum(map(self._seconds_of, self.updates))
        params = sum(len(update.param_ids) for update in self.updates)
        text = (
            f"the update, {self.updates[0].optimizer} in {count(len(self.updates), 'graph')} of {params} parameters: "
            f"{milliseconds(seconds)}, {megabytes(sum(update.moved for update in self.updates))} read and written"
        )
        call = next((call for call in self.calls if call.phase == "training step"), None)
        if call is None:
            return text
        text += f"; with the call before it {milliseconds(call.seconds + seconds)}"
        return text if call.bound is None else f"{text}, bound {milliseconds(call.bound + seconds)}"

    @cached_property
    def codecs(self) -> tuple[CodecSavings, ...]:
        """The savings of each step's codecs (``WirePolicy``), for gathers and for reductions."""
        return tuple(codec_savings(self._steps))

    @property
    def _head(self) -> list[str]:
        """The first lines: counts, and the hardware that times are planned for."""
        graphs = "planned" if self.planned_only else "compiled"
        out = [
            f"{count(self.units, 'unit')} with {count(self.parameters, f'{self._layout} parameter')}, "
            f"{count(len(self.graphs), f'{graphs} graph')}, {count(len(self.graph_breaks), 'graph break')}"
        ]
        planned_for = dict.fromkeys(graph.hardware for graph in self.graphs if graph.numbers is not None)
        out += [line for hardware in planned_for for line in wrapped(f"times are planned for {hardware}", "    ")]
        if self.other_backends and self.planned_only:
            out += wrapped(f"planned for backend='compiled_fsdp'; {self._compiled_otherwise}", "    ")
        elif not self.graphs and not self.planned_only:
            out += wrapped(self._why_nothing, "    ")
        return out

    @property
    def _why_nothing(self) -> str:
        if self.other_backends:
            return f"nothing compiled by backend='compiled_fsdp': {self._compiled_otherwise}"
        if self.graph_breaks:
            return "nothing compiled by backend='compiled_fsdp' but what reads no parameter, because of graph breaks"
        return (
            "nothing compiled by backend='compiled_fsdp' yet: call model.compile(backend='compiled_fsdp') and then the "
            "model, or give explain the call's arguments"
        )

    @property
    def _compiled_otherwise(self) -> str:
        return f"it was compiled by {' and '.join(map(repr, self.other_backends))}"

    @property
    def _lines(self) -> list[str]:
        out = self._head
        several = len({graph.batch for graph in self.graphs}) > 1
        for number, graph in enumerate(self.graphs):
            out += verdict(number, graph, self.layers[number] if self.layers else 1, of_batch=several)
        return out + self._tail

    @property
    def _tail(self) -> list[str]:
        """The last lines: sums, graph breaks, gathers across graph breaks, codecs, advice."""
        out = []
        if not (self.planned_only and self.graph_breaks):
            for call in self.calls:
                out += wrapped(_sum_line(call), "    ") if len(call.numbers) > 1 else []
        if self.updates:
            out += wrapped(self._update_line, "    ")
        for reason, where in self.graph_breaks:
            out += [*wrapped(f"graph break: {reason}", "    "), *wrapped(f"    at {where}", "    ")]
            if (function := self.given_up.get(where)) is not None:
                out += wrapped(
                    f"    because of it Dynamo compiles no graph of {function} itself, only of the modules that "
                    "it calls; a graph break in a loop always has this effect",
                    "    ",
                )
        if self.planned_only and self.graph_breaks:
            out.append("    what comes after it is planned when it is first run: take a step, and ask again")
        if self.uncompiled and self.graphs:
            out += wrapped(
                f"no compiled graph reads {listed(self.uncompiled)}: uncompiled code does, or nothing", "    "
            )
        is_broken = self.graph_breaks or any(graph.is_fragment for graph in self.graphs)
        if is_broken and (self.prefetched.get("taken") or self.prefetched.get("late")):
            out += wrapped(_across_breaks(self.prefetched), "    ")
        if self.codecs:
            out.append("codecs:")
        for savings in self.codecs:
            out += wrapped(f"  {savings}", "    ")
        if self.advice:
            out.append("advice, each change alone:")
        elif self.calls:
            call = self.calls[0]
            out.append(f"no advice: compute waits for collectives {call.exposed / call.seconds:.1%} of the time")
        for number, advice in enumerate(self.advice, start=1):
            out += wrapped(f"  {number}. {advice.text}", "     ")
        return out

    def timeline(self, file: str | Path | None = None) -> Timeline:
        """Show a step in time, as planned: lanes of compute and of collectives, and the memory under them.

        ::

            explain(model).timeline("step.html")

        If the forward has graph breaks, all of its graphs are shown one after another; a graph that equal layers share
        is shown once. Otherwise the newest graph of each phase is shown.

        Args:
            file: a file to write, too: FILE.html is a page, FILE.json is a trace for Perfetto.

        Raises:
            ValueError: no graph with collectives is compiled yet, or ``file`` has another ending.
            ModuleNotFoundError: a page needs plotly, which is not installed (``pip install plotly``).
        """
        timeline = timeline_of(self.graphs)
        if file is not None:
            write(timeline, Path(file))
        return timeline


def explain_compiled(model: nn.Module, *, details: bool = False) -> Explanation:
    """Explain the graphs that were compiled for a model.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.
        details: whether to print tables.

    Raises:
        ValueError: the model has no sharded parameter.
    """
    units = units_of(model)
    if not units:
        raise ValueError("explain: the model has no sharded parameter; call compiled_fsdp.fully_shard(model) first.")
    parameters = {parameter.param_id: parameter for unit in units for parameter in unit.parameters}
    graphs = tuple(report for report in list(COMPILE_LOG.graphs) if report.param_ids & parameters.keys())
    breaks = [graph.graph_break for graph in graphs if graph.graph_break]
    forwards = {code: module for module in model.modules() if (code := _code_of(module))}
    # A graph that reads no parameter, or is empty, has no report. Dynamo knows the graph breaks after such graphs.
    lines = {(code.co_filename, line) for code in forwards for _, _, line in code.co_lines()}
    breaks += [(reason, where) for called, reason, where in graph_breaks() if called & lines]
    COMPILE_LOG.collect_failed_frames()
    names = {
        (code.co_filename, code.co_firstlineno): f"{type(module).__name__}.forward" for code, module in forwards.items()
    }
    failed = [frame for frame in COMPILE_LOG.failed_frames.values() if (frame.filename, frame.line) in names]
    breaks += [(frame.reason, frame.where) for frame in failed]
    read = {param_id for graph in graphs for param_id in _read_by(graph, parameters)}
    return Explanation(
        graphs,
        tuple(dict.fromkeys(breaks)),
        len(parameters),
        len(units),
        dict(RUNTIME.prefetcher.counts),
        details,
        layers=tuple(max(1, len(graph.first_params & parameters.keys())) for graph in graphs),
        given_up={frame.where: names[frame.filename, frame.line] for frame in failed},
        uncompiled=tuple(parameter.name for param_id, parameter in parameters.items() if param_id not in read),
        updates=_newest_updates(parameters),
        other_backends=() if graphs or BACKEND in (backends := backends_of(model)) else tuple(sorted(backends)),
    )


def _read_by(graph: GraphReport, parameters: Mapping[int, ShardedParameter]) -> set[int]:
    """Return the ids of the parameters that a graph has read, in every layer that has run it; perhaps too many.

    For each further layer only its first parameter is recorded. The graph's other parameters have the same positions in
    that layer as in the first one. But if the graph goes over several layers, it may have read any parameter.
    """
    found = set(graph.param_ids & parameters.keys())
    layers = {(unit_of(parameters[first]), parameters[first].block) for first in graph.first_params & found}
    if len(layers) > 1 and len({read.block_number for read in graph.reads}) > 1:
        return set(parameters)
    positions = {read.position for read in graph.reads}
    return found | {
        param_id
        for param_id, parameter in parameters.items()
        if parameter.read_spec.position in positions and (unit_of(parameter), parameter.block) in layers
    }


def _newest_updates(parameters: Mapping[int, ShardedParameter]) -> tuple[UpdateReport, ...]:
    """Return the newest compiled update of each parameter. For example, SGD's first step is a graph of its own."""
    found: list[UpdateReport] = []
    for update in reversed(COMPILE_LOG.updates):
        if update.param_ids & parameters.keys() and all(update.param_ids.isdisjoint(one.param_ids) for one in found):
            found.insert(0, update)
    return tuple(found)


def _code_of(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(module.forward), "__code__", None)


def _sum_line(call: ModelCall) -> str:
    """Format the planned time of all graphs of a call."""
    terms: list[tuple[int, list[int]]] = []
    for step in call.steps:
        if not terms or terms[-1][0] != step.layers:
            terms.append((step.layers, []))
        terms[-1][1].extend(step.numbers)
    graphs = " + ".join(
        number_list(numbers) if layers == 1 else f"{layers} x ({number_list(numbers)})" for layers, numbers in terms
    )
    text = (
        f"{'an' if call.phase.startswith('i') else 'a'} {call.phase}, {graphs}: {milliseconds(call.seconds)}, "
        f"{milliseconds(call.exposed)} of it exposed"
    )
    if call.bound is None:
        return f"{text}; what is in flight across a graph break counts as overlapped"
    return f"{text}; no plan beats the bound, {milliseconds(call.bound)}"


def _across_breaks(counts: Mapping[str, int]) -> str:
    """Say how many graphs after graph breaks had their first gather in flight, and how many gathers were wasted."""
    early, late = counts.get("taken", 0), counts.get("late", 0)
    text = (
        f"of {early + late} graph calls behind graph breaks so far (all models of this process) {early} had their "
        "first gather in flight before"
    )
    if late:
        text += f"; {late} launched it themselves, as the first of each forward has to"
    if unused := counts.get("unused", 0):
        text += f"; {unused} gathers were launched for nothing, because another graph followed"
    if stale := counts.get("stale", 0):
        text += f"; {stale} were repeated, because a parameter was written to"
    return text
