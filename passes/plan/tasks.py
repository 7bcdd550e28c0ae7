"""A graph as the planner sees it: compute runs, gathers, reductions, what they cost and how long their bytes live.

Compute keeps its order, so a graph is a list of runs between *milestones*: the first use of a gathered parameter ("use 3"),
the completion of a gradient ("grad 5"), the end ("end"). Launches and waits stand at milestones and nowhere else. All times
are seconds, all sizes bytes on one rank.
"""

# Why: docs/design.md, note N17

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

SINGLE, FLAT, COALESCED = "single", "flat", "coalesced"
"""Forms of a bucket: one tensor, as it is; several, copied into one flat tensor; several in one call, without copies."""


@dataclass(frozen=True)
class Run:
    """Compute between two milestones.

    Attributes:
        starts: the milestones at its start.
        seconds: how long it takes with nothing beside it.
        bytes: the most that is alive while it runs, without what gathers and reductions hold (see ``Item``).
    """

    starts: tuple[str, ...]
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Item:
    """One parameter that is gathered, or one gradient that is reduced.

    Attributes:
        read: the read's index in the region. unit, position: its unit or repeated block there, and its place in it.
        link: the collectives that it may share a bucket with, a key of ``Tasks.links``.
        bytes: of the full, padded tensor.
        first, last: the runs of a gathered parameter's first and last use; a gradient is complete before run ``first``, and
            the run ``last`` needs the reduced one.
        copied: has to be copied before its launch even alone: a gradient that is not contiguous, or is padded.
        ahead: the units whose gathers the user wants to go out where this one's unit begins.
    """

    read: int
    unit: int
    position: int
    link: str
    bytes: int
    first: int
    last: int
    copied: bool = False
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Link:
    """What collectives of one kind, process group and dtype cost: ``latency + tensors * each + bytes / bytes_per_second``.

    Attributes:
        latency: of a collective. each: of every further tensor in a coalesced one.
        bytes_per_second: of the full tensor's bytes.
        world: ranks of the group. stream: its collectives run one after the other; the mesh's label.
        received: bytes that a reduction allocates, of the full gradient's: 1 / world, or 1 where it is an all-to-all that
            is summed afterwards.
    """

    latency: float
    each: float
    bytes_per_second: float
    world: int
    stream: int = 0
    received: float = 0.0

    @property
    def summed(self) -> bool:
        """Whether reductions are all-to-alls, summed behind their wait."""
        return self.received * self.world > 1.5


@dataclass(frozen=True)
class Launch:
    """A bucket in a schedule: launched right before run ``at``, waited for right before run ``wait``.

    ``items`` are places in ``Tasks.gathers`` or ``Tasks.reductions``.
    """

    gathers: bool
    items: tuple[int, ...]
    form: str
    at: int
    wait: int


Schedule = tuple[Launch, ...]


