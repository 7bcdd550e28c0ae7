"""What is remembered of each compiled graph."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

from compiled_fsdp.comm import traffic
from compiled_fsdp.comm.reduction import ALL
from compiled_fsdp.compat import frames_that_failed
from compiled_fsdp.passes.cost.balance import Balance
from compiled_fsdp.passes.plan import Bucket, GraphPlan, Read
from compiled_fsdp.passes.plan.explain_plan import Numbers, numbers
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks


@dataclass(frozen=True)
class Flight:
    """One collective in the lowered graph.

    ``launch`` and ``wait`` are places among the graph's ``nodes`` nodes; ``hidden_behind`` counts the calls between them
    that are not part of a bucket (not packing, unpacking or another collective). As simulated: ``seconds`` on the link,
    ``exposed`` seconds that compute waits, and ``reason``, why it is not earlier (see ``passes/plan/explain_plan.py``). ``beyond``: in a
    part of a broken forward, a gather that is in flight before the graph, or a reduction that is left in flight at its end;
    ``exposed`` is what it would be without the graphs around it. ``taken``: launched by the runtime, which gathers between graphs too.
    """

    bucket: Bucket
    names: tuple[str, ...]
    launch: int
    wait: int
    hidden_behind: int
    nodes: int
    seconds: float
    exposed: float
    reason: str
    beyond: bool = False
    taken: bool = False


@dataclass
class GraphReport:
    """One compiled graph.

    Attributes:
        phase: "forward", "backward" or "inference".
        reads: the parameters that the region reads, with the names they had in its first call.
        slots: who they were, and the first one of every other layer or model that the graph was called with.
        graph_break: why Dynamo ended the graph there and the user's code line, if it broke.
        summary: what each pass changed, one line a pass.
        planned: the graph after scheduling and before lowering, as text.
        plan, flights: the collectives in launch order, and where they are.
        part: whether it is one of several graphs of a forward.
        tasks, simulation: the graph as the planner saw it, and its plan in time and memory. budget: bytes, or None.
        balance: with dynamic shapes, the size from which compute can hide communication.
        cache_key: Inductor's cache key, if Inductor generated the code.
    """

    phase: str
    reads: tuple[Read, ...]
    slots: frozenset[int]
    graph_break: tuple[str, str] | None
    part: bool = False
    summary: dict[str, str] = field(default_factory=dict)
    plan: GraphPlan | None = None
    flights: tuple[Flight, ...] = ()
    tasks: Tasks | None = None
    simulation: Simulation | None = None
    balance: Balance | None = None
    budget: float | None = None
    cache_key: str | None = None
    _planned: bytes = b""

    @property
    def planned(self) -> str:
        return zlib.decompress(self._planned).decode() if self._planned else ""

    @planned.setter
    def planned(self, text: str) -> None:
        self._planned = zlib.compress(text.encode(), 1)

    @cached_property
    def numbers(self) -> Numbers | None:
        """Bound, simulated time, exposed time and peak; None for a graph without collectives of ours."""
        if self.tasks is None or self.simulation is None:
            return None
        return numbers(self.tasks, self.simulation, self.budget)

    @property
    def exposed_beyond(self) -> float:
        """Seconds that the gather before the graph and the reductions behind it take longer than compute that is like this graph's."""
        if self.tasks is None:
            return 0.0
        compute = self.tasks.seconds_before[-1]
        return sum(max(0.0, flight.seconds - compute) for flight in self.flights if flight.beyond)

    def called(self) -> None:
        """The graph runs: count what it communicates. What goes beyond it is counted where that is launched."""
        if not traffic.counting():
            return
        reads = {read.index: read for read in self.reads}
        for flight in self.flights:
            bucket, first = flight.bucket, reads[flight.bucket.reads[0]]
            if flight.taken:
                continue
            if bucket.kind == "gather":
                group = first.backward_group
                ranks = group[1] if group and bucket.group_id == group[0] else first.world
                traffic.gathered(len(bucket.reads), bucket.bytes, ranks)
            else:
                replicas = first.replicas if first.reduce_spec.sync == ALL else 1
                traffic.reduced(len(bucket.reads), bucket.bytes, first.world, replicas)

    def count(self, kind: str) -> int:
        """How many launches of ``kind`` ("gather" or "reduce") the graph has."""
        return sum(flight.bucket.kind == kind for flight in self.flights)


@dataclass(frozen=True)
class FailedFrame:
    """A function that Dynamo gave up on as a whole, as it does at a graph break inside a loop: ``filename`` and ``line`` are
    where the function begins, ``where`` is the code line at fault. It runs uncompiled; what it calls is compiled alone."""

    filename: str
    line: int
    reason: str
    where: str


# A job that recompiles for ever must not fill memory; torch._dynamo.reset() empties it.
reports: deque[GraphReport] = deque(maxlen=4096)
failed_frames: dict[FailedFrame, None] = {}


def collect_failed_frames() -> None:
    """Remember the frames that failed since the last call; Dynamo keeps the newest only."""
    failed_frames.update({FailedFrame(*frame): None for frame in frames_that_failed()})


def forget() -> None:
    """Drop all reports."""
    reports.clear()
    failed_frames.clear()
