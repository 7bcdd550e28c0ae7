"""The steps of a profile, measured beside planned: each collective, compute, the whole step."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import NamedTuple

from compiled_fsdp.reporting.report import CollectiveReport, GraphReport
from compiled_fsdp.tools.profile_ranks import Entry, Together
from compiled_fsdp.tools.profile_recorder import Launched, Run
from compiled_fsdp.tools.profile_times import Interval, TimedCollective, TimedSpan, Times, in_line
from compiled_fsdp.tools.timeline import COMPUTE, GraphTimeline, Task, Timeline, of_report
from compiled_fsdp.tools.words import rank_list

_SEAM = 20_000  # kernels with gaps of at most so many nanoseconds are drawn as one piece of compute


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective of a step, measured beside planned: medians over the steps.

    Attributes:
        name: the name of its bucket, for example "layers.3.* (4)".
        kind: "gather", "reduce", "all_reduce" over replicas, "broadcast", or "question", by which ranks ask each other.
        bytes: of the full, padded tensors; for an all-reduce, the bytes that are sent.
        graph: the phase of the graph that plans it; "" if no graph plans it.
        per_step: how often it runs in a step.
        seconds: on the wires, on the rank that launched it last, because all ranks are ready then.
        in_flight_s: from the start on the wires to the end, on this rank, including the wait for other ranks.
        exposed_s: seconds that compute waits for it on this rank.
        planned_s: planned seconds on the wires; None if no graph plans it.
        planned_exposed_s: planned seconds that compute waits for it; None if no graph plans it.
    """

    name: str
    kind: str
    bytes: int
    graph: str
    per_step: int
    seconds: float
    in_flight_s: float
    exposed_s: float
    planned_s: float | None
    planned_exposed_s: float | None


@dataclass(frozen=True)
class MeasuredStep:
    """One step on this rank. Times are seconds.

    Attributes:
        seconds: from the start of its first graph or collective to the end of the last.
        compute_s: inside of graphs, without waits: compute, copies of buckets, launches. On GPUs, the time of kernels.
        exposed_s: that compute waits for collectives.
        comm_s: that a collective is in flight, summed over groups.
        off_core_s: that the thread neither ran nor waited for a collective, because other threads, such as gloo's, had
            its core. None on GPUs, and if forward and backward run in different threads.
        most_exposed: kind and name of the collective that compute waits for longest, and the seconds of that wait; None
            without collectives.
        idle_s: that a GPU neither computed nor waited for a collective, because the host was behind. None on the CPU.
        planned_s: planned for its graphs; a graph without a plan counts as zero.
        planned_compute_s: the part of ``planned_s`` without exposed time.
        planned_exposed_s: the exposed part of ``planned_s``.
    """

    seconds: float
    compute_s: float
    exposed_s: float
    comm_s: float
    off_core_s: float | None
    idle_s: float | None
    most_exposed: tuple[str, str, float] | None
    planned_s: float
    planned_compute_s: float
    planned_exposed_s: float


@dataclass(frozen=True, eq=False)
class Step:
    """The recorded spans, collectives and kernels of one step, and when the host launched each kernel."""

    number: int
    spans: tuple[TimedSpan, ...]
    collectives: tuple[TimedCollective, ...]
    kernels: tuple[Interval, ...]
    launched: tuple[int, ...] = ()

    @property
    def runs(self) -> list[TimedSpan]:
        """The calls of compiled graphs."""
        return [at for at in self.spans if at.span.what == "run"]

    @property
    def start(self) -> int:
        """When the step begins, in nanoseconds on the profiler's clock."""
        return min(at.start for at in self.spans)

    @property
    def end(self) -> int:
        """When the step ends, in nanoseconds on the profiler's clock."""
        return max([*(at.end for at in self.spans), *(end for _, end in self.kernels[-1:])])

    @property
    def compiled(self) -> bool:
        """Whether a graph was compiled in the step."""
        return any(at.span.run is not None and at.span.run.compiled_inside for at in self.spans)


