"""Compiled graphs as steps and calls of the model: the graphs of each, and the time that they take together."""

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
from compiled_fsdp.tools.what_if import edges_of, replan, seconds_between_graphs

DEVICE_SHARE = 0.9
"""How much of the device's memory may be planned with where there is no budget: the allocator needs some, too."""


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with collectives of ours, as it was planned.

    Attributes:
        number: its place in ``Explanation.graphs``.
        report: what is known of it.
        tasks: as the planner saw it.
        simulation: its plan in time and memory.
        rules: that the plan was made under.
        crossing: the launches that overlap with the graphs before and after this one, if it is one of several of a
            forward.
    """

    number: int
    report: GraphReport
    tasks: Tasks
    simulation: Simulation
    rules: PlanRules
    crossing: Sequence[int]

    @property
    def seconds(self) -> float:
        """As planned, between graphs like itself: they hide what crosses the graph's edges."""
        return seconds_between_graphs(self.tasks, self.simulation, self.crossing)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for collectives of ours, between graphs like itself."""
        return max(0.0, self.simulation.exposed - (self.simulation.seconds - self.seconds))  # but for rounding

    def replanned(self, tasks: Tasks, rules: PlanRules) -> PlannedGraph | None:
        """The same graph, planned with other tasks or under other rules; None where it does not fit into memory."""
        found = replan(tasks, rules)
        if found is None:
            return None
        crossing = edges_of(found) if self.report.is_fragment else ()
        return replace(self, tasks=tasks, simulation=found, rules=rules, crossing=crossing)

    @property
    def room(self) -> float:
        """Bytes that its plan may hold: the budget, or what the device has."""
        return DEVICE_SHARE * self.rules.device_bytes if self.rules.budget is None else self.rules.budget


@dataclass(frozen=True)
class Step:
    """A forward graph and its backward graph, or a graph without one.

    Attributes:
        graphs: in the order in which they run.
        layers: how many equal layers of the model run the graphs in one call: layers that graph breaks separate share
            their code.
        graph_break: of one of several graphs of a forward: why it is not one, and the code line.
    """

    graphs: tuple[PlannedGraph, ...]
    layers: int = 1
    graph_break: tuple[str, str] | None = None

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds of one run of each graph, which gains are counted from.

        Parts of a broken forward are planned once more as they are: they run under a plan that equal layers share, and
        what a plan of their own would gain is not the gain of a change.
        """
        graphs = self.replanned() if self.is_fragment else self.graphs
        return sum(graph.seconds for graph in graphs or self.graphs)

    @property
    def is_fragment(self) -> bool:
        """Whether its graphs are some of several of a forward."""
        return self.graphs[0].report.is_fragment

    @property
    def reads(self) -> tuple[Read, ...]:
        """The parameters that its graphs read."""
        return self.graphs[0].report.reads

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its graphs in ``Explanation.graphs``."""
        return tuple(graph.number for graph in self.graphs)

    def replanned(
        self,
        change: Callable[[Tasks], Tasks] = lambda tasks: tasks,
        rules: Callable[[PlanRules], PlanRules] = lambda rules: rules,
    ) -> list[PlannedGraph] | None:
        """All graphs, planned with other tasks or under other rules; None where one does not fit into memory."""
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
        """ "training step" or "inference call"; "forward" where its backward is compiled apart (compiled autograd)."""
        phases = {graph.report.phase for step in self.steps for graph in step.graphs}
        if phases == {"inference"}:
            return "inference call"
        return "training step" if "backward" in phases else "forward"

    @property
    def seconds(self) -> float:
        """Planned, each graph as often as layers run it."""
        return self._sum(lambda graph: graph.seconds)

    @property
    def is_broken(self) -> bool:
        """Whether graph breaks separate its graphs."""
        return self.steps[0].is_fragment

    @property
    def bound(self) -> float | None:
        """Seconds that no plan of these graphs can beat.

        None behind graph breaks: a graph's bound has all of its gathers in it, and the first one may be in flight
        before the graph.
        """
        bounds = [graph.report.numbers.bound for step in self.steps for graph in step.graphs if graph.report.numbers]
        return None if self.is_broken else sum(bounds)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for collectives of ours."""
        return self._sum(lambda graph: graph.exposed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its graphs in ``Explanation.graphs``."""
        return tuple(number for step in self.steps for number in step.numbers)

    @property
    def batch(self) -> int | None:
        """The batch that its first graph was compiled for, if it is known."""
        return self.steps[0].graphs[0].report.batch

    def _sum(self, of: Callable[[PlannedGraph], float]) -> float:
        return sum(step.layers * of(graph) for step in self.steps for graph in step.graphs)


def steps_of(
    graphs: Sequence[GraphReport], graph_breaks: Sequence[tuple[str, str]] = (), layers: Sequence[int] = ()
) -> list[Step]:
    """Forwards with their backwards, which are compiled right after them; graphs without collectives are left out.

    A fragment that did not end in a break itself is one because of another: of the first of ``graph_breaks``.

    Args:
        graphs: in the order of compilation.
        graph_breaks: reasons and code lines.
        layers: of each graph, how many equal layers run it; empty for one each.
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
    """Steps as calls of the model: the graphs of a broken forward belong to one call.

    Graphs of the same parameters and phases are variants for another batch, so the second one begins another call. Of
    such a call only the graphs are known that were compiled again; it is left out if they do not read all that the
    first call reads.
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
    """Reads by the module that owns the parameters, in their order."""
    found: dict[str, list[Read]] = {}
    for read in reads:
        found.setdefault(read.name.rpartition(".")[0], []).append(read)
    yield from found.items()
