"""The time of a call whose graphs run one after another because of graph breaks: one simulation of all of them.

As in the runtime, a graph's first gather is launched right after the last gather of the graph before it, and its last
reduction is waited for once the graph after it has launched its own. Code that is not compiled takes no time here.
"""

# Why: docs/design/graph-breaks.md, "The next gather is predicted from parameter sets"

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.simulate import Simulation, simulate
from compiled_fsdp.passes.plan.tasks import Launch, Tasks
from compiled_fsdp.tools.what_if import joined


def simulate_in_sequence(graphs: Sequence[tuple[Tasks, Simulation, Collection[int]]]) -> Simulation:
    """Simulate graphs one after another.

    Args:
        graphs: of each its tasks, its own simulation, and the numbers of the launches that cross its edges.
    """
    tasks = joined([tasks for tasks, _, _ in graphs])
    launches: list[Launch] = []
    done = dict.fromkeys(Kind, 0)
    offset = 0
    last_gather: int | None = None  # its place in the graph before
    deferred: list[int] = []  # places in ``launches`` of reductions that the next graph waits for
    for of, simulation, crossing in graphs:
        ahead, last_gather, late = last_gather, offset, []
        for number, timing in enumerate(simulation.timings):
            launch = timing.launch
            at, wait = launch.at + offset, launch.wait + offset
            if launch.kind.supplies:
                at = ahead if number in crossing and ahead is not None else at
                last_gather = max(last_gather, at)
            elif number in crossing:
                late.append(len(launches))
            indices = tuple(i + done[launch.kind] for i in launch.indices)
            launches.append(dataclasses.replace(launch, indices=indices, at=at, wait=wait))
        own = launches[len(launches) - len(simulation.timings) :]
        if reductions := [launch.at for launch in own if not launch.kind.supplies]:
            for place in deferred:
                launches[place] = dataclasses.replace(launches[place], wait=max(reductions))
            deferred = late
        for kind in Kind:
            done[kind] += len(of.collectives(kind))
        offset += of.end
    for place in deferred:
        launches[place] = dataclasses.replace(launches[place], wait=tasks.end)
    return simulate(tasks, tuple(sorted(launches, key=lambda launch: launch.at)))
