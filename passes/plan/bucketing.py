"""Buckets: the best division of collectives in a fixed order, by dynamic programming.

A state says how many gathers have been placed; on it stands the Pareto front of (the link's end, compute's time at the
next gather's first use). A transition puts the next one to ``WINDOW`` gathers into one bucket, launches it as early as
memory and the link allow, and stops compute at its first use until it is there. Reductions are the mirror image: the same
program on the graph in reverse, where a gradient is what must be there before its producer.
"""

# Why: docs/design.md, note N18

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.passes.plan.tasks import COALESCED, FLAT, SINGLE, Item, Tasks

WINDOW = 64
"""The most tensors in one bucket. Equal layers have about nine; a bucket of seven layers never paid."""
FRONT = 4
"""The most states kept for one number of gathers placed."""
SAME = 1e-9
"""Seconds; of plans that differ by less the one with fewer collectives is better."""

Bucketing = tuple[tuple[int, ...], ...]
"""Places of items by bucket."""


@dataclass(frozen=True)
class _State:
    """After some gathers: when the link is free, when compute is at the next one's first use."""

    link_free: float
    compute: float
    parent: _State | None
    begin: int  # the last bucket holds gathers from here
    stalled_at: int  # run of its first use
    resumed: float  # compute's time there, after the wait


def gather_buckets(tasks: Tasks, budget: float, load: Sequence[float] | None = None) -> Bucketing:
    """The fastest division of the gathers, in the order of first use, into buckets that fit under ``budget`` bytes.

    Args:
        tasks: its reductions are not looked at.
        budget: bytes that no run may exceed. Where even single gathers do, they are taken as late as possible.
        load: seconds of other collectives on the link that come before each run, summed up; one number a run.
    """
    items, runs = tasks.gathers, len(tasks.runs)
    if not items:
        return ()
    before = tasks.before
    loads = load or [0.0] * (runs + 1)
    earliest = earliest_launches(tasks, budget)
    size = [0, *itertools.accumulate(item.bytes for item in items)]
    uses = [item.first for item in items] + [tasks.end]
    fronts: list[list[_State]] = [[] for _ in range(len(items) + 1)]
    fronts[0] = [_State(0.0, before[uses[0]], None, 0, 0, 0.0)]
    for placed in range(len(items)):
        use = uses[placed]
        link = tasks.links[items[placed].link]
        for state in _front(fronts[placed]):
            for end in range(placed + 1, min(placed + WINDOW, len(items)) + 1):
                if items[end - 1].link != items[placed].link:
                    break
                at = earliest[end - 1]
                if at > use:
                    if end > placed + 1:
                        break
                    at = use  # over budget whatever is done: as late as possible
                count, total = end - placed, size[end] - size[placed]
                on_link = link.latency + total / link.bytes_per_second
                packing = unpacking = 0.0
                if count > 1:
                    copies = (total + total / link.world) * tasks.copy_seconds + (
                        1 + tasks.unpack_kernels(count)
                    ) * tasks.kernel_seconds
                    if (count - 1) * link.each <= copies:
                        on_link += (count - 1) * link.each
                    else:
                        packing = total / link.world * tasks.copy_seconds + tasks.kernel_seconds
                        unpacking = total * tasks.copy_seconds + tasks.unpack_kernels(count) * tasks.kernel_seconds
                reached = _time_at(state, at, use, before)
                queued = state.link_free + max(0.0, loads[at] - loads[state.stalled_at])
                free = max(queued, reached + packing) + on_link
                resumed = max(state.compute + packing, free) + unpacking
                compute = resumed + before[uses[end]] - before[use]
                fronts[end].append(_State(free, compute, state, placed, use, resumed))
    return _buckets_of(_front(fronts[-1])[0], len(items))


def reduction_buckets(tasks: Tasks, budget: float, load: Sequence[float] | None = None) -> Bucketing:
    """The fastest division of the reductions, in the order of completion, into buckets; arguments as ``gather_buckets``'."""
    count = len(tasks.reductions)
    mirrored = gather_buckets(mirror(tasks), budget, load)
    return tuple(tuple(count - 1 - i for i in reversed(bucket)) for bucket in reversed(mirrored))


