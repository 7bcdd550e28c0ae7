"""Advice: what would make a step quicker, planned again with the change and given only if it gains something.

Each kind is a function of ``KINDS`` that takes steps and yields advice. Its gain is the difference of simulated steps,
each change alone: gains do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import blocks_by_exposed_time, tasks_with_kept
from compiled_fsdp.passes.plan.what_if import (
    edges_of,
    exposed_at,
    joined,
    replan,
    seconds_between_graphs,
    seconds_within,
    with_batch,
    with_own_block,
    with_smaller_reductions,
    without_gathers,
)
from compiled_fsdp.reporting.steps import DEVICE_SHARE, PlannedGraph, Step, by_module
from compiled_fsdp.reporting.words import common_module, listed, megabytes, milliseconds

MIN_GAIN = 0.01
"""Of the step's time: what gains less is not said."""
HIDDEN = 0.02
"""Communication counts as hidden where no more than this share of the step is exposed."""
MOST_BATCH = 32
"""How many times the batch is looked at."""
MOST_MODULES = 3
"""How many modules of a bucket are tried as units of their own."""
ENOUGH_OF_THE_GAIN = 0.9
"""Of what keeping most would gain: as few layers as gain so much are kept."""


@dataclass(frozen=True)
class Advice:
    """One change that would make a step quicker.

    Attributes:
        kind: the name of the function that found it: "own_unit", "keep_unsharded", ...
        text: for people.
        gain_seconds: by how much a step would be quicker, as simulated.
        step_seconds: what the step takes as it is: forward and backward, or the graphs on both sides of a break.
        graphs: the numbers of the step's graphs in ``Explanation.graphs``.
        change: what to change, as plain data, by the names of arguments and options.
    """

    kind: str
    text: str
    gain_seconds: float
    step_seconds: float
    graphs: tuple[int, ...]
    change: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """This advice as plain data, for ``json.dumps``."""
        return {
            "kind": self.kind,
            "text": self.text,
            "gain_s": self.gain_seconds,
            "step_s": self.step_seconds,
            "graphs": list(self.graphs),
            "change": {key: list(value) if isinstance(value, tuple) else value for key, value in self.change.items()},
        }


def advice_for(steps: Sequence[Step]) -> tuple[Advice, ...]:
    """What gains at least ``MIN_GAIN`` of a step, the greatest gain first; equal advice for several graphs once."""
    found: dict[tuple[str, str], Advice] = {}
    for find in KINDS:
        for advice in find(steps):
            if advice.gain_seconds < MIN_GAIN * advice.step_seconds:
                continue
            key = advice.kind, repr(sorted(advice.change.items()))
            if key not in found or advice.gain_seconds > found[key].gain_seconds:
                found[key] = advice
    return tuple(sorted(found.values(), key=lambda advice: -advice.gain_seconds))


def _saved(step: Step, planned: Sequence[Simulation] | None) -> float:
    """Seconds by which a step would be quicker; minus infinity where there is no plan."""
    return float("-inf") if planned is None else step.seconds - sum(found.seconds for found in planned)


# ---- buckets and launches --------------------------------------------------------------------------------------------
def planner_buckets(steps: Sequence[Step]) -> Iterator[Advice]:
    """Buckets as the planner chooses them, where an option fixes them."""
    for step in steps:
        fixed = step.graphs[0].rules.bucket
        if fixed == "auto":
            continue
        gain = _saved(step, step.replanned(rules=lambda rules: replace(rules, bucket="auto", prefetch="before")))
        shown = repr(fixed) if isinstance(fixed, (str, int, float)) else "your own"
        text = f"leave buckets to the planner: the option bucket='auto' instead of {shown} saves {milliseconds(gain)}"
        yield Advice("planner_buckets", text, gain, step.seconds, step.numbers, {"bucket": "auto"})


def overlap(steps: Sequence[Step]) -> Iterator[Advice]:
    """Launches ahead of compute, where they are switched off."""
    for step in steps:
        if not step.graphs[0].rules.overlap:
            gain = _saved(step, step.replanned(rules=lambda rules: replace(rules, overlap=True)))
            text = f"overlap communication with compute: the option overlap=True saves {milliseconds(gain)}"
            yield Advice("overlap", text, gain, step.seconds, step.numbers, {"overlap": True})


def own_unit(steps: Sequence[Step]) -> Iterator[Advice]:
    """A unit for a module whose parameters share an exposed bucket with others, where buckets are units."""
    for step in steps:
        if step.graphs[0].rules.bucket != "module":
            continue
        best: tuple[float, str, float] | None = None
        for module, exposed, reads in _modules_in_exposed_buckets(step):
            gain = _saved(step, step.replanned(partial(with_own_block, reads=reads)))
            if best is None or gain > best[0]:
                best = gain, module, exposed
        if best is not None:
            gain, module, exposed = best
            text = (
                f"the gather of {module} is exposed {milliseconds(exposed)}: give it its own unit "
                f"(fully_shard it), which saves {milliseconds(gain)}"
            )
            yield Advice("own_unit", text, gain, step.seconds, step.numbers, {"fully_shard": (module,)})