@dataclass(frozen=True)
class Tasks:
    """A graph's compute and collectives.

    Attributes:
        runs: in order; the last one is empty and starts at "end".
        gathers: in the order of first use. reductions: in the order of completion.
        links: by the items' ``link``, for gathers and for reductions.
        copy_seconds: to copy a byte, reading and writing it. kernel_seconds: of every copy beside that.
        contention: how much longer compute takes while a collective runs: 0.25 is a quarter longer.
        persistent: bytes that are there all the time: shards, gradients, optimizer state.
        unit_bytes: the largest unit's or repeated block's full parameters.
        kernels: whether one kernel unpacks a flat bucket, into one tensor; else one for each of its tensors.
    """

    phase: str
    runs: tuple[Run, ...]
    gathers: tuple[Item, ...]
    reductions: tuple[Item, ...]
    links: Mapping[str, Link]
    copy_seconds: float = 0.0
    kernel_seconds: float = 0.0
    contention: float = 0.0
    persistent: int = 0
    unit_bytes: int = 0
    kernels: bool = False
    named: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = {name: i for i, run in enumerate(self.runs) for name in run.starts}
        object.__setattr__(self, "named", named)

    @cached_property
    def before(self) -> tuple[float, ...]:
        """Compute seconds ahead of each run, and of all."""
        return (0.0, *itertools.accumulate(run.seconds for run in self.runs))

    @property
    def end(self) -> int:
        """The last, empty run."""
        return len(self.runs) - 1

    @property
    def has_prefetch_lists(self) -> bool:
        """Whether a unit's user asks for gathers ahead."""
        return any(item.ahead for item in (*self.gathers, *self.reductions))

    def items(self, gathers: bool) -> tuple[Item, ...]:
        """The gathers, or the reductions."""
        return self.gathers if gathers else self.reductions

    def of(self, launch: Launch) -> list[Item]:
        """The items of a bucket."""
        items = self.items(launch.gathers)
        return [items[i] for i in launch.items]

    # ---- costs -------------------------------------------------------------------------------------------------------
    def seconds(self, items: Sequence[Item], form: str) -> float:
        """How long the collective of a bucket takes on its link."""
        link = self.links[items[0].link]
        more = len(items) - 1 if form == COALESCED else 0
        return link.latency + more * link.each + sum(item.bytes for item in items) / link.bytes_per_second

    def packing(self, items: Sequence[Item], form: str, gathers: bool) -> float:
        """Seconds of copies on the compute stream ahead of a bucket's launch: one kernel for a flat bucket."""
        if gathers:
            if form != FLAT:
                return 0.0
            return (
                self.kernel_seconds + sum(i.bytes for i in items) / self.links[items[0].link].world * self.copy_seconds
            )
        copied = [i.bytes for i in items if form == FLAT or i.copied]
        kernels = 1 if form == FLAT else len(copied)
        return kernels * self.kernel_seconds + sum(copied) * self.copy_seconds

    def unpacking(self, items: Sequence[Item], form: str, gathers: bool) -> float:
        """Seconds of copies on the compute stream behind a bucket's wait, or of the sums behind an all-to-all."""
        if not (form == FLAT if gathers else self.links[items[0].link].summed):
            return 0.0
        kernels = self.unpack_kernels(len(items)) if gathers else len(items)
        return kernels * self.kernel_seconds + sum(item.bytes for item in items) * self.copy_seconds

    def unpack_kernels(self, tensors: int) -> int:
        """How many kernels unpack a flat bucket."""
        return 1 if self.kernels else tensors

    def best_form(self, items: Sequence[Item], gathers: bool) -> str:
        """The cheapest form: copies count as much as time on the link."""
        if len(items) == 1:
            return SINGLE
        costs = {
            form: self.seconds(items, form) + self.packing(items, form, gathers) + self.unpacking(items, form, gathers)
            for form in (COALESCED, FLAT)
        }
        return min(costs, key=lambda form: costs[form])

    # ---- as text -----------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """These tasks as JSON; ``from_json`` reads them back."""
        data = asdict(self)
        del data["named"]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> Tasks:
        """The tasks that ``to_json`` wrote."""
        data = json.loads(text)
        data["runs"] = tuple(Run(tuple(r["starts"]), r["seconds"], r["bytes"]) for r in data["runs"])
        for name in ("gathers", "reductions"):
            data[name] = tuple(Item(**{**item, "ahead": tuple(item["ahead"])}) for item in data[name])
        data["links"] = {key: Link(**link) for key, link in data["links"].items()}
        return Tasks(**data)

    def __str__(self) -> str:
        moved = sum(item.bytes for item in (*self.gathers, *self.reductions))
        return (
            f"{self.phase}: {len(self.runs)} runs of {1e3 * self.before[-1]:.3f} ms, {len(self.gathers)} gathers and "
            f"{len(self.reductions)} reductions of {moved / 1e6:.3f} MB"
        )
