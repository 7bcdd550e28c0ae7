"""A step in time, as plain data: lanes of compute and of each stream of collectives, and the memory.

``of_report`` makes it from one graph's plan; ``timeline_files.py`` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import CollectiveTask, Tasks
from compiled_fsdp.reporting.report import GraphReport

COMPUTE = "compute"


@dataclass(frozen=True)
class Member:
    """One parameter in a collective.

    Attributes:
        name: of the parameter.
        bytes: of the full, padded tensor.
        first_use: for a gather: the place in ``GraphTimeline.tasks`` of the compute that needs the parameter first.
        last_use: for a gather: the place of the compute that needs it last. The full parameter is freed after it.
        producer: for a reduction: the place of the compute that completes the gradient; None if it is complete at the
            start.
    """

    name: str
    bytes: int
    first_use: int | None = None
    last_use: int | None = None
    producer: int | None = None


@dataclass(frozen=True)
class Task:
    """One bar in a lane: a piece of compute, or a collective.

    Attributes:
        name: the parameters of a collective, the milestones of compute, or "pack ..." and "unpack ..." for a bucket's
            copies.
        kind: "compute", "gather", "reduce", or another collective's op, such as "all_reduce" of the model's own.
        stream: the lane: "compute", or a lane of collectives, which run one after the other.
        start_s: seconds from the step's start.
        duration_s: seconds.
        bytes: the bytes of a collective's full, padded tensors.
        launch_s: when a collective was launched, seconds from the step's start. It starts when its stream is free.
        wait_s: when compute needs it, seconds from the step's start.
        exposed_s: how many seconds compute waits for it.
        first_use: the earliest first use of ``members``.
        last_use: the latest last use of ``members``.
        producer: the latest producer of ``members``.
        members: the parameters of a bucket.
        reason: why it is not launched earlier (``passes/plan/explain_plan.py``).
    """

    name: str
    kind: str
    stream: str
    start_s: float
    duration_s: float
    bytes: int = 0
    launch_s: float | None = None
    wait_s: float | None = None
    exposed_s: float = 0.0
    first_use: int | None = None
    last_use: int | None = None
    producer: int | None = None
    members: tuple[Member, ...] = ()
    reason: str = ""

    @property
    def end_s(self) -> float:
        """When it ends, seconds from the step's start."""
        return self.start_s + self.duration_s


@dataclass(frozen=True)
class GraphTimeline:
    """One graph of a step.

    Attributes:
        name: "forward", "backward" or "inference", with a number if the step has several.
        start_s: when it starts, seconds from the step's start.
        duration_s: seconds that it takes.
        tasks: the planned lanes, each in order; compute is first.
        memory: pairs of a time (seconds from the step's start) and the most bytes on a rank from then to the next
            pair's time.
        measured: the measured lanes; empty if the graph was not measured.
    """

    name: str
    start_s: float
    duration_s: float
    tasks: tuple[Task, ...]
    memory: tuple[tuple[float, int], ...] = ()
    measured: tuple[Task, ...] = ()

    def after(self, seconds: float) -> GraphTimeline:
        """Return the same graph, ``seconds`` later."""
        return replace(
            self,
            start_s=self.start_s + seconds,
            tasks=_later(self.tasks, seconds),
            memory=tuple((at + seconds, held) for at, held in self.memory),
            measured=_later(self.measured, seconds),
        )


def _later(tasks: Sequence[Task], seconds: float) -> tuple[Task, ...]:
    def moved(time: float | None) -> float | None:
        return None if time is None else time + seconds

    return tuple(
        replace(t, start_s=t.start_s + seconds, launch_s=moved(t.launch_s), wait_s=moved(t.wait_s)) for t in tasks
    )


@dataclass(frozen=True)
class Timeline(PlainData):
    """Graphs of a step, one after another."""

    graphs: tuple[GraphTimeline, ...]
    # What was planned for, for a page's title: "h100".
    hardware: str = ""

    @staticmethod
    def of(graphs: Sequence[GraphTimeline], hardware: str = "") -> Timeline:
        """Place graphs one after another: each begins at the end of the graph before it."""
        at, placed = 0.0, []
        for graph in graphs:
            placed.append(graph.after(at - graph.start_s))
            at += graph.duration_s
        return Timeline(tuple(placed), hardware)

    @property
    def seconds(self) -> float:
        """Seconds of all graphs together."""
        return sum(graph.duration_s for graph in self.graphs)


