"""Other placements of a step's parameters: the planned time and memory of each, beside the step as it is.

Only placements that the step's tasks tell everything about are planned. For example, parameters that are kept have no
place in backward at which they could be gathered again, so resharding them is not among the choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import tasks_with_kept
from compiled_fsdp.tools.steps import ModelCall, PlannedGraph, Step
from compiled_fsdp.tools.what_if import nodes_of, with_shards_in_nodes
from compiled_fsdp.tools.words import megabytes, milliseconds


@dataclass(frozen=True)
class Choice:
    """A placement of a training step's parameters, as planned.

    Attributes:
        name: "as it is", "all kept" (``reshard_after_forward=False`` on all units), or "HSDP".
        seconds: planned seconds of forward and backward.
        exposed: the part of them in which compute waits for collectives.
        peak: bytes at the peak on one rank.
        fits: whether that is within the memory budget, or without one within 90 % of the device's memory.
        change: the arguments of ``fully_shard`` that lead to it.
    """

    name: str
    seconds: float
    exposed: float
    peak: int
    fits: bool
    change: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: the name, the times, the memory."""
        exposed = f"{milliseconds(self.exposed)} of it exposed"
        room = "" if self.fits else ", which does not fit"
        return f"{self.name}: {milliseconds(self.seconds)}, {exposed}, {megabytes(self.peak)}{room}"

    def to_dict(self) -> dict[str, Any]:
        """Return this choice as plain data, for ``json.dumps``."""
        change = {name: list(value) if isinstance(value, tuple) else value for name, value in self.change.items()}
        return asdict(self) | {"change": change}


def choices_of(call: ModelCall) -> tuple[Choice, ...]:
    """The placements of a training step in one forward and one backward graph; the first is the step as it is.

    It is empty for any other call: an inference, or a forward with graph breaks.
    """
    if len(call.steps) != 1 or call.is_broken or len(call.steps[0].graphs) != 2:
        return ()
    return tuple(_choices(call.steps[0]))


def _choices(step: Step) -> Iterator[Choice]:
    forward, backward = step.graphs
    yield _choice("as it is", step.graphs, {}, forward.room)
    kept = {task.read for task in backward.tasks.gathers}
    if kept and forward.rules.keep_as_sharded:
        yield _planned(
            "all kept", step, tasks_with_kept(forward.tasks, backward.tasks, kept), reshard_after_forward=False
        )
    nodes, hardware = nodes_of(forward.tasks, step.reads), forward.report.planned_for
    if nodes > 1 and hardware is not None:
        both = [
            with_shards_in_nodes(graph.tasks, reads=step.reads, nodes=nodes, hardware=hardware) for graph in step.graphs
        ]
        changed = [tasks for tasks in both if tasks is not None]
        if len(changed) == len(both):
            mesh = (nodes, step.reads[0].world // nodes)
            yield _planned("HSDP", step, changed, replicates=True, mesh=mesh)


def _planned(name: str, step: Step, changed: Sequence[Tasks], *, replicates: bool = False, **change: Any) -> Choice:
    """Plan both graphs with other tasks, without a budget: whether they fit is a part of the answer."""
    planned = []
    for graph, tasks in zip(step.graphs, changed, strict=True):
        found = graph.replanned(tasks, replace(graph.rules, budget=None, replicates=replicates))
        assert found is not None  # without a budget everything fits
        planned.append(found)
    return _choice(name, planned, change, step.graphs[0].room)


def _choice(name: str, graphs: Sequence[PlannedGraph], change: Mapping[str, Any], room: float) -> Choice:
    peak = max(graph.simulation.peak for graph in graphs)
    return Choice(
        name,
        sum(graph.seconds for graph in graphs),
        sum(graph.exposed for graph in graphs),
        peak,
        peak <= room,
        change,
    )