# ---- where steps begin -----------------------------------------------------------------------------------------------
def steps_in(times: Times, said: bool) -> list[Step]:
    """Divide a profile into steps.

    Args:
        said: whether the program ended steps by ``step()``. Otherwise a step ends if something outside of a backward
            follows a backward; or, without any backward, if the first graph or collective comes again.
    """
    trains = any(at.span.in_backward for at in times.spans)
    first = _key(times.spans[0]) if times.spans else None
    number, previous, numbers = 0, None, []
    for at in times.spans:
        if said:
            number = at.span.step
        elif previous is not None and at.span.what != "wait":
            ends = previous.span.in_backward and not at.span.in_backward if trains else _key(at) == first
            number += ends
        numbers.append(number)
        previous = at
    of: dict[int, list[TimedSpan]] = defaultdict(list)
    owner: dict[object, int] = {}
    for at, step in zip(times.spans, numbers, strict=True):
        of[step].append(at)
        if at.span.launched is not None:
            owner.setdefault(at.span.launched, step)
    starts = {step: spans[0].start for step, spans in of.items()}
    found = []
    for step, spans in of.items():
        until = min((start for start in starts.values() if start > starts[step]), default=None)
        here = [starts[step] <= start and (until is None or start < until) for start, _ in times.kernels]
        mine = [c for c in times.collectives if owner[c.of] == step]
        kernels = tuple(itertools.compress(times.kernels, here)), tuple(itertools.compress(times.launched, here))
        found.append(Step(step, tuple(spans), tuple(mine), *kernels))
    return found


def _key(at: TimedSpan) -> tuple[str, str]:
    return at.span.what, at.span.label


