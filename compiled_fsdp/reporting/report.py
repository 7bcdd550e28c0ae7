"""Reports: the facts that are kept about each compiled graph and its collectives."""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch.fx import GraphModule, Node

from compiled_fsdp.base import traffic, watch
from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.buckets.transport import LAUNCHES
from compiled_fsdp.passes.alive import HeldByModule
from compiled_fsdp.passes.context import ForBackward, PassContext
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.cost.balance import Balance
from compiled_fsdp.passes.cost.compute import LibraryKernel
from compiled_fsdp.passes.graph import crosses_graph, is_wait, kind_of, planned_collectives, waits_of
from compiled_fsdp.passes.plan import Bucket, GraphPlan, Read
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.explain_plan import Numbers, copies_line, model_line, numbers, why_not_earlier
from compiled_fsdp.passes.plan.sensitivity import Sensitivity, sensitivity
from compiled_fsdp.passes.plan.simulate import Simulation, simulate
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks
from compiled_fsdp.ranks.failures import naming_ended_ranks


@dataclass(frozen=True)
class CollectiveReport:
    """One collective in the lowered graph.

    Attributes:
        bucket: the plan's bucket that it gathers or reduces.
        names: the names of the bucket's parameters.
        launch: the index of its launch among the graph's nodes.
        wait: the index of the node that waits for it; ``nodes`` if no node does.
        compute_between: the number of compute calls between launch and wait; packing, unpacking and other collectives
            are not counted.
        nodes: the number of nodes in the graph.
        seconds: the simulated seconds on the link.
        exposed: the simulated seconds that compute waits for it, without the graphs before and after this one.
        reason: why it is not launched earlier (see ``passes/plan/explain_plan.py``).
        crosses_graph: whether it is in flight across an edge of the graph, which is one of several of a forward: a
            gather that is launched before the graph runs, or a reduction that is still in flight at its end.
        launched_by_runtime: whether the graph lets the runtime launch it, because it is at an edge of the graph.
    """

    bucket: Bucket
    names: tuple[str, ...]
    launch: int
    wait: int
    compute_between: int
    nodes: int
    seconds: float
    exposed: float
    reason: str
    crosses_graph: bool = False
    launched_by_runtime: bool = False


class GraphLaunch(NamedTuple):
    """A functional collective that a lowered graph calls.

    Attributes:
        op: the beginning of its name, a key of ``KINDS`` in ``buckets/transport.py``: "all_gather_into_tensor".
        collective: the index of its bucket in ``GraphReport.collectives``; None for one of the model's own. Several
            launches have the same index if their bucket is coalesced on a CPU, or is reduced over replicas, too.
    """

    op: str
    collective: int | None


@dataclass(frozen=True)
class _Kept:
    """The data that ``GraphReport.to_json`` writes; attributes that are not listed are those of ``GraphReport``.

    Attributes:
        schedule: the launches of the simulated plan.
        planned: the graph's text, compressed with zlib, in base 64.
    """

    phase: str
    summary: Mapping[str, str]
    plan: str | None
    collectives: tuple[CollectiveReport, ...]
    launches: tuple[GraphLaunch, ...]
    tasks: str | None
    schedule: Schedule | None
    rules: PlanRules | None
    balance: Balance | None
    budget: float | None
    cache_key: str | None
    planned: str
    kernels: tuple[LibraryKernel, ...] = ()
    for_backward: ForBackward | None = None
    held: tuple[HeldByModule, ...] = ()


