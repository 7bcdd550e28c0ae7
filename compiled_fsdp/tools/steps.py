"""Compiled graphs grouped into steps and calls of the model, and the planned time of each group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.sequence import simulate_in_sequence
from compiled_fsdp.tools.what_if import edges_of, replan, seconds_between_graphs

DEVICE_SHARE = 0.9
"""The share of the device's memory that a plan may use if there is no budget.

It is less than 1 because the allocator needs some memory, too.
"""


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with collectives of compiled_fsdp, and its plan.

    Attributes:
        number: its place in ``Explanation.graphs``.
        report: its report.
        tasks: the graph as the planner saw it.
        simulation: its plan in time and memory.
        rules: the rules that the plan was made under.
        crossing: the numbers of the launches that overlap with the graphs before and after this one, if it is a
            fragment. For example, its first gather is in flight before it begins.
    """

    number: int
    report: GraphReport
    tasks: Tasks
    simulation: Simulation
    rules: PlanRules
    crossing: Sequence[int]

    @property
    def seconds(self) -> float:
        """Planned seconds, if graphs like this one run beside it and hide the collectives that cross its edges."""
        return seconds_between_graphs(self.tasks, self.simulation, self.crossing)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for compiled_fsdp's collectives, between graphs like this one."""
        return max(0.0, self.simulation.exposed - (self.simulation.seconds - self.seconds))  # despite rounding

    def replanned(self, tasks: Tasks, rules: PlanRules) -> PlannedGraph | None:
        """Plan the same graph with other tasks or under other rules; None if it does not fit into memory."""
        found = replan(tasks, rules)
        if found is None:
            return None
        crossing = edges_of(found) if self.report.is_fragment else ()
        return replace(self, tasks=tasks, simulation=found, rules=rules, crossing=crossing)

    @property
    def room(self) -> float:
        """Bytes that its plan may hold: the budget, or ``DEVICE_SHARE`` of the device's memory."""
        return DEVICE_SHARE * self.rules.device_bytes if self.rules.budget is None else self.rules.budget


