"""The passes in order. Read this file first.

On the joint graph, before it is cut into forward and backward:

    reshard    mark what is gathered again in backward, and all that is computed from parameters alone

On both halves, where backward gathers over a part of the ranks:

    regather   save this rank's piece in forward, for backward to gather from

On each graph (forward, backward, or inference), after the cut:

    arrange    one gather per shard, one reduction per parameter, each where it is needed or complete
    plan       choose buckets, their form, and where they are launched and waited for; agree on it with the other ranks
    bucket     put gathers and reductions into the plan's buckets
    schedule   move launches and waits to the plan's places, so that compute runs between them
    lower      turn bucket ops into tensor operations, or our kernels (kernels/), and _c10d_functional collectives
    verify     check that the lowered graph still follows the plan and holds no more than the budget

A pass is a function ``name(gm, ctx) -> gm`` that ends with a lint and a log line saying what it changed. ``disable_passes``
switches passes off by name.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.bucket import bucket
from compiled_fsdp.passes.cost import PROFILES, Hardware
from compiled_fsdp.passes.cost.balance import Balance
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.plan import GraphPlan, Read
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks
from compiled_fsdp.passes.planner import plan
from compiled_fsdp.passes.reshard import reshard
from compiled_fsdp.passes.schedule import schedule
from compiled_fsdp.passes.verify import check_graph, verify

log = logging.getLogger(__name__)

Pass = Callable[[GraphModule, "PassContext"], GraphModule]

JOINT_PASSES: tuple[Pass, ...] = (reshard,)
GRAPH_PASSES: tuple[Pass, ...] = (arrange, plan, bucket, schedule, lower, verify)


@dataclass
class PassContext:
    """What a pass may know.

    Attributes:
        phase: "joint", "forward", "backward" or "inference".
        reads: the region's reads by index.
        groups, ranks: process-group name and this rank's number in it, by mesh label. across: the name of the replicas' group,
            where there are replicas. reducing: of the one that reduces, if it is another.
        bucket, overlap, prefetch, verify, optimizer_bytes: options (``compiled_fsdp/options.py``).
        groups_of_reads: where ``bucket`` is the user's own plan, the number of its bucket by read.
        budget: bytes on each rank, or None. elsewhere: bytes that are held outside of a part of a broken forward. keep_as_sharded: whether what stays full is as the units were sharded, and not the
            planner's choice; that is ``kept``, reads by index. hardware: what compute and collectives cost.
        fused: whether Inductor generates the code. may_exchange: whether a reduction can be an all-to-all (gloo).
        keep_single: keep collectives in groups of one rank. kernels: whether ``kernels/`` copies into buckets and out of them.
        part: whether the graph is one of several of a forward, and its first gather and last reductions go beyond it. recheck: whether
            shards are compared with what was sent of them before.
        agree: what all ranks' graphs must have in common, how to make a proposal and how long to wait in, the plan of all ranks out. knows: whether they
            have agreed on that before.
        plan, tasks, schedule, run_of, simulation, balance: set by ``plan``.
        record: called with a pass's name and the graph after it.
    """

    phase: str
    reads: Mapping[int, Read]
    groups: Mapping[int, str]
    ranks: Mapping[int, int] = field(default_factory=lambda: defaultdict(int))
    across: Mapping[int, str] = field(default_factory=dict)
    reducing: Mapping[int, str] = field(default_factory=dict)
    bucket: Any = "module"
    groups_of_reads: Mapping[int, int] = field(default_factory=dict)
    budget: float | None = None
    elsewhere: float = 0
    keep_as_sharded: bool = True
    kept: frozenset[int] | None = None
    optimizer_bytes: float = 8
    hardware: Hardware = PROFILES["cpu"]
    fused: bool = True
    may_exchange: bool = False
    overlap: bool = True
    prefetch: str = "before"
    verify: str = "plan"
    keep_single: bool = False
    kernels: bool = False
    part: bool = False
    recheck: bool = True
    disabled: frozenset[str] = frozenset()
    agree: Callable[..., GraphPlan] = lambda common, propose, patience=None: propose()
    knows: Callable[[tuple[str, ...]], bool] = lambda common: False
    plan: GraphPlan | None = None
    tasks: Tasks | None = None
    schedule: Schedule = ()
    run_of: Mapping[Node, int] = field(default_factory=dict)
    simulation: Simulation | None = None
    balance: Balance | None = None
    record: Callable[[str, GraphModule], None] = lambda name, gm: None
    summary: dict[str, str] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The number of the graph's last, empty run."""
        return self.tasks.end if self.tasks is not None else -1

    def reduce_group(self, mesh: int) -> str:
        """The name of the process group in which gradients are reduced."""
        return self.reducing.get(mesh, self.groups[mesh])

    def has_collective(self, world: int) -> bool:
        """Whether a group of ``world`` ranks communicates."""
        return world > 1 or self.keep_single

    def changed(self, name: str, summary: str) -> None:
        """Say what the pass ``name`` did, in one line."""
        self.summary[name] = summary
        log.debug("%s graph, %s: %s", self.phase, name, summary)


def pass_names() -> tuple[str, ...]:
    """The names that ``disable_passes`` takes."""
    return tuple(p.__name__ for p in (*JOINT_PASSES, *GRAPH_PASSES))


def run_passes(passes: tuple[Pass, ...], gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Run ``passes`` in order, those that are not switched off."""
    for run in passes:
        if run.__name__ in ctx.disabled:
            ctx.changed(run.__name__, "switched off")
            continue
        gm = run(gm, ctx)
        if ctx.verify == "full":
            check_graph(gm, after=run.__name__)
        ctx.record(run.__name__, gm)
    return gm
