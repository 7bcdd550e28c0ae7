"""What a pass may know: reads and groups, the user's options, the hardware, and the plan once there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.transport import GroupNames
from compiled_fsdp.passes.cost import PROFILES, Hardware
from compiled_fsdp.passes.cost.balance import Balance
from compiled_fsdp.passes.plan import GraphPlan, Read
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups(GroupNames):
    """The same, and where their ranks are."""

    # How many nodes the group that gathers is on, and the replicas' group; None for as few as possible.
    nodes: int | None = None
    replicate_nodes: int | None = None

    @property
    def has_reduce_scatter_group(self) -> bool:
        """Whether reductions run in a group of their own, beside gathers."""
        return self.reduce_scatter != self.all_gather


@dataclass(frozen=True)
class GroupPlace:
    """Where the ranks are of a group that the model communicates in by itself."""

    # Of the process group.
    name: str
    # How many ranks it has.
    world: int
    # How many nodes they are on; None for as few as possible.
    nodes: int | None = None


def _no_place(group: Any) -> GroupPlace:
    raise LookupError(f"the graph has a collective in the group {group!r}, of which this pass was told nothing")


@dataclass(frozen=True)
class Planned:
    """What the pass ``plan`` has decided, for the passes after it and for reports."""

    plan: GraphPlan
    # None where the graph has no collectives.
    tasks: Tasks | None = None
    simulation: Simulation | None = None
    # None where the graph's compute could not be priced, too.
    balance: Balance | None = None
    # Launch and wait of each of the plan's collectives, as numbers of compute segments.
    schedule: Schedule = ()
    # The number of each node's compute segment.
    segment_of: Mapping[Node, int] = field(default_factory=dict)
    # What it was made under; None where the graph has no collectives.
    rules: PlanRules | None = None

    @property
    def end(self) -> int:
        """The number of the graph's last, empty segment."""
        return -1 if self.tasks is None else self.tasks.end


@dataclass
class PassContext:
    """What a pass may know. Options are those of ``compiled_fsdp/compiler/options.py``.

    More than 20 attributes: each is one fact, and of each it is plain which passes read it.
    """

    # "joint", "forward", "backward" or "inference".
    phase: str
    # The region's reads by index.
    reads: Mapping[int, Read]
    # By group id: the number of a mesh in the region.
    groups: Mapping[int, Groups]
    # Takes the process group, or its name, of a collective that the model has of its own; says where its ranks are.
    place_of_group: Callable[[Any], GroupPlace] = _no_place

    # ---- how to bucket and when to launch
    # What plans of the region's graphs have to follow.
    rules: PlanRules = field(default_factory=PlanRules)
    # Whether ``buckets/kernels/`` copies into buckets and out of them.
    kernels: bool = False
    # Whether torch's own operations copy into flat buckets and out of them, and no generated code: on the CPU.
    library_copies: bool = False
    # Whether groups of one rank have collectives.
    collectives_at_world_size_1: bool = False

    # ---- memory
    # Bytes that are held outside of this graph, where it is one of several of a broken forward.
    bytes_outside_graph: float = 0
    # Bytes of optimizer state for each element of a trained parameter.
    optimizer_bytes: float = 8
    # The planner's choice of what stays unsharded from forward to backward: indices of reads. None before it is made.
    kept_reads: frozenset[int] | None = None
    # Reads that backward gathers whether it needs them or not, because the plan of all ranks has them.
    gathered_anyway: frozenset[int] = frozenset()

    # ---- what compute and collectives cost
    hardware: Hardware = PROFILES["cpu"]
    # Whether Inductor generates the code, and so fuses kernels.
    fused: bool = True
    # Whether a reduction can be an all-to-all, whose pieces each rank adds up (gloo).
    may_use_all_to_all: bool = False

    # ---- the graph's place in its forward
    # Whether gradients were enabled where the region was compiled. If nothing in it needs a gradient, its graph is an
    # "inference" graph all the same.
    grad_enabled: bool = True
    # Whether shards are compared with what was sent of them before, in one of several graphs of a forward.
    recheck_prefetched: bool = True

    # ---- other ranks
    # Takes what all ranks' graphs must have in common, and how to make a proposal; gives the plan of all ranks.
    agree: Callable[..., GraphPlan] = lambda collectives, propose: propose()
    # The same, if the plan that was agreed on for an earlier model does not fit.
    agree_anew: Callable[..., GraphPlan] = lambda collectives, propose: propose()
    # Whether ranks have agreed before on a plan for what they have in common.
    already_agreed: Callable[[tuple[str, ...]], bool] = lambda collectives: False

    # ---- the passes themselves
    # The option ``verify``: "plan", "full" or "off".
    verify_level: str = "plan"
    # Names of passes that are switched off.
    disabled_passes: frozenset[str] = frozenset()
    # Set by the pass ``plan``.
    planned: Planned | None = None
    # Set by the pass ``bucket``: what code of another shape needs to take part in the graph's collectives.
    agreed_buckets: tuple[AgreedBucket, ...] = ()
    # Set by the pass ``follow``: the reads of the gradients that the graph hands to the runtime.
    followed_gradients: tuple[int, ...] = ()
    # Called with a pass's name and the graph after it.
    record: Callable[[str, GraphModule], None] = lambda name, gm: None
    # What each pass says that it did, by its name.
    summary: dict[str, str] = field(default_factory=dict)

    def has_replicas(self, group_id: int) -> bool:
        """Whether what is reduced over this mesh is then reduced over replicas."""
        return self.groups[group_id].replicate is not None

    def has_collective(self, world: int) -> bool:
        """Whether a group of ``world`` ranks communicates."""
        return world > 1 or self.collectives_at_world_size_1

    def changed(self, name: str, summary: str) -> None:
        """Say what the pass ``name`` did, in one line, which is logged with its time when it has returned."""
        self.summary[name] = summary