def timeline_of(reports: Sequence[GraphReport]) -> Timeline:
    """Make the timeline of a step: forwards in the order of compilation, then backwards in the reverse order.

    All fragments of a forward are shown, once each, and the backward of "forward 1" is "backward 1". Otherwise only the
    newest graph of each phase is shown, because older graphs are for other sizes or modes. Inference graphs are left
    out if there is one whole forward graph.

    Raises:
        ValueError: no graph has collectives of compiled_fsdp.
    """
    found: list[GraphTimeline] = []
    for phase in ("forward", "backward", "inference"):
        of_phase = [report for report in reports if report.phase == phase and report.simulation is not None]
        fragments = [report for report in of_phase if report.is_fragment]
        chosen = fragments or of_phase[-1:]
        numbered = [*enumerate(chosen)]
        for number, report in numbered if phase != "backward" else reversed(numbered):
            graph = of_report(report, phase if len(chosen) == 1 else f"{phase} {number}")
            found += [graph] if graph is not None else []
    if any(graph.name == "forward" for graph in found):
        found = [graph for graph in found if not graph.name.startswith("inference")]
    if not found:
        raise ValueError("timeline: nothing with collectives is compiled yet: call the compiled model once.")
    hardware = next((report.planned_for.name for report in reports if report.planned_for is not None), "")
    return Timeline.of(found, hardware)


# ---- from a plan -----------------------------------------------------------------------------------------------------
def of_report(report: GraphReport, name: str = "") -> GraphTimeline | None:
    """Show a compiled graph's plan in time; None for a graph without collectives of compiled_fsdp."""
    if report.tasks is None or report.simulation is None:
        return None
    names = {read.index: read.name for read in report.reads}
    reasons = [collective.reason for collective in report.collectives]
    return of_plan(report.tasks, report.simulation, name or report.phase, names, reasons)


def of_plan(
    tasks: Tasks,
    simulation: Simulation,
    name: str,
    names: dict[int, str] | None = None,
    reasons: Sequence[str] = (),
) -> GraphTimeline:
    """Show a simulated schedule in time.

    Args:
        names: the parameters' names by the index of their read; a read without a name is called "read 3".
        reasons: for each launch, why it is not earlier; empty for none.
    """
    return _Drawing(tasks, simulation, names or {}, reasons).graph(name)


