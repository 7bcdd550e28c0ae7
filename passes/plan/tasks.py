"""A graph as the planner sees it: compute segments, gathers and reductions, their costs, and how long their bytes live.

Compute keeps its order, so a graph is a list of segments between *milestones*: the first use of a gathered parameter
("use 3"), the completion of a gradient ("grad 5"), a launch or wait of the model's own collectives ("all_reduce 0",
"wait 0"), the end ("end"). Launches and waits are placed at milestones only. All times are seconds, and all sizes are
bytes on one rank.
"""

# Why: docs/design/planner.md, "A plan is data with milestones"
# Why: docs/design/planner.md, "The model's own collectives"

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
"""Bytes that every device has to spare for larger buckets, which save latencies."""


@dataclass(frozen=True)
class ComputeSegment:
    """Compute between two milestones."""

    # The milestones at its start.
    milestones: tuple[str, ...]
    # Seconds that it takes while no collective runs.
    seconds: float
    # The most bytes alive while it runs, without the bytes that gathers and reductions hold (see ``CollectiveTask``).
    bytes: int
    # The share by which it takes longer beside a collective: 0.25 is a quarter longer.
    contention: float = 0.0


@dataclass(frozen=True)
class CollectiveTask:
    """One parameter that has to be gathered, or one gradient that has to be reduced, before buckets are chosen."""

    # The index of the read in the region.
    read: int
    # The number of the parameter's unit or repeated block in the region.
    block_number: int
    # Its place among the parameters of that block, in the order of registration.
    position: int
    # A key of ``Tasks.channels``. It may share a bucket only with tasks of the same channel.
    channel: str
    # Its bytes on the wire and in memory.
    size: TensorSize
    # The segment of a gathered parameter's first use; the segment before which a gradient is complete.
    first: int
    # The segment of a gathered parameter's last use; the segment that needs the reduced gradient.
    last: int
    # The blocks that the user's prefetch list asks to gather when this task's block begins.
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
        """Return the same bucket with its launch and its wait at other segments."""
        return Launch(self.kind, self.indices, self.form, at, wait)


Schedule = tuple[Launch, ...]


class BucketCosts(NamedTuple):
    """The costs of a bucket in seconds, and its stream."""

    # Seconds of the compute stream for the launch and the copies before it.
    packing: float
    # Seconds of the channel for the collective.
    on_channel: float
    # Seconds of the compute stream for the copies after the wait.
    unpacking: float
    # The number of the channel's stream.
    stream: int


