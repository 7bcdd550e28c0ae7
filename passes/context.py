"""The input of passes: reads and groups, the user's options, the hardware, and the plan once there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.buckets.transport import GroupNames
from compiled_fsdp.passes.alive import HeldByModule
from compiled_fsdp.passes.cost import PROFILES, Hardware
from compiled_fsdp.passes.cost.balance import Balance
from compiled_fsdp.passes.cost.compute import LibraryKernel
from compiled_fsdp.passes.plan import GraphPlan, Read
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups(GroupNames):
    """The process groups of one mesh (``GroupNames``), and how many nodes their ranks are on."""

    # Nodes of the group that gathers, and of the replicas' group. None: as few nodes as the ranks fit on.
    nodes: int | None = None
    replicate_nodes: int | None = None

    @property
    def has_reduce_scatter_group(self) -> bool:
        """Whether reductions run in a process group of their own, so that they can run at the same time as gathers."""
        return self.reduce_scatter != self.all_gather


@dataclass(frozen=True)
class GroupPlace:
    """A process group of the model's own collectives, and where its ranks are."""

    # The process group's name.
    name: str
    # The number of its ranks.
    world: int
    # The number of nodes that they are on. None: as few nodes as the ranks fit on.
    nodes: int | None = None


def _no_place(group: Any) -> GroupPlace:
    raise LookupError(f"the graph has a collective in the group {group!r}, of which this pass was told nothing")


@dataclass(frozen=True)
class Planned:
    """The decisions of the pass ``plan``, for the passes after it and for reports."""

    plan: GraphPlan
    # Tasks and simulation are None if the graph has no collectives, except in a model with replicas: a forward that
    # gathers nothing is a part of the step whose backward all-reduces.
    tasks: Tasks | None = None
    simulation: Simulation | None = None
    # Also None if the graph has no symbolic sizes, or its compute could not be priced.
    balance: Balance | None = None
    # The launch and the wait of each of the plan's collectives, as numbers of compute segments.
    schedule: Schedule = ()
    # The number of each node's compute segment.
    segment_of: Mapping[Node, int] = field(default_factory=dict)
    # The rules that the plan was made under; None if the graph has no collectives.
    rules: PlanRules | None = None
    # What is alive at the peak besides shards, full parameters and full gradients.
    held: tuple[HeldByModule, ...] = ()

    @property
    def end(self) -> int:
        """The number of the graph's last, empty segment."""
        return -1 if self.tasks is None else self.tasks.end


