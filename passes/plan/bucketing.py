"""Buckets: the best division of collectives in a fixed order, by dynamic programming; and fixed divisions.

For each number of placed gathers the program keeps a Pareto front of states (when the channel is free, when compute
reaches the next gather's first use). A transition puts the next gathers, one to ``MAX_TENSORS_PER_BUCKET``, into one
bucket, launches it as early as memory and the channel allow, and stops compute at its first use until it is done.
Reductions are the mirror image: the same program on the graph in reverse, where the segment that makes a gradient
becomes the first use of it.
"""

# Why: docs/design/planner.md, "The search for a plan"

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE, Kind
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.frontier import Stall, State, pareto_front, time_at
from compiled_fsdp.passes.plan.tasks import CollectiveTask, Tasks

MAX_TENSORS_PER_BUCKET = 64
"""The most tensors in a bucket. Equal layers have about nine, and a bucket of seven layers was never the best."""
MAX_STATES_KEPT = 4
"""The most states that are kept for one number of placed gathers."""
EQUAL_SECONDS = 1e-9
"""Compute times that differ by less count as equal. Then the state with fewer collectives is kept: its channel is free
first.
"""

Bucketing = tuple[tuple[int, ...], ...]
"""For each bucket the indices of its gathers in ``Tasks.gathers``, or of its reductions in ``Tasks.reductions``."""


@dataclass(slots=True)
class _BucketState(State):
    """The state after a bucket. ``stall`` is that of the bucket before, until the state is kept and continued."""

    # The state before the bucket; None before the first bucket.
    parent: _BucketState | None
    # The index of the bucket's first gather.
    begin: int
    # When compute goes on after the wait at the bucket's first use, in seconds.
    resumed: float


def gather_buckets(tasks: Tasks, budget: float, load: Sequence[float] | None = None) -> Bucketing:
    """Find the fastest division of the gathers, in the order of first use, into buckets within ``budget`` bytes.

    Args:
        tasks: a graph, whose reductions are ignored.
        budget: bytes that no segment may exceed. A single gather that does is launched as late as possible.
        load: for each segment, the seconds that other collectives take on the channel before it, in total.
    """
    gathers = tasks.gathers
    if not gathers:
        return ()
    before = tasks.seconds_before
    loads = load or [0.0] * (len(tasks.segments) + 1)
    earliest = earliest_launches(tasks, budget)
    size = [0, *itertools.accumulate(task.size.sent for task in gathers)]
    packed = [task.size.is_packed(SINGLE) for task in gathers]
    copied = [0, *itertools.accumulate(t.size.full * needed for t, needed in zip(gathers, packed, strict=True))]
    copies = [0, *itertools.accumulate(map(int, packed))]
    uses = [task.first for task in gathers] + [tasks.end]
    fronts: list[list[_BucketState]] = [[] for _ in range(len(gathers) + 1)]
    fronts[0] = [_BucketState(0.0, before[uses[0]], None, None, 0, 0.0)]
    for placed in range(len(gathers)):
        use = uses[placed]
        channel = tasks.channels[gathers[placed].channel]
        states = _front(fronts[placed])
        for state in states if placed else ():
            state.stall = Stall(uses[state.begin], state.resumed, state.stall)
        for end in range(placed + 1, min(placed + MAX_TENSORS_PER_BUCKET, len(gathers)) + 1):
            if gathers[end - 1].channel != gathers[placed].channel:
                break
            at = earliest[end - 1]
            if at > use:
                if end > placed + 1:
                    break
                at = use  # over budget in any case, so launch as late as possible
            count, total = end - placed, size[end] - size[placed]
            needed = copied[end] - copied[placed], copies[end] - copies[placed]
            more, packing, unpacking = _cheaper_form(tasks, channel, count, total, *needed)
            on_channel = channel.seconds(total) + more
            ahead = before[uses[end]] - before[use]
            for state in states:
                reached = time_at(state, at, use, before)
                stalled_at = state.stall.segment if state.stall else 0
                queued = state.channel_free + max(0.0, loads[at] - loads[stalled_at])
                free = max(queued, reached + packing) + on_channel
                resumed = max(state.compute + packing, free) + unpacking
                compute = resumed + ahead
                rivals = fronts[end]
                for rival in rivals:
                    if rival.compute <= compute and rival.channel_free <= free:
                        break
                else:
                    rivals[:] = [rival for rival in rivals if rival.compute < compute or rival.channel_free < free]
                    rivals.append(_BucketState(free, compute, state.stall, state, placed, resumed))
    return _buckets_of(_front(fronts[-1])[0], len(gathers))