def _modules_in_exposed_buckets(step: Step) -> list[tuple[str, float, frozenset[int]]]:
    """The largest modules that share an exposed gather with another one: name, exposed seconds, reads."""
    reads = {read.index: read for read in step.reads}
    found: dict[str, tuple[int, float, frozenset[int]]] = {}
    for graph in step.graphs:
        for timing in graph.simulation.timings:
            if not timing.launch.gathers or timing.exposed <= 0:
                continue
            members = [reads[task.read] for task in graph.tasks.members_of(timing.launch)]
            modules = dict(by_module(members))
            for module, own in modules.items() if len(modules) > 1 else ():
                size, before, indices = found.get(module, (0, 0.0, frozenset[int]()))
                exposed = before + timing.exposed
                indices |= {read.index for read in own}
                found[module] = max(size, sum(read.bytes for read in own)), exposed, indices
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_MODULES]
    return [(module, exposed, indices) for module, (_, exposed, indices) in largest if module]


def prefetch_lists(steps: Sequence[Step]) -> Iterator[Advice]:
    """Launches where the planner puts them, without the user's prefetch lists."""
    for step in steps:
        if any(graph.tasks.has_prefetch_lists for graph in step.graphs):
            gain = _saved(step, step.replanned(_without_prefetch_lists))
            text = f"leave out the prefetch lists: without them a step takes {milliseconds(gain)} less"
            yield Advice("prefetch_lists", text, gain, step.seconds, step.numbers, {"prefetch": ()})


def _without_prefetch_lists(tasks: Tasks) -> Tasks:
    gathers, reductions = (
        tuple(replace(task, prefetch_blocks=()) for task in side) for side in (tasks.gathers, tasks.reductions)
    )
    return replace(tasks, gathers=gathers, reductions=reductions)


# ---- memory ----------------------------------------------------------------------------------------------------------
def keep_unsharded(steps: Sequence[Step]) -> Iterator[Advice]:
    """``reshard_after_forward=False`` on the layers whose second gather is exposed most, as many as fit."""
    for step in steps:
        if len(step.graphs) == 2 and step.graphs[0].rules.keep_as_sharded and step.graphs[1].tasks.gathers:
            yield from _keep(step, *step.graphs)


def _keep(step: Step, forward: PlannedGraph, backward: PlannedGraph) -> Iterator[Advice]:
    order = blocks_by_exposed_time(backward.tasks, backward.simulation)

    def changed(count: int) -> tuple[Tasks, Tasks]:
        kept = {read for block in order[:count] for read in block}
        return tasks_with_kept(forward.tasks, backward.tasks, kept)

    def quickly(count: int) -> float:
        """Seconds that it saves with the launches of today; less than none where it does not fit."""
        kept = {read for block in order[:count] for read in block}
        seconds = 0.0
        for graph, tasks in zip(step.graphs, changed(count), strict=True):
            schedule = tuple(timing.launch for timing in graph.simulation.timings)
            if graph is backward:
                schedule = without_gathers(graph.tasks, schedule, kept)
            found = seconds_within(tasks, schedule, graph.room)
            if found is None:
                return float("-inf")
            seconds += found
        return step.seconds - seconds

    gains = [quickly(count) for count in range(len(order) + 1)]
    enough = ENOUGH_OF_THE_GAIN * max(gains)
    count = next(count for count, gain in enumerate(gains) if gain >= enough)
    if not count:
        return
    planned = [replan(tasks, graph.rules) for graph, tasks in zip(step.graphs, changed(count), strict=True)]
    if None in planned:
        return
    found = [simulation for simulation in planned if simulation is not None]
    gain = _saved(step, found)
    names = {read.index: read.name for read in step.reads}
    modules = [common_module([names[read] for read in block]) or "the root" for block in order[:count]]
    more = sum(read.bytes for read in step.reads if read.index in {r for block in order[:count] for r in block})
    text = f"{megabytes(more)} more fit: reshard_after_forward=False on {listed(modules)} saves {milliseconds(gain)}"
    change = {"reshard_after_forward": False, "modules": tuple(modules)}
    yield Advice("keep_unsharded", text, gain, step.seconds, step.numbers, change)


def memory_budget(steps: Sequence[Step]) -> Iterator[Advice]:
    """More memory for launches further ahead."""
    for step in steps:
        room = DEVICE_SHARE * step.graphs[0].rules.device_bytes
        budget = step.graphs[0].rules.budget
        if step.graphs[0].rules.bucket != "auto" or (budget is not None and budget >= room):
            continue
        planned = step.replanned(rules=partial(_with_budget, budget=room))
        gain = _saved(step, planned)
        if planned is None:
            continue
        needed = max(found.peak for found in planned)
        had = max(graph.simulation.peak for graph in step.graphs)
        text = (
            f"memory keeps launches back: memory_budget={needed:.0f} ({megabytes(needed)}, {megabytes(needed - had)} "
            f"more than now) saves {milliseconds(gain)}"
        )
        yield Advice("memory_budget", text, gain, step.seconds, step.numbers, {"memory_budget": needed})