@dataclass(frozen=True)
class Tasks(PlainData):
    """A graph's compute and collectives."""

    # "forward", "backward" or "inference".
    phase: str
    # Compute in order; the last segment is empty and starts at the milestone "end".
    segments: tuple[ComputeSegment, ...]
    # In the order of first use.
    gathers: tuple[CollectiveTask, ...]
    # In the order of completion.
    reductions: tuple[CollectiveTask, ...]
    # By ``CollectiveTask.channel`` and ``ModelCollective.channel``.
    channels: Mapping[str, CommChannel]
    # In the order of their launches.
    model_collectives: tuple[ModelCollective, ...] = ()
    # Seconds to copy a byte, reading and writing it.
    copy_seconds: float = 0.0
    # Seconds of every copy kernel in addition to that.
    kernel_seconds: float = 0.0
    # Seconds to copy a byte from pinned host memory to the device.
    host_copy_seconds: float = 0.0
    # Seconds of the compute stream for every launch, if the host computes; else 0.
    launch_seconds: float = 0.0
    # Seconds of the host for every launch, if the host does not compute; else 0.
    host_launch_seconds: float = 0.0
    # Seconds of the host to launch all kernels of compute and the model's own collectives.
    host_seconds: float = 0.0
    # The share by which copies and launches take longer beside a collective.
    copy_contention: float = 0.0
    # The share by which a collective takes longer beside compute.
    collective_contention: float = 0.0
    # Bytes that are held during the whole graph: shards, gradients, optimizer state (``extract.persistent_bytes``).
    persistent: int = 0
    # Bytes of the full parameters of the largest unit or repeated block.
    largest_block_bytes: int = 0
    # Whether Triton kernels copy: one kernel for all tensors of a bucket, and a flat bucket is unpacked into one
    # tensor. Else there is a copy for each tensor.
    kernels: bool = False

    @cached_property
    def segment_of_milestone(self) -> Mapping[str, int]:
        """The segment that starts at each milestone."""
        return {name: i for i, segment in enumerate(self.segments) for name in segment.milestones}

    @cached_property
    def segment_seconds(self) -> tuple[float, ...]:
        """The compute of each segment in seconds."""
        return tuple(segment.seconds for segment in self.segments)

    @cached_property
    def segment_slowdowns(self) -> tuple[float, ...]:
        """How many times as long each segment's compute takes beside a collective."""
        return tuple(1 + segment.contention for segment in self.segments)

    @cached_property
    def has_contention(self) -> bool:
        """Whether compute and collectives slow each other down."""
        contention = (self.copy_contention, self.collective_contention, *(s.contention for s in self.segments))
        return any(contention)

    @cached_property
    def seconds_before(self) -> tuple[float, ...]:
        """Seconds of compute before each segment, and last the seconds of all segments."""
        return (0.0, *itertools.accumulate(segment.seconds for segment in self.segments))

    @cached_property
    def alone_before(self) -> tuple[float, ...]:
        """As ``seconds_before``, with the waits for the model's own collectives, but without gathers and reductions."""
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
        """The same tasks with the waits for the model's own collectives as compute.

        Each segment takes as long as it would without gathers and reductions. The searches that make proposals use
        these tasks, because such a wait hides collectives on another link. Proposals are then simulated with the real
        tasks.
        """
        if not self.model_collectives:
            return self
        spans = [after - before for before, after in itertools.pairwise(self.alone_before)]
        segments = [replace(segment, seconds=span) for segment, span in zip(self.segments, spans, strict=True)]
        return replace(self, segments=tuple(segments), model_collectives=())

    def with_contention(self, times: float) -> Tasks:
        """The same tasks with all contention multiplied by ``times``."""
        return replace(
            self,
            segments=tuple(replace(segment, contention=segment.contention * times) for segment in self.segments),
            copy_contention=self.copy_contention * times,
            collective_contention=self.collective_contention * times,
        )

    @cached_property
    def without_contention(self) -> Tasks:
        """The same tasks, as if compute and collectives did not slow each other down."""
        return self.with_contention(0.0)

    @property
    def end(self) -> int:
        """The number of the last, empty segment."""
        return len(self.segments) - 1

    @property
    def has_prefetch_lists(self) -> bool:
        """Whether the user gave prefetch lists to a unit."""
        return any(task.prefetch_blocks for task in self.all_collectives)

    @cached_property
    def shares_links(self) -> bool:
        """Whether some of the model's own collectives share a link with gathers or reductions."""
        ours = {self.channels[task.channel].stream for task in self.all_collectives}
        return any(ours.intersection(of.streams) for of in self.model_collectives)

    def collectives(self, kind: Kind) -> tuple[CollectiveTask, ...]:
        """The gathers, or the reductions."""
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> Mapping[Kind, tuple[CollectiveTask, ...]]:
        return {kind: getattr(self, kind.plural) for kind in Kind}

    @property
    def all_collectives(self) -> tuple[CollectiveTask, ...]:
        """The gathers and the reductions."""
        return tuple(itertools.chain.from_iterable(map(self.collectives, Kind)))

    def with_collectives(self, collectives: Mapping[Kind, Sequence[CollectiveTask]]) -> Tasks:
        """Return the same graph with other gathers, reductions or both."""
        changed: dict[str, Any] = {kind.plural: tuple(tasks) for kind, tasks in collectives.items()}
        return replace(self, **changed)

    def window(self, kind: Kind, indices: Sequence[int]) -> tuple[int, int]:
        """The first and the last segment before which a bucket can be launched.

        If the tensors cannot share a collective, the last segment is before the first one. For example, one gradient is
        needed at segment 3, and the other one is complete at segment 5.
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
        """The bytes that a bucket holds in memory, and for which segments (see ``buckets/layout.py``)."""
        members = self.members_of(launch)
        channel = self.channels[members[0].channel]
        by = Sending(channel.world, channel.received_share, self.kernels, channel.parts)
        return footprint(launch.kind, launch.form, members, launch.at, launch.wait, self.end, by)

    # ---- costs -------------------------------------------------------------------------------------------------------
    def costs_of(self, kind: Kind, indices: tuple[int, ...], form: str) -> BucketCosts:
        """The costs of a bucket, remembered because a search asks for the same ones again and again."""
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
        """Seconds that the collective of a bucket takes on its channel."""
        channel = self.channels[members[0].channel]
        more = len(members) - 1 if form == COALESCED else 0
        return channel.seconds(sum(task.size.sent for task in members), 1 + more)

    @cached_property
    def spare_bytes(self) -> int:
        """Bytes that a plan without a budget may hold in addition to the plan with every collective alone and at once.

        This is twice the largest block, or twice the bytes that a link carries during the latency of one collective (at
        most ``HARDLY_ANY_BYTES``), whichever is more. Smaller buckets would take more latency than transfer (Hockney's
        half-performance length).
        """
        carried = max((int(each.latency * each.bytes_per_second) for each in self.channels.values()), default=0)
        return 2 * max(self.largest_block_bytes, min(carried, HARDLY_ANY_BYTES))

    @cached_property
    def model_seconds(self) -> tuple[float, ...]:
        """Seconds that each of the model's own collectives takes on its link."""
        return tuple(self.channels[of.channel].seconds(of.bytes, of.tensors) for of in self.model_collectives)

    def packing(self, members: Sequence[CollectiveTask], form: str, kind: Kind) -> float:
        """Seconds of the compute stream for a bucket's launch and the copies before it.

        One kernel copies a flat bucket, or encodes with a codec; else there is a copy for each tensor that needs one.
        Shards in host memory are first copied to the device one by one.
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
        """Seconds of the compute stream for copies after a bucket's wait, or for the sums after an all-to-all."""
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
        """The number of kernels that unpack a flat bucket."""
        return 1 if self.kernels else tensors

    def host_bound(self, launches: int) -> float:
        """A lower bound on a graph's seconds: the time in which the host makes all ``launches`` one by one."""
        return self.host_seconds + launches * self.host_launch_seconds

    def best_form(self, members: Sequence[CollectiveTask], kind: Kind) -> str:
        """The cheapest form of a bucket, if seconds of copies count as much as seconds on the channel."""
        if len(members) == 1:
            return SINGLE
        costs = {
            form: self.seconds(members, form) + self.packing(members, form, kind) + self.unpacking(members, form, kind)
            for form in (COALESCED, FLAT)
        }
        return min(costs, key=lambda form: costs[form])
