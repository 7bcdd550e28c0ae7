"""Compiled graphs as steps: a forward with its backward, what they take and where they may be planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.what_if import replan
from compiled_fsdp.reporting.report import GraphReport

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
    """

    number: int
    report: GraphReport
    tasks: Tasks
    simulation: Simulation
    rules: PlanRules

    @property
    def room(self) -> float:
        """Bytes that its plan may hold: the budget, or what the device has."""
        return DEVICE_SHARE * self.rules.device_bytes if self.rules.budget is None else self.rules.budget


@dataclass(frozen=True)
class Step:
    """A forward and its backward, or a graph without one.

    Attributes:
        graphs: in the order in which they run.
        graph_break: of one of several graphs of a forward: why it is not one, and the code line.
    """

    graphs: tuple[PlannedGraph, ...]
    graph_break: tuple[str, str] | None = None

    @property
    def seconds(self) -> float:
        """Of one call of each graph."""
        return sum(graph.simulation.seconds for graph in self.graphs)

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for collectives of ours."""
        return sum(graph.simulation.exposed for graph in self.graphs)

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
    ) -> list[Simulation] | None:
        """The plans of all graphs with other tasks or under other rules; None where one does not fit into memory."""
        found = []
        for graph in self.graphs:
            simulation = replan(change(graph.tasks), rules(graph.rules))
            if simulation is None:
                return None
            found.append(simulation)
        return found


def steps_of(graphs: Sequence[GraphReport], graph_breaks: Sequence[tuple[str, str]] = ()) -> list[Step]:
    """Forwards with their backwards, which are compiled right after them; graphs without collectives are left out.

    A fragment that did not end in a break itself is one because of another: of the first of ``graph_breaks``.
    """
    steps: list[Step] = []
    previous: GraphReport | None = None
    for number, report in enumerate(graphs):
        if report.tasks is not None and report.simulation is not None and report.rules is not None:
            graph = PlannedGraph(number, report, report.tasks, report.simulation, report.rules)
            ends_step = report.phase == "backward" and previous is not None and previous.phase == "forward"
            if ends_step and steps and previous is steps[-1].graphs[-1].report and previous.reads == report.reads:
                steps[-1] = replace(steps[-1], graphs=(*steps[-1].graphs, graph))
            else:
                cause = report.graph_break or next(iter(graph_breaks), None)
                steps.append(Step((graph,), cause if report.is_fragment else None))
        previous = report
    return steps


def by_module(reads: Sequence[Read]) -> Iterator[tuple[str, list[Read]]]:
    """Reads by the module that owns the parameters, in their order."""
    found: dict[str, list[Read]] = {}
    for read in reads:
        found.setdefault(read.name.rpartition(".")[0], []).append(read)
    yield from found.items()