@dataclass(frozen=True)
class ForBackward:
    """What a forward leaves for its backward under a memory budget. Bytes are those of activations on one rank."""

    # Bytes that stay in the device's memory, and those that torch's partitioner alone would leave there.
    saved: int
    saved_without_budget: int
    # How many tensors wait in host memory, and their bytes.
    offloaded: int
    offloaded_bytes: int
    # Seconds of backward's compute for what it computes again because of the budget.
    seconds_again: float
    # A bound: whatever is saved, copied or computed again within the budget, both graphs take so many seconds at least.
    # None if torch's partitioner alone keeps the budget.
    bound: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the budget changes anything."""
        return self.offloaded > 0 or self.saved != self.saved_without_budget

    def __str__(self) -> str:
        """One line for logs and reports."""
        parts = [f"{_size(self.saved)} saved (without a budget {_size(self.saved_without_budget)})"]
        if self.offloaded:
            parts.append(f"{_size(self.offloaded_bytes)} in host memory ({self.offloaded} tensors)")
        if self.seconds_again > 0:
            parts.append(f"{1e3 * self.seconds_again:,.1f} ms to compute the rest again")
        if self.bound is not None:
            parts.append(f"any choice within the budget takes {1e3 * self.bound:,.1f} ms at least")
        return ", ".join(parts)


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@dataclass
class PassContext:
    """Everything besides the graph that passes read, and the results that they leave for later passes.

    ``compiled_fsdp/compiler/options.py`` describes the options. More than 20 attributes: each is one fact, and a search
    for its name shows which passes read it.
    """

    # "joint", "forward", "backward" or "inference".
    phase: str
    # The region's reads by index.
    reads: Mapping[int, Read]
    # The process groups by group id, which is the number of a mesh in the region.
    groups: Mapping[int, Groups]
    # Takes the process group, or its name, of one of the model's own collectives; returns where its ranks are.
    place_of_group: Callable[[Any], GroupPlace] = _no_place

    # ---- how to bucket and when to launch
    # The rules for plans of the region's graphs.
    rules: PlanRules = field(default_factory=PlanRules)
    # Whether the Triton kernels of ``buckets/kernels/`` copy into buckets and out of them.
    kernels: bool = False
    # Whether torch's own operations copy into flat buckets and out of them, instead of generated code (on the CPU).
    library_copies: bool = False
    # Whether groups of one rank launch collectives (an option for debugging and timing).
    collectives_at_world_size_1: bool = False

    # ---- memory
    # Bytes that are held outside of this graph, if graph breaks divide the forward into several graphs; else 0.
    bytes_outside_graph: float = 0
    # Bytes of optimizer state for each element of a trained parameter.
    optimizer_bytes_per_element: float = 8
    # Bytes of host memory that activations may be copied to under a memory budget; 0 for no copies.
    host_memory: float = 0
    # Indices of the reads that stay unsharded from forward to backward, once that is decided for this graph. None: each
    # read as its unit was sharded.
    kept_reads: frozenset[int] | None = None
    # Indices of the reads that backward gathers even if it does not need them, because the agreed plan gathers them.
    gathered_anyway: frozenset[int] = frozenset()

    # ---- costs of compute and collectives
    hardware: Hardware = PROFILES["cpu"]
    # Whether Inductor generates the code, and so fuses kernels.
    fused: bool = True
    # The option ``transport``: "backend" or "symm_mem".
    transport: str = "backend"
    # Whether a reduction may be an all-to-all, after which each rank adds up the parts that it has received (gloo).
    may_use_all_to_all: bool = False

    # ---- the graph's place in its forward
    # Whether gradients were enabled when the region was compiled. The phase may be "inference" all the same: it is if
    # nothing in the region needs a gradient.
    grad_enabled: bool = True
    # Whether a gather that was launched before this graph ran is used only if its shards did not change meanwhile.
    recheck_prefetched: bool = True

    # ---- other ranks
    # Takes the graph's collectives as lines of text, which must be equal on all ranks, and a function that makes this
    # rank's proposal. Returns the plan of all ranks.
    agree: Callable[..., GraphPlan] = lambda collectives, propose: propose()
    # As ``agree``, for a graph that the agreed plan of an earlier model does not fit.
    agree_anew: Callable[..., GraphPlan] = lambda collectives, propose: propose()
    # Takes the graph's collectives; returns whether the ranks have agreed on a plan for them before.
    already_agreed: Callable[[tuple[str, ...]], bool] = lambda collectives: False

    # ---- the passes themselves
    # The option ``verify``: "plan", "full" or "off".
    verify_level: str = "plan"
    # Names of passes that are switched off.
    disabled_passes: frozenset[str] = frozenset()
    # Set by the function ``cut``; None without a memory budget.
    for_backward: ForBackward | None = None
    # Set by the pass ``plan``: the graph's library kernels, with their planned times.
    library_kernels: tuple[LibraryKernel, ...] = ()
    # Set by the pass ``plan``.
    planned: Planned | None = None
    # Set by the pass ``bucket``: the graph's collectives as data, so that a rank with other code can take part in them.
    agreed_buckets: tuple[AgreedBucket, ...] = ()
    # Set by the pass ``follow``: the index of the read for each gradient that the graph hands to the runtime.
    followed_gradients: tuple[int, ...] = ()
    # Called with a pass's name and the graph after it.
    record: Callable[[str, GraphModule], None] = lambda name, gm: None
    # The one-line summary of each pass, by the pass's name.
    summary: dict[str, str] = field(default_factory=dict)

    def has_replicas(self, group_id: int) -> bool:
        """Whether another group reduces gradients again that this mesh has reduced (``GroupNames.replicate``)."""
        return self.groups[group_id].replicate is not None

    def has_collective(self, group_id: int, world: int) -> bool:
        """Whether the ``world`` ranks of a mesh that share a parameter launch collectives."""
        return world > 1 or (self.collectives_at_world_size_1 and self.groups[group_id].all_gather != "")

    def place_of_addends(self, spec: ReadSpec, pieces: int) -> int:
        """This rank's number in the group from which ``pieces`` addends have come; it decides their order."""
        groups = self.groups[spec.group_id]
        if pieces <= 2:  # the sum of two is the same in either order
            return 0
        return groups.rank if spec.parts == 1 else groups.rank_in_second

    def has_reduction(self, spec: ReadSpec) -> bool:
        """Whether the reduction of a parameter's gradient launches a collective, over shards or over replicas."""
        return self.has_replicas(spec.group_id) or self.has_collective(spec.group_id, spec.world)

    def changed(self, name: str, summary: str) -> None:
        """Note in one line what the pass ``name`` did; the line is logged with the pass's time after it returns."""
        self.summary[name] = summary