@dataclass
class GraphReport:
    """One compiled graph.

    More than 20 attributes: ``explain``, profiles and logs find all facts about a graph here, from its plan to the
    collectives that it launches.

    Attributes:
        phase: "forward", "backward" or "inference".
        reads: the parameters that the region reads, with their names in its first call.
        param_ids: the ids of these parameters, and the id of the first parameter of every other layer or model that
            called the graph.
        graph_break: the reason for the graph break at the graph's end, and the user's code line; None if there is none.
        is_fragment: whether it is one of several graphs of a forward.
        batch: the first size that all input tensors share, parameters and buffers aside, when the graph was compiled;
            None if they share none.
        any_batch: whether that size is symbolic, so that the graph runs with other batches, too.
        hardware: the name of the hardware that the plan was made for, and the source of its numbers; "" without a plan.
        planned_for: that hardware.
        kernels: the graph's library kernels, with their planned times.
        first_params: the id of the parameter that is read first, for each layer or model that called the graph.
        summary: one line for each pass, about its changes to the graph.
        plan: the collectives in launch order.
        collectives: their places in the lowered graph, and their simulated times.
        launches: every functional collective that the lowered graph calls, in order.
        tasks: the graph as the planner saw it: gathers, reductions, and the compute between milestones.
        simulation: the plan's simulated time and memory.
        rules: the rules that the plan follows; None if the graph has no collectives of compiled_fsdp.
        balance: with dynamic shapes, the size from which on compute can hide communication.
        budget: the memory budget in bytes; None for no limit.
        for_backward: what a forward leaves for its backward; None without a memory budget.
        held: what is alive at the peak besides shards, full parameters and full gradients, by module.
        cache_key: Inductor's cache key, if Inductor generated the code.
        from_cache: whether an earlier process compiled all of its code.
    """

    phase: str
    reads: tuple[Read, ...]
    param_ids: frozenset[int]
    graph_break: tuple[str, str] | None
    is_fragment: bool = False
    batch: int | None = None
    any_batch: bool = False
    hardware: str = ""
    planned_for: Hardware | None = None
    kernels: tuple[LibraryKernel, ...] = ()
    first_params: frozenset[int] = frozenset()
    summary: dict[str, str] = field(default_factory=dict)
    plan: GraphPlan | None = None
    collectives: tuple[CollectiveReport, ...] = ()
    launches: tuple[GraphLaunch, ...] = ()
    tasks: Tasks | None = None
    simulation: Simulation | None = None
    rules: PlanRules | None = None
    balance: Balance | None = None
    budget: float | None = None
    for_backward: ForBackward | None = None
    held: tuple[HeldByModule, ...] = ()
    cache_key: str | None = None
    from_cache: bool = False
    _planned: bytes = b""

    @property
    def planned(self) -> str:
        """The graph's text, after scheduling and before lowering."""
        return zlib.decompress(self._planned).decode() if self._planned else ""

    @planned.setter
    def planned(self, text: str) -> None:
        self._planned = zlib.compress(text.encode(), 1)

    def note_plan(self, ctx: PassContext) -> None:
        """Copy the decisions of the passes from ``ctx``."""
        self.summary, self.budget = dict(ctx.summary), ctx.rules.budget
        self.kernels = ctx.library_kernels
        if (planned := ctx.planned) is not None:
            self.plan, self.tasks, self.simulation = planned.plan, planned.tasks, planned.simulation
            self.balance, self.rules, self.held = planned.balance, planned.rules, planned.held

    def to_json(self) -> str:
        """Return as JSON the attributes that a later process cannot know without compiling."""
        return json.dumps(
            {
                "phase": self.phase,
                "summary": self.summary,
                "plan": None if self.plan is None else self.plan.to_json(),
                "collectives": [asdict(collective) for collective in self.collectives],
                "launches": [list(launch) for launch in self.launches],
                "tasks": None if self.tasks is None else self.tasks.to_json(),
                "schedule": None if self.simulation is None else [asdict(t.launch) for t in self.simulation.timings],
                "rules": None if self.rules is None else asdict(self.rules),
                "balance": None if self.balance is None else asdict(self.balance),
                "budget": self.budget,
                "cache_key": self.cache_key,
                "planned": base64.b64encode(self._planned).decode(),
                "kernels": [asdict(kernel) for kernel in self.kernels],
                "for_backward": None if self.for_backward is None else asdict(self.for_backward),
                "held": [asdict(held) for held in self.held],
            }
        )

    def restore(self, text: str) -> None:
        """Set the attributes that ``to_json`` wrote in an earlier process.

        Raises:
            Unfit: the text is something else.
        """
        kept: _Kept = from_json(_Kept, text)
        self.from_cache, self.phase = True, kept.phase
        self.summary, self.budget, self.cache_key = dict(kept.summary), kept.budget, kept.cache_key
        self.plan = None if kept.plan is None else GraphPlan.from_json(kept.plan)
        self.tasks = None if kept.tasks is None else Tasks.from_json(kept.tasks)
        if self.tasks is not None and kept.schedule is not None:
            self.simulation = simulate(self.tasks, kept.schedule)
        self.rules, self.balance = kept.rules, kept.balance
        self.for_backward, self.held = kept.for_backward, kept.held
        names = [read.name for read in self.reads]  # the names in this process's call
        self.collectives = tuple(replace(c, names=tuple(names[i] for i in c.bucket.reads)) for c in kept.collectives)
        self.launches, self.kernels = kept.launches, kept.kernels
        self._planned = base64.b64decode(kept.planned)

    @cached_property
    def numbers(self) -> Numbers | None:
        """The plan's bound, simulated time, exposed time and peak; None without collectives of compiled_fsdp."""
        if self.tasks is None or self.simulation is None:
            return None
        return numbers(self.tasks, self.simulation, self.budget)

    @cached_property
    def sensitivity(self) -> Sensitivity | None:
        """The plan's time with each rate 30 % lower and higher; None without collectives of compiled_fsdp."""
        if self.tasks is None or self.simulation is None:
            return None
        return sensitivity(self.tasks, tuple(timing.launch for timing in self.simulation.timings))

    @property
    def model_collectives(self) -> str | None:
        """A line about the model's own collectives; None without any, or without collectives of compiled_fsdp."""
        if self.tasks is None or self.simulation is None:
            return None
        return model_line(self.tasks, self.simulation)

    @property
    def copies(self) -> str | None:
        """A line about activations that are copied to host memory or back; None without any."""
        if self.tasks is None or self.simulation is None:
            return None
        return copies_line(self.tasks, self.simulation)

    def about_to_run(self) -> contextlib.AbstractContextManager[None]:
        """Count the graph's traffic, and return the context to enter around its call, which informs the watcher."""
        self._count_traffic()
        watcher = watch.current()
        return naming_ended_ranks if watcher is None else _watched(watcher.graph(self))

    def _count_traffic(self) -> None:
        """Count the collectives of one call of the graph; the runtime counts those that it launches."""
        if not traffic.counting():
            return
        reads = {read.index: read for read in self.reads}
        for report in self.collectives:
            bucket, first = report.bucket, reads[report.bucket.reads[0]]
            if report.launched_by_runtime:
                continue
            if bucket.kind == "gather":
                group = first.backward_group
                ranks = group[1] if group and bucket.group_id == group[0] else first.world
                traffic.launched("gather", len(bucket.reads), bucket.bytes, ranks)
            else:
                ranks = 1
                if bucket.transport != "all_reduce":
                    ranks = first.reduces_within[0] if first.reduces_within else first.world
                    traffic.launched("reduce", len(bucket.reads), bucket.bytes, ranks)
                if first.reduce_spec.sync is GradSync.ALL:
                    size = sum(reads[index].reduced_bytes for index in bucket.reads) // ranks
                    again = "reduce" if first.reduces_within else "all_reduce"
                    traffic.launched(again, len(bucket.reads), size, first.reduces_again_over)

    def count(self, kind: str) -> int:
        """The number of collectives of ``kind`` ("gather" or "reduce") in the graph."""
        return sum(report.bucket.kind == kind for report in self.collectives)


