"""The kinds of advice: each makes one change, plans the graphs again, and compares.

Each kind is a function of ``KINDS`` that takes calls of the model and yields advice. The gain is the simulated time of
a call without the change, less that with the change. Each change is tried alone, so gains do not add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.simulate import simulate
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.passes.plan.unsharded_choice import blocks_by_exposed_time, tasks_with_kept
from compiled_fsdp.tools.advice import Advice
from compiled_fsdp.tools.steps import DEVICE_SHARE, ModelCall, PlannedGraph, Step, by_module
from compiled_fsdp.tools.what_if import (
    edges_of,
    joined,
    replan,
    seconds_between_graphs,
    with_batch,
    with_each,
    with_own_block,
    with_smaller_reductions,
    without_gathers,
)
from compiled_fsdp.tools.words import common_module, listed, megabytes, milliseconds

_LAST = {"reduce_dtype": 1, "batch": 2}
"""Kinds of advice that come after all other kinds, and their order."""
HIDDEN = 0.02
"""Communication counts as hidden if at most this share of the step is exposed."""
MOST_BATCH = 4
"""The largest batch to look at, in multiples of the current batch.

Nobody trains with a much larger batch because of communication.
"""
MOST_MODULES = 3
"""How many modules of a step's exposed buckets are tried as units of their own."""
ENOUGH_OF_THE_GAIN = 0.9
"""The share of the largest possible gain that is enough: as few layers as reach it are kept unsharded."""


def advice_for(calls: Sequence[ModelCall]) -> tuple[Advice, ...]:
    """Find all changes that gain at least ``MIN_GAIN`` of a call, the greatest gain first.

    Equal advice for several calls appears once, with its greatest gain. Advice that changes results comes after advice
    that does not. A larger batch comes last, because it changes the training.
    """
    found: dict[tuple[str, str], Advice] = {}
    for find in KINDS:
        for advice in find(calls):
            if not advice.is_worth_it:
                continue
            key = advice.kind, repr(sorted(advice.change.items()))
            if key not in found or advice.gain_seconds > found[key].gain_seconds:
                found[key] = advice
    return tuple(sorted(found.values(), key=lambda advice: (_LAST.get(advice.kind, 0), -advice.gain_seconds)))


def _saved(step: Step, planned: Sequence[PlannedGraph] | None) -> float:
    """Return the seconds by which one run of a step would be faster; minus infinity if there is no plan."""
    return float("-inf") if planned is None else step.seconds - sum(found.seconds for found in planned)


def _saved_in_all(
    call: ModelCall,
    change: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    rules: Callable[[PlanRules], PlanRules] = lambda rules: rules,
) -> float:
    """Return the seconds by which a call would be faster if all of its graphs were planned with the change.

    Minus infinity if there is no plan. Without the change fragments are planned once more, as in ``Step.seconds``.
    """
    before = [(step.replanned() if step.is_fragment else None) or step.graphs for step in call.steps]
    after = [planned for step in call.steps if (planned := step.replanned(change, rules)) is not None]
    if len(after) < len(before):
        return float("-inf")
    return call.seconds_with(before) - call.seconds_with(after)


def _equal_layers(step: Step) -> str:
    """Return the words that follow the names of modules if other layers share the step's graphs; else ""."""
    return f", and likewise on {step.layers - 1} equal" if step.layers > 1 else ""