def _cheaper_form(
    tasks: Tasks, channel: CommChannel, count: int, total: int, copied: int, copies: int
) -> tuple[float, float, float]:
    """Seconds that the cheaper form adds: on the channel, for packing, and for unpacking.

    This is ``Tasks.best_form``, computed from sums.

    Args:
        count, total: the number of tensors in the bucket, and their bytes.
        copied, copies: bytes and number of those that are copied in any form.
    """
    kernel, copy = tasks.kernel_seconds, tasks.copy_seconds
    kernels = min(copies, 1) if tasks.kernels else copies
    more, packing, unpacking = (count - 1) * channel.each, copied / channel.world * copy + kernels * kernel, 0.0
    if count > 1:
        pack = total / channel.world * copy + kernel
        unpack = total * copy + tasks.unpack_kernels(count) * kernel
        if pack + unpack < more + packing:
            more, packing, unpacking = 0.0, pack, unpack
    return more, packing + tasks.launch_seconds, unpacking


def reduction_buckets(tasks: Tasks, budget: float, load: Sequence[float] | None = None) -> Bucketing:
    """Find the fastest division of the reductions, in the order of completion, into buckets.

    Arguments are those of ``gather_buckets``; ``load`` is for the graph in reverse.
    """
    count = len(tasks.reductions)
    mirrored = gather_buckets(mirror(tasks), budget, load)
    return tuple(tuple(count - 1 - i for i in reversed(bucket)) for bucket in reversed(mirrored))


def mirror(tasks: Tasks) -> Tasks:
    """The graph in reverse, with reductions as gathers: the segment that made a gradient becomes the first use of it.

    Copies that reductions need in any form are left out.
    """
    count = len(tasks.segments)
    gathers = [
        replace(
            task,
            first=count - task.first,
            last=max(count - task.first - 1, 0),
            size=replace(task.size, copied=False),
        )
        for task in reversed(tasks.reductions)
    ]
    empty = replace(tasks.segments[-1], seconds=0.0, bytes=0)
    return replace(tasks, segments=(*reversed(tasks.segments), empty), gathers=tuple(gathers), reductions=())


def by_unit(collectives: Sequence[CollectiveTask]) -> Bucketing:
    """One bucket for each unit or repeated block (and channel), in the order of their first collectives.

    Inside a bucket, tensors are in the order of registration.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for i, task in enumerate(collectives):
        groups.setdefault((task.block_number, task.channel), []).append(i)

    def registered(i: int) -> tuple[int, int]:
        return collectives[i].position, collectives[i].read

    return tuple(tuple(sorted(group, key=registered)) for group in groups.values())


def by_size(collectives: Sequence[CollectiveTask], megabytes: float) -> Bucketing:
    """Buckets of consecutive collectives of a channel, each up to ``megabytes`` (of 10**6 bytes).

    A larger tensor is alone.
    """
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    buckets: list[list[int]] = []
    for i, task in enumerate(collectives):
        if task.channel not in open_buckets or sizes[task.channel] + task.size.sent > megabytes * 1e6:
            open_buckets[task.channel], sizes[task.channel] = [], 0
            buckets.append(open_buckets[task.channel])
        open_buckets[task.channel].append(i)
        sizes[task.channel] += task.size.sent
    return tuple(map(tuple, buckets))


def by_group(collectives: Sequence[CollectiveTask], group_of: Mapping[int, int]) -> Bucketing:
    """One bucket for each group of reads (and channel), in the order of their first collectives.

    Args:
        group_of: the number of the group of each read. Reads without a group are alone.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for i, task in enumerate(collectives):
        groups.setdefault((group_of.get(task.read, -1 - task.read), task.channel), []).append(i)
    return tuple(map(tuple, groups.values()))


def one_by_one(collectives: Sequence[CollectiveTask]) -> Bucketing:
    """A bucket for each collective."""
    return tuple((i,) for i in range(len(collectives)))


def form_of(tasks: Tasks, kind: Kind, bucket: Sequence[int]) -> str:
    """The cheapest form of a bucket."""
    form = tasks.best_form(tasks.members(kind, bucket), kind)
    assert form in (SINGLE, FLAT, COALESCED)
    return form


def earliest_launches(tasks: Tasks, budget: float) -> list[int]:
    """For each gather, launched in order, find the first segment before which it can be launched within ``budget``.

    There must be room for it until its first use, in addition to all gathers before it.
    """
    room = [budget - tasks.persistent - segment.bytes for segment in tasks.segments]
    out, earliest = [], 0
    for task in tasks.gathers:
        for segment in range(earliest, task.last + 1):
            room[segment] -= task.size.full
        earliest = next(
            (segment + 1 for segment in range(task.first - 1, earliest - 1, -1) if room[segment] < 0), earliest
        )
        out.append(earliest)
    return out


def _front(states: list[_BucketState]) -> list[_BucketState]:
    """The states to continue with: the one with the earliest compute, and those whose channel is free first."""
    kept = pareto_front(states, EQUAL_SECONDS)
    return kept if len(kept) <= MAX_STATES_KEPT else [kept[0], *kept[-MAX_STATES_KEPT + 1 :]]


def _buckets_of(state: _BucketState, end: int) -> Bucketing:
    """Follow the parents of a state back to the start; return the buckets that led to it."""
    buckets = []
    while state.parent is not None:
        buckets.append(tuple(range(state.begin, end)))
        end, state = state.begin, state.parent
    return tuple(reversed(buckets))
