"""A graph as the planner sees it: compute segments, gathers, reductions, their costs and how long their bytes live.

Compute keeps its order, so a graph is a list of segments between *milestones*: the first use of a gathered parameter
("use 3"), the completion of a gradient ("grad 5"), a launch or wait of a collective that the model has of its own
("all_reduce 0", "wait 0"), the end ("end"). Launches and waits stand at milestones and nowhere else. All times are
seconds, all sizes bytes on one rank.
"""

# Why: docs/design.md, note N17; docs/design.md, note N53

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.layout import Held, Sending, TensorSize, footprint
from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE, Kind
from compiled_fsdp.passes.plan.channels import CommChannel, ModelCollective

HARDLY_ANY_BYTES = 32 * 2**20
"""What every device has to spare for a bucket that saves latencies."""


@dataclass(frozen=True)
class ComputeSegment:
    """Compute between two milestones."""

    # The milestones at its start.
    milestones: tuple[str, ...]
    # How many seconds it takes with no collective beside it.
    seconds: float
    # The most bytes that are alive while it runs, without what gathers and reductions hold (see ``CollectiveTask``).
    bytes: int


@dataclass(frozen=True)
class CollectiveTask:
    """One parameter that has to be gathered, or one gradient that has to be reduced, in whichever bucket."""

    # The index of the read in the region.
    read: int
    # The number of the parameter's unit or repeated block in the region.
    block_number: int
    # Its place among the parameters of that block, in the order of registration.
    position: int
    # A key of ``Tasks.channels``: it may share a bucket with tasks of the same channel.
    channel: str
    # Its bytes, on the way and in memory.
    size: TensorSize
    # The segment of a gathered parameter's first use; the segment before which a gradient is complete.
    first: int
    # The segment of a gathered parameter's last use; the segment that needs the reduced gradient.
    last: int
    # The blocks that the user's prefetch list asks to gather where this one's block begins.
    prefetch_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A bucket in a schedule."""

    kind: Kind
    # Indices in ``Tasks.collectives(kind)``.
    indices: tuple[int, ...]
    # SINGLE, FLAT or COALESCED.
    form: str
    # The segment right before which it is launched.
    at: int
    # The segment right before which it is waited for.
    wait: int

    def placed(self, at: int, wait: int) -> Launch:
        """The same bucket at other places."""
        return Launch(self.kind, self.indices, self.form, at, wait)


Schedule = tuple[Launch, ...]


class BucketCosts(NamedTuple):
    """What a bucket costs, in seconds."""

    # Of the compute stream: the launch, and copies before it.
    packing: float
    # Of the channel.
    on_channel: float
    # Of the compute stream after the wait.
    unpacking: float
    # The channel's stream.
    stream: int


@dataclass(frozen=True)
class Tasks(PlainData):
    """A graph's compute and collectives."""

    # "forward", "backward" or "inference".
    phase: str
    # In order; the last one is empty and starts at the milestone "end".
    segments: tuple[ComputeSegment, ...]
    # In the order of first use.
    gathers: tuple[CollectiveTask, ...]
    # In the order of completion.
    reductions: tuple[CollectiveTask, ...]
    # By the collectives' ``channel``.
    channels: Mapping[str, CommChannel]
    # In the order of their launches.
    model_collectives: tuple[ModelCollective, ...] = ()
    # Seconds to copy a byte, reading and writing it.
    copy_seconds: float = 0.0
    # Seconds of every copy beside that.
    kernel_seconds: float = 0.0
    # Seconds to copy a byte from pinned host memory to the device.
    host_copy_seconds: float = 0.0
    # Seconds of the compute stream for every launch: where the host computes.
    launch_seconds: float = 0.0
    # Seconds of the host for every launch: where it does not.
    host_launch_seconds: float = 0.0
    # Seconds of the host for all of the compute's kernels.
    host_seconds: float = 0.0
    # How much longer compute takes while a collective runs: 0.25 is a quarter longer.
    contention: float = 0.0
    # Bytes that are there all the time: shards, gradients, optimizer state.
    persistent: int = 0
    # Bytes of the full parameters of the largest unit or repeated block.
    largest_block_bytes: int = 0
    # Whether one kernel copies what has to be copied of a bucket, and unpacks a flat one into one tensor; else there is
    # one for each of its tensors.
    kernels: bool = False

    @cached_property
    def segment_of_milestone(self) -> Mapping[str, int]:
        """The segment that starts at each milestone."""
        return {name: i for i, segment in enumerate(self.segments) for name in segment.milestones}

    @cached_property
    def segment_seconds(self) -> tuple[float, ...]:
        """Seconds of compute of each segment."""
        return tuple(segment.seconds for segment in self.segments)

    @cached_property
    def seconds_before(self) -> tuple[float, ...]:
        """Seconds of compute before each segment, and of all segments."""
        return (0.0, *itertools.accumulate(segment.seconds for segment in self.segments))

    @cached_property
    def alone_before(self) -> tuple[float, ...]:
        """Seconds before each segment, and of all, without collectives of ours: compute and the model's own."""
        if not self.model_collectives:
            return self.seconds_before
        now, reached = 0.0, []
        free: dict[int, float] = {}
        ends: dict[int, float] = {}
        for number, segment in enumerate(self.segments):
            reached.append(now)
            launched, waited = self.model_events.get(number, ((), ()))
            for i in launched:
                now += self.launch_seconds
                streams = self.model_collectives[i].streams
                ends[i] = max(now, *(free.get(stream, 0.0) for stream in streams)) + self.model_seconds[i]
                free.update(dict.fromkeys(streams, ends[i]))
            now = max([now, *(ends[i] for i in waited)]) + segment.seconds
        return (*reached, now)

    @cached_property
    def with_waits_as_compute(self) -> Tasks:
        """The same tasks, where the model's own collectives are compute, of as long as it waits for them without ours.

        For what makes proposals, which are simulated afterwards: in that time a collective on another link is hidden.
        """
        if not self.model_collectives:
            return self
        spans = [after - before for before, after in itertools.pairwise(self.alone_before)]
        segments = [replace(segment, seconds=span) for segment, span in zip(self.segments, spans, strict=True)]
        return replace(self, segments=tuple(segments), model_collectives=())

    @property
    def end(self) -> int:
        """The last, empty segment."""
        return len(self.segments) - 1

    @property
    def has_prefetch_lists(self) -> bool:
        """Whether the user gave prefetch lists to a unit."""
        return any(task.prefetch_blocks for task in self.all_collectives)

    @cached_property
    def shares_links(self) -> bool:
        """Whether the model has collectives of its own over a link of ours."""
        ours = {self.channels[task.channel].stream for task in self.all_collectives}
        return any(ours.intersection(of.streams) for of in self.model_collectives)

    def collectives(self, kind: Kind) -> tuple[CollectiveTask, ...]:
        """Those of one kind: the gathers, or the reductions."""
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> Mapping[Kind, tuple[CollectiveTask, ...]]:
        return {kind: getattr(self, kind.plural) for kind in Kind}

    @property
    def all_collectives(self) -> tuple[CollectiveTask, ...]:
        """Those of every kind."""
        return tuple(itertools.chain.from_iterable(map(self.collectives, Kind)))

    def with_collectives(self, collectives: Mapping[Kind, Sequence[CollectiveTask]]) -> Tasks:
        """The same graph with other collectives of these kinds."""
        changed: dict[str, Any] = {kind.plural: tuple(tasks) for kind, tasks in collectives.items()}
        return replace(self, **changed)

    def window(self, kind: Kind, indices: Sequence[int]) -> tuple[int, int]:
        """The first and the last segment before which a bucket can be launched.

        What cannot share a collective is due before it is ready.
        """
        members = self.members(kind, indices)
        if kind.supplies:
            return 0, min(task.first for task in members)
        return max(task.first for task in members), min(task.last for task in members)

    @cached_property
    def model_events(self) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """By segment: which of the model's own collectives are launched at its start, and which are waited for."""
        places = enumerate(self.model_collectives)
        at = [(i, of.at, of.wait) for i, of in places]
        return {
            segment: (
                tuple(i for i, launch, _ in at if launch == segment),
                tuple(i for i, _, wait in at if wait == segment),
            )
            for segment in sorted({segment for _, *both in at for segment in both})
        }

    def members(self, kind: Kind, indices: Sequence[int]) -> list[CollectiveTask]:
        """The tasks of a bucket."""
        collectives = self.collectives(kind)
        return [collectives[i] for i in indices]

    def members_of(self, launch: Launch) -> list[CollectiveTask]:
        """The tasks of a launched bucket."""
        return self.members(launch.kind, launch.indices)

    def footprint(self, launch: Launch) -> Iterator[Held]:
        """What a bucket holds in memory."""
        members = self.members_of(launch)
        channel = self.channels[members[0].channel]
        by = Sending(channel.world, channel.received_share, self.kernels)
        return footprint(launch.kind, launch.form, members, launch.at, launch.wait, self.end, by)

    # ---- costs -------------------------------------------------------------------------------------------------------
    def costs_of(self, kind: Kind, indices: tuple[int, ...], form: str) -> BucketCosts:
        """What a bucket costs; a search asks for the same ones again and again."""
        key = kind, indices, form
        if key not in self._known_costs:
            members = self.members(kind, indices)
            self._known_costs[key] = BucketCosts(
                self.packing(members, form, kind),
                self.seconds(members, form),
                self.unpacking(members, form, kind),
                self.channels[members[0].channel].stream,
            )
        return self._known_costs[key]

    @cached_property
    def _known_costs(self) -> dict[tuple[Kind, tuple[int, ...], str], BucketCosts]:
        return {}

    def seconds(self, members: Sequence[CollectiveTask], form: str) -> float:
        """How long the collective of a bucket takes on its channel."""
        channel = self.channels[members[0].channel]
        more = len(members) - 1 if form == COALESCED else 0
        return (
            channel.latency + more * channel.each + sum(task.size.sent for task in members) / channel.bytes_per_second
        )

    @cached_property
    def spare_bytes(self) -> int:
        """What a plan without a budget may hold beyond what every collective alone and at once needs.

        Two of the largest blocks; or twice what a link carries while a collective's latency passes, if that is more but
        hardly matters: buckets below that size are more latency than bytes (Hockney's half-performance length).
        """
        carried = max((int(each.latency * each.bytes_per_second) for each in self.channels.values()), default=0)
        return 2 * max(self.largest_block_bytes, min(carried, HARDLY_ANY_BYTES))

    @cached_property
    def model_seconds(self) -> tuple[float, ...]:
        """How long each of the model's own collectives takes on its link."""
        return tuple(
            channel.latency + (of.tensors - 1) * channel.each + of.bytes / channel.bytes_per_second
            for of in self.model_collectives
            for channel in [self.channels[of.channel]]
        )

    def packing(self, members: Sequence[CollectiveTask], form: str, kind: Kind) -> float:
        """Seconds of the launch and of copies before it on the compute stream: one kernel for a flat bucket, or codecs.

        Shards in host memory are copied to the device one by one before that.
        """
        copied = [task.size.full for task in members if task.size.is_packed(form)]
        together = form == FLAT or self.kernels or members[0].size.decoded
        kernels = min(len(copied), 1) if together else len(copied)
        seconds = self.launch_seconds + kernels * self.kernel_seconds
        if kind is not Kind.GATHER:
            return seconds + sum(copied) * self.copy_seconds
        offloaded = [task.size.host for task in members if task.size.host]
        moving = len(offloaded) * self.kernel_seconds + sum(offloaded) * self.host_copy_seconds
        return moving + seconds + sum(copied) / self.channels[members[0].channel].world * self.copy_seconds

    def unpacking(self, members: Sequence[CollectiveTask], form: str, kind: Kind) -> float:
        """Seconds of copies on the compute stream after a bucket's wait, or of the sums after an all-to-all."""
        decodes = bool(members[0].size.decoded)
        if kind is Kind.GATHER and form != FLAT and not decodes:
            members = [task for task in members if task.size.unpacked]
            kernels = len(members)
        elif kind is Kind.GATHER or self.channels[members[0].channel].reduced_locally:
            kernels = self.unpack_kernels(len(members)) if kind is Kind.GATHER and not decodes else len(members)
        else:
            return 0.0
        return kernels * self.kernel_seconds + sum(task.size.full for task in members) * self.copy_seconds

    def unpack_kernels(self, tensors: int) -> int:
        """How many kernels unpack a flat bucket."""
        return 1 if self.kernels else tensors

    def host_bound(self, launches: int) -> float:
        """Seconds that a graph with so many launches takes at least: the host's, which makes them one by one."""
        return self.host_seconds + launches * self.host_launch_seconds

    def best_form(self, members: Sequence[CollectiveTask], kind: Kind) -> str:
        """The cheapest form: copies count as much as time on the channel."""
        if len(members) == 1:
            return SINGLE
        costs = {
            form: self.seconds(members, form) + self.packing(members, form, kind) + self.unpacking(members, form, kind)
            for form in (COALESCED, FLAT)
        }
        return min(costs, key=lambda form: costs[form])