# ---- buckets and launches --------------------------------------------------------------------------------------------
def planner_buckets(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise to let the planner choose the buckets, if an option fixes them."""
    for call in calls:
        fixed = call.steps[0].graphs[0].rules.bucket
        if fixed == "auto":
            continue
        gain = _saved_in_all(call, rules=lambda rules: replace(rules, bucket="auto", prefetch="before"))
        shown = repr(fixed) if isinstance(fixed, (str, int, float)) else "your own"
        text = f"leave buckets to the planner: the option bucket='auto' instead of {shown} saves {milliseconds(gain)}"
        yield Advice("planner_buckets", text, gain, call.seconds, call.numbers, {"bucket": "auto"})


def overlap(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise to launch collectives ahead of compute, if the option ``overlap`` is off."""
    for call in calls:
        if not call.steps[0].graphs[0].rules.overlap:
            gain = _saved_in_all(call, rules=lambda rules: replace(rules, overlap=True))
            text = f"overlap communication with compute: the option overlap=True saves {milliseconds(gain)}"
            yield Advice("overlap", text, gain, call.seconds, call.numbers, {"overlap": True})


def own_unit(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise a unit of its own for a module that shares an exposed bucket with other modules, if buckets are units.

    Each step gets advice for the module that gains most.
    """
    for call, step in _steps(calls):
        if step.graphs[0].rules.bucket != "module":
            continue
        best: tuple[float, str, float] | None = None
        for module, exposed, reads in _modules_in_exposed_buckets(step):
            gain = step.layers * _saved(step, step.replanned(partial(with_own_block, reads=reads)))
            if best is None or gain > best[0]:
                best = gain, module, exposed
        if best is not None:
            gain, module, exposed = best
            text = (
                f"the gather of {module} is exposed {milliseconds(exposed)}: give it its own unit "
                f"(fully_shard it{_equal_layers(step)}), which saves {milliseconds(gain)}"
            )
            yield Advice("own_unit", text, gain, call.seconds, step.numbers, {"fully_shard": (module,)})


def _steps(calls: Sequence[ModelCall]) -> Iterator[tuple[ModelCall, Step]]:
    return ((call, step) for call in calls for step in call.steps)


def _modules_in_exposed_buckets(step: Step) -> list[tuple[str, float, frozenset[int]]]:
    """Return the largest modules that share an exposed gather with others: name, exposed seconds, reads."""
    reads = {read.index: read for read in step.reads}
    found: dict[str, tuple[int, float, frozenset[int]]] = {}
    for graph in step.graphs:
        for timing in graph.simulation.timings:
            if not timing.launch.kind.supplies or timing.exposed <= 0:
                continue
            members = [reads[task.read] for task in graph.tasks.members_of(timing.launch)]
            modules = dict(by_module(members))
            for module, own in modules.items() if len(modules) > 1 else ():
                size, before, indices = found.get(module, (0, 0.0, frozenset[int]()))
                exposed = before + timing.exposed
                indices |= {read.index for read in own}
                found[module] = max(size, sum(read.bytes for read in own)), exposed, indices
    found.pop("", None)  # the root
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_MODULES]
    return [(module, exposed, indices) for module, (_, exposed, indices) in largest]


def prefetch_lists(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise to leave out the user's prefetch lists, so that the planner places the launches."""
    for call in calls:
        if any(graph.tasks.has_prefetch_lists for step in call.steps for graph in step.graphs):
            gain = _saved_in_all(call, _without_prefetch_lists)
            text = f"leave out the prefetch lists: without them a step takes {milliseconds(gain)} less"
            yield Advice("prefetch_lists", text, gain, call.seconds, call.numbers, {"prefetch": ()})


def _without_prefetch_lists(tasks: Tasks) -> Tasks:
    return with_each(tasks, lambda task: replace(task, prefetch_blocks=()))


# ---- memory ----------------------------------------------------------------------------------------------------------
def keep_unsharded(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise ``reshard_after_forward=False`` for the layers whose second gather is exposed most, if memory has room.

    It keeps as few layers as reach ``ENOUGH_OF_THE_GAIN``.
    """
    for call, step in _steps(calls):
        if len(step.graphs) == 2 and step.graphs[0].rules.keep_as_sharded and step.graphs[1].tasks.gathers:
            yield from _keep(call, step, *step.graphs)


def _keep(call: ModelCall, step: Step, forward: PlannedGraph, backward: PlannedGraph) -> Iterator[Advice]:
    order = blocks_by_exposed_time(backward.tasks, backward.simulation)

    def bytes_of(count: int) -> int:
        kept = {read for block in order[:count] for read in block}
        return sum(read.bytes for read in step.reads if read.index in kept)

    def changed(count: int) -> tuple[Tasks, Tasks]:
        kept = {read for block in order[:count] for read in block}
        return tasks_with_kept(forward.tasks, backward.tasks, kept)

    def quickly(count: int) -> float:
        """Return the seconds saved with the current launches; minus infinity if ``count`` kept blocks do not fit."""
        kept = {read for block in order[:count] for read in block}
        of_equal_layers = (step.layers - 1) * bytes_of(count)  # they are kept unsharded, too, while this graph runs
        seconds = 0.0
        for graph, tasks in zip(step.graphs, changed(count), strict=True):
            schedule = tuple(timing.launch for timing in graph.simulation.timings)
            if graph is backward:
                schedule = without_gathers(graph.tasks, schedule, kept)
            found = simulate(tasks, schedule)
            if found.peak > graph.room - of_equal_layers:
                return float("-inf")
            seconds += found.seconds
        return sum(graph.simulation.seconds for graph in step.graphs) - seconds

    gains = [quickly(count) for count in range(len(order) + 1)]
    enough = ENOUGH_OF_THE_GAIN * max(gains)
    count = next(count for count, gain in enumerate(gains) if gain >= enough)
    if not count:
        return
    planned = [graph.replanned(tasks, graph.rules) for graph, tasks in zip(step.graphs, changed(count), strict=True)]
    found = [graph for graph in planned if graph is not None]
    if len(found) < len(planned):
        return
    gain = step.layers * _saved(step, found)
    names = {read.index: read.name for read in step.reads}
    modules = [common_module([names[read] for read in block]) or "the root" for block in order[:count]]
    held = megabytes(step.layers * bytes_of(count))
    text = (
        f"keep {listed(modules)} unsharded from forward to backward (reshard_after_forward=False{_equal_layers(step)})"
        f": saves {milliseconds(gain)}, takes {held} more memory, which fits"
    )
    change = {"reshard_after_forward": False, "modules": tuple(modules)}
    yield Advice("keep_unsharded", text, gain, call.seconds, step.numbers, change)


def memory_budget(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise a larger ``memory_budget``, if the plan would launch collectives earlier with all of the device's memory.

    The option holds for all graphs, so all calls share one advice: the largest of the budgets that they need.
    """
    tried = [found for call in calls if (found := _with_all_memory(call)) is not None and found.is_worth_it]
    if not tried:
        return
    best = max(tried, key=lambda advice: advice.gain_seconds)
    needed = max(advice.change["memory_budget"] for advice in tried)
    rules = next(call.steps[0].graphs[0].rules for call in calls if call.numbers == best.graphs)
    now = "none" if rules.budget is None else megabytes(rules.budget)
    text = (
        f"with more memory, collectives are launched earlier: the option memory_budget={round(needed)} "
        f"({megabytes(needed)}) instead of {now} saves {milliseconds(best.gain_seconds)}"
    )
    yield replace(best, text=text, change={"memory_budget": round(needed)})


def _with_all_memory(call: ModelCall) -> Advice | None:
    """Return a call's gain with all memory of the device, and the bytes of it that the call then needs.

    Returns None if the plan may use that much already, or if an option fixes the buckets.
    """
    rules = call.steps[0].graphs[0].rules
    room = DEVICE_SHARE * rules.device_bytes
    if rules.bucket != "auto" or (rules.budget is not None and rules.budget >= room):
        return None
    planned = [(step, step.replanned(rules=lambda rules: replace(rules, budget=room))) for step in call.steps]
    gain = sum(step.layers * _saved(step, found) for step, found in planned)
    needed = max((one.simulation.peak for _, found in planned for one in found or ()), default=0)
    return Advice("memory_budget", "", gain, call.seconds, call.numbers, {"memory_budget": needed})


# ---- batch and dtype -------------------------------------------------------------------------------------------------
def batch(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise the least batch with which compute hides communication, if it fits into memory; once for all calls.

    If there are training steps, evaluation does not count, because its batch is another one.
    """
    training = [call for call in calls if call.phase != "inference call"]
    found = [advice for call in training or calls if (advice := _larger_batch(call)) is not None]
    if found:
        yield max(found, key=lambda advice: advice.gain_seconds)


def _larger_batch(call: ModelCall) -> Advice | None:
    if call.exposed_in_graphs <= HIDDEN * call.seconds:
        return None
    known = call.batch is not None
    now = call.batch or 1
    wanted = _hidden_from(call, now)
    if wanted is None:
        return None
    seconds = exposed = 0.0
    for step in call.steps:
        planned = step.replanned(partial(with_batch, factor=wanted / now))
        if planned is None or any(graph.simulation.peak > graph.room for graph in planned):
            return None
        seconds += step.layers * sum(found.seconds for found in planned)
        exposed += step.layers * sum(found.exposed for found in planned)
    if exposed > HIDDEN * seconds:
        return None
    gain = sum(step.layers * step.seconds for step in call.steps) - seconds * now / wanted
    size = f"a batch of {wanted} or more (now {now})" if known else f"a batch {wanted} times as large, or larger,"
    samples = f"every {now} samples" if known else "as many samples as a step has now"
    text = f"{size} would hide communication: saves {milliseconds(gain)} for {samples}"
    change = {"batch": wanted} if known else {"times": wanted}
    return Advice("batch", text, gain, call.seconds, call.numbers, change)


def _hidden_from(call: ModelCall, now: int) -> int | None:
    """Find the least batch with which the current launches leave at most ``HIDDEN`` exposed.

    It is exact to an eighth of the current batch. Returns None if it is more than ``MOST_BATCH`` times as large.
    """

    def hidden(size: int) -> bool:
        seconds = exposed = 0.0
        for step in call.steps:
            for graph in step.graphs:
                schedule = tuple(timing.launch for timing in graph.simulation.timings)
                found = simulate(with_batch(graph.tasks, size / now), schedule)
                seconds, exposed = seconds + step.layers * found.seconds, exposed + step.layers * found.exposed
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


def reduce_dtype(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise to reduce gradients in bfloat16, if they are reduced in float32."""
    for call in calls:
        trained = [read for step in call.steps for read in step.reads if read.trainable]
        if not trained or any(read.reduce_spec.dtype != "float32" or read.reduce_spec.codec for read in trained):
            continue
        gain = _saved_in_all(call, partial(with_smaller_reductions, share=0.5))
        text = (
            "(changes results) reduce gradients in bfloat16 (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), "
            f"which rounds them before they are added up: saves {milliseconds(gain)}"
        )
        yield Advice("reduce_dtype", text, gain, call.seconds, call.numbers, {"reduce_dtype": "bfloat16"}, True)


# ---- graph breaks ----------------------------------------------------------------------------------------------------
def _around_graph_breaks(calls: Sequence[ModelCall]) -> Iterator[tuple[Step, Step]]:
    """Yield the parts of a call before and after each of its graph breaks.

    If equal layers share the last graph of a call, the same graph follows it. Otherwise nothing is known of the code
    after it.
    """
    for call in calls:
        fragments = [step for step in call.steps if step.is_fragment]
        for before, after in itertools.zip_longest(fragments, fragments[1:]):
            if before.graph_break is not None and (after is not None or before.layers > 1):
                yield before, after or before


def graph_break(calls: Sequence[ModelCall]) -> Iterator[Advice]:
    """Advise to remove a graph break: the graphs on both sides of it are planned as one graph."""
    for step, after in _around_graph_breaks(calls):
        if len(after.graphs) != len(step.graphs):
            continue
        now = whole = 0.0
        for number, graphs in enumerate(zip(step.graphs, after.graphs, strict=True)):
            now += sum(graph.seconds for graph in graphs)
            tasks = joined([graph.tasks for graph in (graphs if number == 0 else reversed(graphs))])
            # without the graph break there may be no fragments left, so the planner searches
            rules = replace(step.graphs[0].rules, user_buckets=(), bucket="auto", is_fragment=False)
            found = replan(tasks, rules)
            if found is None:
                break
            whole += seconds_between_graphs(tasks, found, edges_of(found))
        else:
            assert step.graph_break is not None
            reason, where = step.graph_break
            code_line = where.partition(": ")[0]  # the list of graph breaks shows the code itself
            saved = milliseconds(now - whole)
            text = f"remove the graph break at {code_line} ({reason}): saves about {saved} a call of it"
            numbers = tuple(dict.fromkeys((*step.numbers, *after.numbers)))
            yield Advice("graph_break", text, now - whole, now, numbers, {"line": where})


KINDS: tuple[Callable[[Sequence[ModelCall]], Iterator[Advice]], ...] = (
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
"""The kinds of advice. To add one, write a function that plans the calls again with its change."""