@contextlib.contextmanager
def _watched(by: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with naming_ended_ranks, by:
        yield


def collectives_of(gm: GraphModule, ctx: PassContext, reads: Sequence[Read]) -> tuple[CollectiveReport, ...]:
    """Describe the planned collectives, with their places in the lowered graph; empty if it does not match the plan."""
    if ctx.planned is None:
        return ()
    plan, simulation, tasks = ctx.planned.plan, ctx.planned.simulation, ctx.planned.tasks
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    launches: dict[int, list[Node]] = {}
    for node in planned_collectives(gm):
        if node.meta.get("bucket") is not None:
            launches.setdefault(node.meta["bucket"], []).append(node)
    if simulation is None or tasks is None or len(launches) != len(plan.launches):
        return ()
    compute = [i for node, i in place.items() if node.op == "call_function" and not node.meta.get("of_bucket")]
    limit = simulation.peak if ctx.rules.budget is None else ctx.rules.budget
    reports = []
    for number, bucket in enumerate(plan.launches):
        nodes = launches[number]
        launch = min(place[node] for node in nodes)
        waits = [place[wait] for node in nodes for wait in waits_of(node)]
        wait = min(waits, default=len(place))  # a reduction that is in flight at the graph's end has no wait
        timing = simulation.timings[number]
        reports.append(
            CollectiveReport(
                bucket,
                names=tuple(reads[i].name for i in bucket.reads),
                launch=launch,
                wait=wait,
                compute_between=max(bisect_left(compute, wait) - bisect_right(compute, launch), 0),
                nodes=len(place),
                seconds=timing.end - timing.start,
                exposed=timing.exposed,
                reason=why_not_earlier(tasks, simulation, number, limit),
                crosses_graph=any(map(crosses_graph, nodes)),
                launched_by_runtime=any(node.target not in LAUNCHES for node in nodes),
            )
        )
    return tuple(reports)


def launches_of(gm: GraphModule) -> tuple[GraphLaunch, ...]:
    """List the functional collectives that a lowered graph calls, with the indices of their ``CollectiveReport``."""
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and (op := kind_of(node)) is not None:
            found.append(GraphLaunch(op, _bucket_behind(node)))
    return tuple(found)


def _bucket_behind(launch: Node) -> int | None:
    """The number of a launch's bucket; None for one of the model's own collectives.

    A second reduction belongs to the bucket that it reduces again.
    """
    if launch.meta.get("bucket") is not None:
        return int(launch.meta["bucket"])
    if not launch.meta.get("of_bucket"):
        return None
    # go back from a second reduction to the first launch, through the wait and the additions of an all-to-all
    todo = list(launch.all_input_nodes)
    for node in todo:
        if node.meta.get("bucket") is not None:
            return int(node.meta["bucket"])
        inputs = [other for other in node.all_input_nodes if other.meta.get("of_bucket") or is_wait(other)]
        todo += [other for other in inputs if other not in todo]
    return None