class _Drawing:
    """Plays a simulation again, as ``passes/plan/simulate.py`` does, and records compute between the collectives."""

    def __init__(self, tasks: Tasks, simulation: Simulation, names: dict[int, str], reasons: Sequence[str]) -> None:
        self.tasks, self.simulation, self.names = tasks, simulation, names
        self.reasons = list(reasons) or [""] * len(simulation.timings)
        # All collectives in the order of their launches, as in the simulator.
        launched = [(timing.issued, timing.start, timing.end) for timing in simulation.timings]
        launched += [
            (timing.issued, timing.start, timing.end)
            for of, timing in zip(tasks.model_collectives, simulation.model_timings, strict=True)
            if not of.is_copy
        ]
        self.busy = [(start, end) for _, start, end in sorted(launched, key=lambda times: times[0])]
        self.compute: list[Task] = []
        # For each segment, its place in ``compute``.
        self.place: list[int] = []
        self.waits: dict[int, float] = {}

    def graph(self, name: str) -> GraphTimeline:
        simulation, now = self.simulation, 0.0
        for at, segment in enumerate(self.tasks.segments):
            self._copies_at(at, now)
            begin = self._after_models_own(at)
            now = self._worked(begin, segment.seconds, segment.contention)
            self.place.append(len(self.compute))
            self.compute.append(Task(", ".join(segment.milestones), COMPUTE, COMPUTE, begin, now - begin))
        lanes = [*self.compute, *self._ours(), *self._models()]
        memory = tuple(zip((0.0, *simulation.reached[1:]), simulation.curve, strict=True))
        return GraphTimeline(name, 0.0, simulation.seconds, tuple(lanes), memory)

    def _after_models_own(self, at: int) -> float:
        """Return when compute goes on at a segment's start, after launches and waits of the model's own collectives."""
        now = self.simulation.reached[at]
        launched, waited = self.tasks.model_events.get(at, ((), ()))
        for _ in launched:
            now = self._worked(now, self.tasks.launch_seconds, self.tasks.copy_contention)
        return max(now, *(self.simulation.model_timings[i].end for i in waited), now)

    def _worked(self, start: float, seconds: float, contention: float) -> float:
        """Return when compute of ``seconds`` ends that begins at ``start``. It is slower beside collectives."""
        slow, now = 1 + contention, start
        for begin, end in self.busy:
            if end <= now or slow == 1:
                continue
            free = min(seconds, max(begin - now, 0.0))
            now, seconds = now + free, seconds - free
            if seconds <= 0:
                return now
            done = min(seconds, (end - now) / slow)
            now, seconds = (end if done < seconds else now + done * slow), seconds - done
            if seconds <= 0:
                return now
        return now + seconds

    def _copies_at(self, at: int, now: float) -> None:
        """Record the waits, the packing and the unpacking at a milestone, in their order."""
        timings = self.simulation.timings
        here = [(i, timing.launch) for i, timing in enumerate(timings)]
        waits = [i for i, launch in here if launch.wait == at]
        before = [i for i in waits if not timings[i].launch.kind.supplies and timings[i].launch.at < at]
        for i in before:
            now = self._unpack(i, now)
        for i in (i for i, launch in here if launch.at == at):
            issued = timings[i].issued
            if issued > now:
                self.compute.append(Task(f"pack {self._name(i)}", COMPUTE, COMPUTE, now, issued - now))
            now = issued
        gathers = [i for i in waits if timings[i].launch.kind.supplies]
        for i in (*gathers, *(i for i in waits if i not in before and i not in gathers)):
            now = self._unpack(i, now)

    def _unpack(self, i: int, now: float) -> float:
        timing = self.simulation.timings[i]
        launch = timing.launch
        self.waits[i] = now
        there = max(now, timing.end)
        unpacking = self.tasks.costs_of(launch.kind, launch.indices, launch.form).unpacking
        done = self._worked(there, unpacking, self.tasks.copy_contention)
        if done > there:
            self.compute.append(Task(f"unpack {self._name(i)}", COMPUTE, COMPUTE, there, done - there))
        return done

    def _members(self, i: int) -> list[CollectiveTask]:
        return self.tasks.members_of(self.simulation.timings[i].launch)

    def _name(self, i: int) -> str:
        return ", ".join(self.names.get(task.read, f"read {task.read}") for task in self._members(i))

    def _ours(self) -> list[Task]:
        found = []
        for i, timing in enumerate(self.simulation.timings):
            members = tuple(self._member(task, timing.launch.kind) for task in self._members(i))
            kind = timing.launch.kind.value
            channel = self.tasks.channels[self._members(i)[0].channel]
            found.append(
                Task(
                    self._name(i), kind, _lane(channel), timing.start, timing.end - timing.start,
                    sum(member.bytes for member in members), timing.issued, self.waits.get(i), timing.exposed,
                    min((m.first_use for m in members if m.first_use is not None), default=None),
                    max((m.last_use for m in members if m.last_use is not None), default=None),
                    max((m.producer for m in members if m.producer is not None), default=None),
                    members, self.reasons[i],
                )
            )  # fmt: skip
        return found

    def _member(self, task: CollectiveTask, kind: Kind) -> Member:
        name = self.names.get(task.read, f"read {task.read}")
        if kind is Kind.GATHER:
            return Member(name, task.size.sent, self.place[task.first], self.place[task.last])
        return Member(name, task.size.sent, producer=self.place[task.first - 1] if task.first else None)

    def _models(self) -> list[Task]:
        found = []
        channels = [self.tasks.channels[of.channel] for of in self.tasks.model_collectives]
        own = zip(self.tasks.model_collectives, channels, strict=True)
        streams = sorted({channel.stream for of, channel in own if not of.is_copy})  # one for each link
        for of, channel, timing in zip(
            self.tasks.model_collectives, channels, self.simulation.model_timings, strict=True
        ):
            took = timing.end - timing.start
            wait = timing.end - timing.exposed if timing.exposed else None
            link = "" if of.is_copy or len(streams) < 2 else f", link {streams.index(channel.stream) + 1}"
            lane = f"copies ({of.kind})" if of.is_copy else f"the model's own, {channel.world} ranks{link}"
            found.append(
                Task(of.kind, of.kind, lane, timing.start, took, of.bytes, timing.issued, wait, timing.exposed)
            )
        return found


def _lane(channel: CommChannel) -> str:
    """Name the lane of a channel's stream, whose number is from ``stream_of`` in ``passes/channel.py``."""
    stream, of_reductions = channel.stream, channel.stream < 0
    group = -1 - stream if of_reductions else stream
    number = f" {group + 1}" if group else ""
    return f"network{number}, {channel.world} ranks" + ", reductions" * of_reductions