@dataclass(frozen=True)
class Step:
    """A forward graph and its backward graph, or a graph without backward.

    Attributes:
        graphs: in the order in which they run.
        layers: how many equal layers of the model run the graphs in one call. For example, 12 if each of 12 equal
            layers is compiled alone because of graph breaks: they share one code.
        graph_break: for a fragment: the reason of the graph break that separates it from other graphs, and the code
            line.
    """

    graphs: tuple[PlannedGraph, ...]
    layers: int = 1
    graph_break: tuple[str, str] | None = None

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds of one run of each graph, from which gains are counted.

        Fragments are planned once more without a change. They run under a plan that equal layers share, so a plan of
        their own may be faster, and that must not count as the gain of a change.
        """
        graphs = self.replanned() if self.is_fragment else self.graphs
        return sum(graph.seconds for graph in graphs or self.graphs)

    @property
    def is_fragment(self) -> bool:
        """Whether its graphs are fragments: some of several graphs of one forward."""
        return self.graphs[0].report.is_fragment

    @property
    def reads(self) -> tuple[Read, ...]:
        """The parameters that its graphs read."""
        return self.graphs[0].report.reads

    @property
    def numbers(self) -> tuple[int, ...]:
        """The places of its graphs in ``Explanation.graphs``."""
        return tuple(graph.number for graph in self.graphs)

    def replanned(
        self,
        change: Callable[[Tasks], Tasks] = lambda tasks: tasks,
        rules: Callable[[PlanRules], PlanRules] = lambda rules: rules,
    ) -> list[PlannedGraph] | None:
        """Plan all graphs with other tasks or under other rules; None if one of them does not fit into memory."""
        found = []
        for graph in self.graphs:
            planned = graph.replanned(change(graph.tasks), rules(graph.rules))
            if planned is None:
                return None
            found.append(planned)
        return found


@dataclass(frozen=True)
class ModelCall:
    """All graphs of one call of the model, with its backward: a training step without the optimizer, or an inference.

    For example, a forward that a graph break cuts in two has two ``steps``; a forward without graph breaks has one.

    Attributes:
        steps: in the order of compilation.
    """

    steps: tuple[Step, ...]

    @property
    def phase(self) -> str:
        """The kind of call: "training step", "inference call" or "forward".

        It is "forward" if the backward is compiled apart (compiled autograd).
        """
        phases = {graph.report.phase for step in self.steps for graph in step.graphs}
        if phases == {"inference"}:
            return "inference call"
        return "training step" if "backward" in phases else "forward"

    @property
    def seconds(self) -> float:
        """Planned seconds; each graph counts as often as layers run it."""
        if self.is_broken:
            return self._as_planned.seconds
        return sum(step.layers * graph.seconds for step in self.steps for graph in step.graphs)

    def seconds_with(self, planned: Sequence[Sequence[PlannedGraph]]) -> float:
        """Seconds of the call if the graphs of each step were planned like this."""
        if self.is_broken:
            return self._in_sequence(planned).seconds
        pairs = zip(self.steps, planned, strict=True)
        return sum(step.layers * graph.seconds for step, graphs in pairs for graph in graphs)

    @property
    def is_broken(self) -> bool:
        """Whether graph breaks separate its graphs."""
        return self.steps[0].is_fragment

    @property
    def bound(self) -> float | None:
        """Seconds that no plan of these graphs can beat; None if graph breaks separate the graphs.

        A graph's bound includes all of its gathers, but after a graph break the first gather may be in flight before
        the graph begins, so the sum of the bounds can be beaten.
        """
        bounds = [graph.report.numbers.bound for step in self.steps for graph in step.graphs if graph.report.numbers]
        return None if self.is_broken else sum(bounds)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for compiled_fsdp's collectives."""
        if self.is_broken:
            return self._as_planned.exposed
        return self.exposed_in_graphs

    @property
    def exposed_in_graphs(self) -> float:
        """The same, if graphs like it run beside each graph and hide what crosses its edges."""
        return sum(step.layers * graph.exposed for step in self.steps for graph in step.graphs)

    @functools.cached_property
    def _as_planned(self) -> Simulation:
        return self._in_sequence([step.graphs for step in self.steps])

    def _in_sequence(self, planned: Sequence[Sequence[PlannedGraph]]) -> Simulation:
        """Simulate the graphs of a broken call in order, as if each layer had tasks of its own."""
        by_layer = [graphs for step, graphs in zip(self.steps, planned, strict=True) for _ in range(step.layers)]
        forwards = [graphs[0] for graphs in by_layer]
        backwards = [graph for graphs in reversed(by_layer) for graph in graphs[1:]]
        return simulate_in_sequence([(of.tasks, of.simulation, of.crossing) for of in (*forwards, *backwards)])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The places of its graphs in ``Explanation.graphs``."""
        return tuple(number for step in self.steps for number in step.numbers)

    @property
    def batch(self) -> int | None:
        """The batch that its first graph was compiled for, if it is known."""
        return self.steps[0].graphs[0].report.batch


def steps_of(
    graphs: Sequence[GraphReport], graph_breaks: Sequence[tuple[str, str]] = (), layers: Sequence[int] = ()
) -> list[Step]:
    """Pair forward graphs with their backward graphs, which are compiled right after them.

    Graphs without collectives are left out. If a fragment did not end in a graph break itself, the first of
    ``graph_breaks`` counts as its graph break.

    Args:
        graphs: the reports, in the order of compilation.
        graph_breaks: reasons and code lines.
        layers: for each graph, how many equal layers run it; empty if one layer runs each.
    """
    steps: list[Step] = []
    previous: GraphReport | None = None
    for number, report in enumerate(graphs):
        if report.tasks is not None and report.simulation is not None and report.rules is not None:
            crossing = [n for n, collective in enumerate(report.collectives) if collective.crosses_graph]
            graph = PlannedGraph(number, report, report.tasks, report.simulation, report.rules, crossing)
            ends_step = report.phase == "backward" and previous is not None and previous.phase == "forward"
            if ends_step and steps and previous is steps[-1].graphs[-1].report and previous.reads == report.reads:
                steps[-1] = replace(steps[-1], graphs=(*steps[-1].graphs, graph))
            else:
                cause = report.graph_break or next(iter(graph_breaks), None)
                shared = layers[number] if layers else 1
                steps.append(Step((graph,), shared, cause if report.is_fragment else None))
        previous = report
    return steps


def calls_of(steps: Sequence[Step]) -> list[ModelCall]:
    """Group steps into calls of the model: the fragments of one forward belong to one call.

    A second graph with the same parameters and phases is a variant for another batch, so it begins another call. That
    call has only the graphs that were compiled again; it is left out if they do not read all parameters that the first
    call reads.
    """
    calls: list[ModelCall] = []
    seen: set[tuple[Any, ...]] = set()
    for step in steps:
        key = tuple(read.name for read in step.reads), tuple(graph.report.phase for graph in step.graphs)
        joins = calls and step.is_fragment and calls[-1].steps[-1].is_fragment and key not in seen
        if joins and ModelCall((step,)).phase == calls[-1].phase:
            calls[-1] = ModelCall((*calls[-1].steps, step))
        else:
            calls.append(ModelCall((step,)))
            seen.clear()
        seen.add(key)
    whole: dict[str, set[str]] = {}
    found = []
    for call in calls:
        names = {read.name for step in call.steps for read in step.reads}
        if not call.is_broken or names >= whole.setdefault(call.phase, names):
            found.append(call)
    return found


def by_module(reads: Sequence[Read]) -> Iterator[tuple[str, list[Read]]]:
    """Group reads by the module that owns the parameters, in the order of the reads."""
    found: dict[str, list[Read]] = {}
    for read in reads:
        found.setdefault(read.name.rpartition(".")[0], []).append(read)
    yield from found.items()