def mirror(tasks: Tasks) -> Tasks:
    """The graph in reverse, its reductions as gathers: each has to be there before the run that made its gradient."""
    runs = len(tasks.runs)
    items = [
        replace(item, first=runs - item.first, last=max(runs - item.first - 1, 0))
        for item in reversed(tasks.reductions)
    ]
    empty = replace(tasks.runs[-1], seconds=0.0, bytes=0)
    return replace(tasks, runs=(*reversed(tasks.runs), empty), gathers=tuple(items), reductions=())


def by_unit(items: Sequence[Item]) -> Bucketing:
    """One bucket for each unit or repeated block (and link), in the order of their first items; registration order inside."""
    groups: dict[tuple[int, str], list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault((item.unit, item.link), []).append(i)
    return tuple(tuple(sorted(group, key=lambda i: (items[i].position, items[i].read))) for group in groups.values())


def by_size(items: Sequence[Item], megabytes: float) -> Bucketing:
    """Consecutive items of a link, until a bucket would be larger than ``megabytes`` (10**6 bytes)."""
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    buckets: list[list[int]] = []
    for i, item in enumerate(items):
        if item.link not in open_buckets or sizes[item.link] + item.bytes > megabytes * 1e6:
            open_buckets[item.link], sizes[item.link] = [], 0
            buckets.append(open_buckets[item.link])
        open_buckets[item.link].append(i)
        sizes[item.link] += item.bytes
    return tuple(map(tuple, buckets))


def by_group(items: Sequence[Item], group_of: Mapping[int, int]) -> Bucketing:
    """One bucket for each group of reads (and link), in the order of their first items; reads without a group are alone."""
    groups: dict[tuple[int, str], list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault((group_of.get(item.read, -1 - item.read), item.link), []).append(i)
    return tuple(map(tuple, groups.values()))


def one_by_one(items: Sequence[Item]) -> Bucketing:
    """Each alone."""
    return tuple((i,) for i in range(len(items)))


def form_of(tasks: Tasks, gathers: bool, bucket: Sequence[int]) -> str:
    """The cheapest form of a bucket."""
    items = tasks.items(gathers)
    form = tasks.best_form([items[i] for i in bucket], gathers)
    assert form in (SINGLE, FLAT, COALESCED)
    return form


def earliest_launches(tasks: Tasks, budget: float) -> list[int]:
    """For each gather, launched in order, the first run before which there is room for it and all before it until it is used."""
    room = [budget - tasks.persistent - run.bytes for run in tasks.runs]
    out, earliest = [], 0
    for item in tasks.gathers:
        for run in range(earliest, item.last + 1):
            room[run] -= item.bytes
        earliest = next((run + 1 for run in range(item.first - 1, earliest - 1, -1) if room[run] < 0), earliest)
        out.append(earliest)
    return out


def _time_at(state: _State, at: int, use: int, before: Sequence[float]) -> float:
    """Compute's time when it reaches run ``at``, not behind the next first use (run ``use``)."""
    if at == use:
        return state.compute
    here: _State = state
    while here.parent is not None and at <= here.stalled_at:
        here = here.parent
    if here.parent is None:
        return before[at]
    return here.resumed + before[at] - before[here.stalled_at]


def _front(states: list[_State]) -> list[_State]:
    """The states that no other one beats in both times; compute that differs by rounding is equal."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.compute, s.link_free)):
        if not kept or state.link_free < kept[-1].link_free - 1e-12:
            if kept and state.compute < kept[-1].compute + SAME:
                kept.pop()
            kept.append(state)
    return kept if len(kept) <= FRONT else [kept[0], *kept[-FRONT + 1 :]]


def _buckets_of(state: _State, end: int) -> Bucketing:
    buckets = []
    while state.parent is not None:
        buckets.append(tuple(range(state.begin, end)))
        end, state = state.begin, state.parent
    return tuple(reversed(buckets))