# ---- this rank's summary for the other ranks -------------------------------------------------------------------------
def summary_of(steps: Sequence[Step]) -> dict[str, list[Entry]]:
    """Collect this rank's collectives by group, in the order of their launches."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for step in steps:
        for c in step.collectives:
            if c.of.ranks:
                found[_group(c)].append((step.number, 1e-9 * (c.wires[1] - c.wires[0]), 1e-9 * c.exposed))
    return dict(found)


def _group(collective: TimedCollective) -> str:
    return ",".join(map(str, collective.of.ranks))


def alone_on_wires(steps: Sequence[Step], together: Together) -> dict[TimedCollective, float]:
    """Return the seconds of each collective on the rank that launched it last, without sharing the wires.

    If two collectives of a group run at once, the second one counts from the end of the first.
    """
    found: dict[TimedCollective, float] = {}
    fastest = {group: iter(seconds) for group, seconds in together.fastest.items()}
    for step in steps:
        for c in step.collectives:
            if c.of.ranks:
                found[c] = next(fastest[_group(c)])
        for group in dict.fromkeys(map(_group, step.collectives)):
            its = [c for c in step.collectives if _group(c) == group]
            for c, (start, end) in zip(its, in_line([c.wires for c in its]), strict=True):
                found[c] = min(found.get(c, 1e-9 * (end - start)), 1e-9 * (end - start))
    return found


# ---- measured beside planned -----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class BucketRun:
    """The collectives of one bucket in a step: on the CPU a coalesced bucket has one for each parameter.

    Attributes:
        collectives: at least one.
        report: the report of the graph that plans the bucket; None if no graph plans it.
        planned: the bucket's collective in that report.
    """

    collectives: tuple[TimedCollective, ...]
    report: GraphReport | None
    planned: CollectiveReport | None

    @property
    def of(self) -> Launched:
        """The collective that was launched first."""
        return self.collectives[0].of

    @property
    def bytes(self) -> int:
        """The bytes of all its collectives, counted as in ``Launched.bytes``."""
        if self.of.kind == "all_reduce" and self.of.collective is not None:
            return sum(c.of.bytes for c in self.collectives)
        return self.of.bytes

    @property
    def key(self) -> tuple[str, tuple[str, ...], str, int, str]:
        """A key that is the same for this bucket in every step."""
        return self.of.kind, self.of.names, self.of.name, self.bytes, self.report.phase if self.report else ""

    @property
    def in_flight(self) -> int:
        """Nanoseconds from the first start on the wires to the last end."""
        return max(c.wires[1] for c in self.collectives) - min(c.wires[0] for c in self.collectives)


def buckets_of(step: Step) -> list[BucketRun]:
    """Return a step's buckets with their plans, in the order of their launches.

    A collective that a graph launched knows its place in the plan. A collective that the runtime launched is found by
    its parameters.
    """
    by_runtime: dict[tuple[str, frozenset[str]], list[tuple[GraphReport, CollectiveReport]]] = defaultdict(list)
    for run in (at.span.run for at in step.runs if at.span.run is not None):
        for collective in run.report.collectives:
            if collective.launched_by_runtime:
                members = frozenset(run.names[i] for i in collective.bucket.reads)
                by_runtime[collective.bucket.kind, members].append((run.report, collective))
    found: dict[object, list[TimedCollective]] = {}
    for c in step.collectives:
        found.setdefault(c.of.bucket, []).append(c)
    buckets = []
    for its in found.values():
        of = its[0].of
        report: GraphReport | None = None
        planned: CollectiveReport | None = None
        if of.run is not None and of.collective is not None:
            report, planned = of.run.report, of.run.report.collectives[of.collective]
        elif reports := by_runtime.get((of.kind, frozenset(of.names))):
            # the first plan is forward's; backward may gather the same parameters again
            report, planned = reports.pop(0)
        buckets.append(BucketRun(tuple(its), report, planned))
    return buckets


def collectives_of_steps(steps: Sequence[Step], seconds: Mapping[TimedCollective, float]) -> list[MeasuredCollective]:
    """Measure each bucket, in the order of launches: its mean in each step, and the median of the means."""
    rows: dict[object, list[list[BucketRun]]] = {}
    for place, step in enumerate(steps):
        for bucket in buckets_of(step):
            rows.setdefault(bucket.key, [[] for _ in steps])[place].append(bucket)
    measured = []
    for by_step in rows.values():
        there = [found for found in by_step if found]
        first = there[0][0]
        report, planned = first.report, first.planned
        # the plan counts an all-reduce of shards over replicas as a part of its reduction
        is_half = planned is not None and first.of.kind == "all_reduce" and planned.bucket.transport != "all_reduce"
        known = report is not None and planned is not None and not is_half
        measured.append(
            MeasuredCollective(
                first.of.name, first.of.kind, first.bytes, "" if report is None else report.phase, len(there[0]),
                median(mean(sum(seconds[c] for c in b.collectives) for b in found) for found in there),
                median(mean(1e-9 * b.in_flight for b in found) for found in there),
                median(mean(1e-9 * sum(c.exposed for c in b.collectives) for b in found) for found in there),
                planned.seconds if known and planned is not None else None,
                _exposed(report, planned) if known and report is not None and planned is not None else None,
            )
        )  # fmt: skip
    return measured


def _exposed(report: GraphReport, collective: CollectiveReport) -> float:
    """Planned exposed seconds; across the graph's edges, the seconds by which it outlasts the graph's compute."""
    if not collective.crosses_graph or report.tasks is None:
        return collective.exposed
    return max(0.0, collective.seconds - report.tasks.seconds_before[-1])


def measured_step(step: Step) -> MeasuredStep:
    """Sum up a step."""
    reports = [at.span.run.report for at in step.runs if at.span.run is not None]
    lanes = [in_line([c.wires for c in its]) for its in by_group(step.collectives).values()]
    planned = [_Planned.of(report) for report in reports]
    waits = [at for at in step.spans if at.span.what in ("wait", "blocking") and at.span.run is not None]
    inside = sum(at.end - at.start for at in step.runs) - sum(at.end - at.start for at in waits)
    computing = sum(end - start for start, end in step.kernels) if step.kernels else inside
    exposed = sum(c.exposed for c in step.collectives)
    by_bucket: Counter[tuple[str, str]] = Counter()
    for bucket in buckets_of(step):
        by_bucket[bucket.of.kind, bucket.of.name] += sum(c.exposed for c in bucket.collectives)
    worst = by_bucket.most_common(1)
    return MeasuredStep(
        1e-9 * (step.end - step.start),
        1e-9 * computing,
        1e-9 * exposed,
        1e-9 * sum(end - start for lane in lanes for start, end in lane),
        _off_core(step, exposed),
        1e-9 * max(0, step.end - step.start - computing - exposed) if step.kernels else None,
        (*worst[0][0], 1e-9 * worst[0][1]) if worst else None,
        sum(p.compute + p.exposed for p in planned),
        sum(p.compute for p in planned),
        sum(p.exposed for p in planned),
    )


def _off_core(step: Step, exposed: int) -> float | None:
    """Return the seconds of a step in which its thread neither ran nor waited for a collective."""
    if step.kernels or len({at.span.thread for at in step.spans}) > 1:
        return None
    last = max(step.spans, key=lambda at: at.end)
    ran = last.span.ran[1] - step.spans[0].span.ran[0]
    return 1e-9 * max(0, last.end - step.spans[0].start - ran - exposed)


class _Planned(NamedTuple):
    """Planned seconds of a graph; collectives across its edges overlap with the graphs before and after it."""

    compute: float
    exposed: float

    @staticmethod
    def of(report: GraphReport) -> _Planned:
        if report.simulation is None:
            return _Planned(0.0, 0.0)
        simulation = report.simulation
        return _Planned(simulation.seconds - simulation.exposed, sum(_exposed(report, c) for c in report.collectives))


def by_group(collectives: Sequence[TimedCollective]) -> dict[str, list[TimedCollective]]:
    """Divide collectives by the ranks of their group ("0,1")."""
    found: dict[str, list[TimedCollective]] = defaultdict(list)
    for c in collectives:
        found[_group(c)].append(c)
    return found


# ---- timeline --------------------------------------------------------------------------------------------------------
def timeline_of_step(step: Step) -> Timeline:
    """Show a step as planned and as measured: its graphs in the order in which they ran."""
    graphs: list[GraphTimeline] = []
    of_graph: list[Run] = []
    for at in step.runs:
        run = at.span.run
        assert run is not None
        graph = of_report(run.report, f"{len(graphs)} {run.name}")
        if graph is not None:
            graphs.append(graph)
            of_graph.append(run)
    placed = list(Timeline.of(graphs).graphs)
    measured: dict[Run | None, list[Task]] = defaultdict(list)
    for task, run in _measured_tasks(step):
        measured[run if run in of_graph else None].append(task)
    for place, (graph, run) in enumerate(zip(placed, of_graph, strict=True)):
        tasks = [*measured[run], *(measured[None] if place == 0 else [])]
        placed[place] = replace(graph, measured=tuple(sorted(tasks, key=lambda task: task.start_s)))
    return Timeline(tuple(placed))


def _measured_tasks(step: Step) -> Iterable[tuple[Task, Run | None]]:
    def at(time: int) -> float:
        return 1e-9 * (time - step.start)

    for run, start, end in _compute(step):
        yield Task("" if run is None else run.name, COMPUTE, COMPUTE, at(start), at(end) - at(start)), run
    for group, its in by_group(step.collectives).items():
        lane = rank_list(its[0].of.ranks) if group else "questions"
        for c, (start, end) in zip(its, in_line([c.wires for c in its]), strict=True):
            wait = at(c.waits[0][0]) if c.waits else None
            yield (
                Task(
                    c.of.name, c.of.kind, lane, at(start), at(end) - at(start), c.of.bytes, at(c.launch[0]), wait,
                    1e-9 * c.exposed,
                ),
                c.of.run,
            )  # fmt: skip


def _compute(step: Step) -> Iterable[tuple[Run | None, int, int]]:
    """Yield pieces of compute: kernels close together; on the CPU, the parts of graph calls between waits."""
    if step.kernels:
        begin, end = step.kernels[0]
        for start, stop in step.kernels[1:]:
            if start > end + _SEAM:
                yield None, begin, end
                begin = start
            end = max(end, stop)
        yield None, begin, end
        return
    for at in step.runs:
        inside = [s for s in step.spans if s.span.run is at.span.run and s.span.what in ("wait", "blocking")]
        edges = [at.start, *(edge for s in inside for edge in (s.start, s.end)), at.end]
        yield from ((at.span.run, start, end) for start, end in list(itertools.pairwise(edges))[::2] if end > start)