def _with_budget(rules: Any, budget: float) -> Any:
    return replace(rules, budget=budget)


# ---- what is computed and sent ---------------------------------------------------------------------------------------
def batch(steps: Sequence[Step]) -> Iterator[Advice]:
    """The batch from which on compute hides communication, if it fits into memory."""
    for step in steps:
        if step.exposed <= HIDDEN * step.seconds:
            continue
        now = step.graphs[0].report.batch or 1
        known = step.graphs[0].report.batch is not None
        wanted = _hidden_from(step, now)
        planned = None if wanted is None else step.replanned(partial(with_batch, factor=wanted / now))
        if wanted is None or planned is None:
            continue
        fits = all(found.peak <= graph.room for found, graph in zip(planned, step.graphs, strict=True))
        seconds = sum(found.seconds for found in planned)
        if not fits or sum(found.exposed for found in planned) > HIDDEN * seconds:
            continue
        gain = step.seconds - seconds * now / wanted
        size = f"batch {wanted} on ({now} now)" if known else f"{wanted} times the batch on"
        text = f"communication is hidden from {size}: the samples of a step take {milliseconds(gain)} less"
        yield Advice("batch", text, gain, step.seconds, step.numbers, {"batch": wanted} if known else {"times": wanted})


def _hidden_from(step: Step, now: int) -> int | None:
    """The least batch at which today's launches leave no more than ``HIDDEN`` exposed, to an eighth of today's.

    None where it would be more than ``MOST_BATCH`` times as large.
    """

    def hidden(size: int) -> bool:
        seconds = exposed = 0.0
        for graph in step.graphs:
            schedule = tuple(timing.launch for timing in graph.simulation.timings)
            found = exposed_at(graph.tasks, schedule, size / now)
            seconds, exposed = seconds + found[0], exposed + found[1]
        return exposed <= HIDDEN * seconds

    grain = max(1, now // 8)
    low, high = now, 2 * now
    while not hidden(high):
        if high >= MOST_BATCH * now:
            return None
        low, high = high, 2 * high
    while high - low > grain:
        middle = low + max(grain, (high - low) // 2 // grain * grain)
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def reduce_dtype(steps: Sequence[Step]) -> Iterator[Advice]:
    """Gradients reduced in bfloat16, where they are reduced in float32."""
    for step in steps:
        trained = [read for read in step.reads if read.trainable]
        if not trained or any(read.reduce_spec.dtype != "float32" or read.reduce_spec.codec for read in trained):
            continue
        gain = _saved(step, step.replanned(partial(with_smaller_reductions, share=0.5)))
        text = (
            "reductions in bfloat16 (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), which rounds gradients before "
            f"they are added up, save {milliseconds(gain)}"
        )
        yield Advice("reduce_dtype", text, gain, step.seconds, step.numbers, {"reduce_dtype": "bfloat16"})


# ---- graph breaks ----------------------------------------------------------------------------------------------------
def graph_break(steps: Sequence[Step]) -> Iterator[Advice]:
    """The graphs on both sides of a break as one."""
    fragments = [step for step in steps if step.graphs[0].report.is_fragment]
    for place, step in enumerate(fragments):
        if step.graph_break is None:
            continue
        after = fragments[place + 1] if place + 1 < len(fragments) else step
        if len(after.graphs) != len(step.graphs):
            continue
        now = whole = 0.0
        for number, graphs in enumerate(zip(step.graphs, after.graphs, strict=True)):
            now += sum(seconds_between_graphs(graph.tasks, graph.simulation, _crossing(graph)) for graph in graphs)
            tasks = joined([graph.tasks for graph in (graphs if number == 0 else reversed(graphs))])
            # without the break there may be no fragments left, and the planner searches
            rules = replace(step.graphs[0].rules, user_buckets=(), bucket="auto", is_fragment=False)
            found = replan(tasks, rules)
            if found is None:
                break
            whole += seconds_between_graphs(tasks, found, edges_of(found))
        else:
            reason, where = step.graph_break
            text = f"a graph break at {where} costs about {milliseconds(now - whole)} a call ({reason})"
            numbers = tuple(dict.fromkeys((*step.numbers, *after.numbers)))
            yield Advice("graph_break", text, now - whole, now, numbers, {"line": where})


def _crossing(graph: PlannedGraph) -> list[int]:
    return [number for number, collective in enumerate(graph.report.collectives) if collective.crosses_graph]


KINDS: tuple[Callable[[Sequence[Step]], Iterator[Advice]], ...] = (
    planner_buckets,
    overlap,
    own_unit,
    prefetch_lists,
    keep_unsharded,
    memory_budget,
    batch,
    reduce_dtype,
    graph_break,
)
"""The kinds of advice. A new one is a function here, which plans again what it advises."""
