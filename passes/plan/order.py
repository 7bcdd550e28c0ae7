"""The order of launches: rules, and the best interleaving of two sides by dynamic programming.

Gathers *supply* compute: a gather has to be done at the first use of its parameters. Reductions *drain* it: a reduction
is launched when its gradients are complete. ``Kind.supplies`` says on which side a kind is.

A schedule is made in two steps. An order lists buckets. Then ``place`` puts the launch of each at a segment, as early
as memory and its tensors allow, or finds that the order cannot run.
"""

# Why: docs/design/planner.md, "The search for a plan"
# Why: docs/design/planner.md, "FSDP2's order, one gather ahead"
# Why: docs/design/planner.md, "Prefetch lists"

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.buckets.spec import FLAT, Kind
from compiled_fsdp.passes.plan.bucketing import Bucketing, form_of, one_by_one
from compiled_fsdp.passes.plan.frontier import Stall, State, pareto_front, time_at
from compiled_fsdp.passes.plan.simulate import held_by_collectives, makespan, timeline
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

MAX_STATES_KEPT = 3
"""The most states that ``interleave`` keeps for one number of placed gathers and one of placed reductions."""
WAIT_SLACK = 0.1
"""A reduction is waited for later than the simulation has it done, by this share of its time on the channel."""


@dataclass(frozen=True)
class OrderedBucket:
    """A bucket in an order, before it has a place among the graph's segments."""

    kind: Kind
    # Indices in ``Tasks.collectives(kind)``.
    indices: tuple[int, ...]
    # SINGLE, FLAT or COALESCED (see ``buckets/spec.py``).
    form: str
    # The first segment before which it can be launched.
    ready: int
    # The last segment before which it can be launched.
    due: int

    def at(self, segment: int, wait: int) -> Launch:
        """Place the launch right before ``segment``, and the wait right before segment ``wait``."""
        return Launch(self.kind, self.indices, self.form, segment, wait)


Order = list[OrderedBucket]


def sides_of(tasks: Tasks, bucketings: Mapping[Kind, Bucketing], form: str | None = None) -> tuple[Order, Order]:
    """Return the buckets that supply compute, in order of need, and those that drain it, in order of completion.

    Of two that are complete at once, the one that is needed sooner comes first. A bucket that cannot be one collective,
    because one gradient is needed before another one is complete, is divided.

    Args:
        bucketings: the buckets of each kind. Collectives of a kind that is not here are alone.
        form: the form of buckets of several tensors; None for the cheapest.
    """
    sides: tuple[Order, Order] = [], []
    for kind in Kind:
        bucketing = bucketings.get(kind) or one_by_one(tasks.collectives(kind))
        divided = [part for indices in bucketing for part in _divided(tasks, kind, indices)]
        sides[not kind.supplies].extend(bucket_of(tasks, kind, indices, form) for indices in divided)
    return sorted(sides[0], key=lambda bucket: bucket.due), sorted(
        sides[1], key=lambda bucket: (bucket.ready, bucket.due)
    )


def bucket_of(tasks: Tasks, kind: Kind, indices: tuple[int, ...], form: str | None = None) -> OrderedBucket:
    """Make a bucket. If its tensors cannot share a collective, it is due before it is ready."""
    if form is None or len(indices) == 1:
        form = form_of(tasks, kind, indices)
    return OrderedBucket(kind, indices, form, *tasks.window(kind, indices))


def ordered(tasks: Tasks, launch: Launch) -> OrderedBucket:
    """Return the bucket of a launch without its place."""
    return replace(bucket_of(tasks, launch.kind, launch.indices), form=launch.form)


def _divided(tasks: Tasks, kind: Kind, indices: tuple[int, ...]) -> Bucketing:
    """Divide a bucket so that in each part no tensor is needed before another one is ready."""
    parts: list[list[int]] = []
    ready = due = 0
    for i in indices:
        first, last = tasks.window(kind, (i,))
        ready, due = max(ready, first), min(due, last)
        if parts and ready <= due:
            parts[-1].append(i)
        else:
            parts.append([i])
            ready, due = first, last
    return tuple(map(tuple, parts))


# ---- rules -----------------------------------------------------------------------------------------------------------
Places = Mapping[OrderedBucket, tuple[int, int]]
"""For each bucket the segment before which it is launched at the latest, and its rank among the launches there."""


def asked_places(tasks: Tasks, supplies: Order) -> Places:
    """The places that the user's prefetch lists ask for.

    When a block begins, the rest of the block is gathered, and then the blocks of its list. A block begins at the first
    use of its parameters, or, if it gathers nothing in this graph, when its first gradient is complete.
    """
    begins: dict[int, int] = {}
    lists: dict[int, tuple[int, ...]] = {}
    for task in tasks.all_collectives:
        begins.setdefault(task.block_number, task.first)
        if task.prefetch_blocks:
            lists[task.block_number] = task.prefetch_blocks
    of_block: dict[int, Order] = {}
    for bucket in supplies:
        of_block.setdefault(tasks.members(bucket.kind, bucket.indices)[0].block_number, []).append(bucket)
    places: dict[OrderedBucket, tuple[int, int]] = {}
    for block in sorted(lists, key=lambda block: begins[block]):
        for bucket in (bucket for other in (block, *lists[block]) for bucket in of_block.get(other, ())):
            if bucket.due > begins[block]:
                places.setdefault(bucket, (begins[block], len(places)))
    return places


def one_ahead(
    supplies: Order, drains: Order, *, after: bool = False, overlap: bool = True, asked: Places | None = None
) -> list[tuple[OrderedBucket, int]]:
    """FSDP2's order: the buckets, each with the segment before which it is launched.

    The next gather is launched before the wait for this one. A reduction is launched when its gradients are complete.

    Args:
        after: whether the next gather is launched after the wait for this one, which needs less memory.
        overlap: False launches each gather right before its own wait.
        asked: gathers that prefetch lists want earlier.
    """
    placed: list[tuple[OrderedBucket, int, int]] = []
    for i, bucket in enumerate(supplies):
        at = bucket.due if not overlap or after else supplies[i - 1].due if i else 0
        usual = at, len(supplies)
        placed.append((bucket, *min(usual, (asked or {}).get(bucket, usual))))
    placed += [(bucket, bucket.ready, 0) for bucket in drains]
    # at one segment: gathers that are needed there, complete reductions, gathers that were asked for, other gathers
    placed.sort(key=lambda p: (p[1], p[2] if p[0].kind.supplies and p[0].due > p[1] else -1))
    return [(bucket, at) for bucket, at, _ in placed]


def supplies_first(supplies: Order, drains: Order) -> Order:
    """The order in which each gather goes before all reductions that complete at or after the previous gather's use."""
    keys = [(supplies[i - 1].due if i else 0, 0, i) for i in range(len(supplies))]
    keyed = [*zip(keys, supplies, strict=True), *(((b.ready, 1, i), b) for i, b in enumerate(drains))]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


def drains_first(supplies: Order, drains: Order) -> Order:
    """The order in which each reduction goes before all gathers whose first use is at or after its completion."""
    keyed = [((b.due, 1), b) for b in supplies] + [((b.ready, 0), b) for b in drains]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


# ---- the best interleaving -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _MergeState(State):
    """The state after some buckets of each side."""

    # The state before the last bucket; None before the first one.
    parent: _MergeState | None
    # Whether the last bucket supplies compute.
    supplied: bool


def interleave(tasks: Tasks, supplies: Order, drains: Order, earliest: Sequence[int], lag: int) -> Order:
    """Find the fastest merge of two sides, as if all collectives used one channel.

    For each pair (number of placed supplies, number of placed drains), the search keeps a Pareto front of states, by
    the times when the channel is free and when compute reaches the next first use.

    Args:
        earliest: for each bucket of ``supplies``, the first segment before which it fits into memory.
        lag: the most complete reductions that may wait for their launch, because their gradients hold memory.
    """
    before = tasks.seconds_before
    uses = [bucket.due for bucket in supplies] + [tasks.end]
    costs = [tasks.costs_of(bucket.kind, bucket.indices, bucket.form) for bucket in (*supplies, *drains)]
    of_supplies, of_drains = costs[: len(supplies)], costs[len(supplies) :]
    ready = sorted(bucket.ready for bucket in drains)
    complete = list(itertools.accumulate((bisect.bisect_right(ready, use) for use in uses), max))
    fronts: dict[tuple[int, int], list[_MergeState]] = {
        (0, 0): [_MergeState(0.0, before[uses[0]], None, None, supplied=True)]
    }
    for placed in range(len(supplies) + 1):
        use = uses[placed]
        lowest = max(0, (complete[placed - 1] if placed else 0) - lag) if placed < len(supplies) else 0
        for drained in range(lowest, len(drains) + 1):
            front = fronts.pop((placed, drained), None)
            if front is None:
                continue
            front = pareto_front(front)[:MAX_STATES_KEPT]
            if placed == len(supplies) and drained == len(drains):
                return _order_of(min(front, key=lambda s: max(s.compute, s.channel_free)), supplies, drains)
            for state in front:
                if placed < len(supplies):
                    pack, on_channel, unpack, _ = of_supplies[placed]
                    at = min(max(earliest[placed], 0), use)
                    free = max(state.channel_free, time_at(state, at, use, before) + pack) + on_channel
                    resumed = max(state.compute + pack, free) + unpack
                    compute = resumed + before[uses[placed + 1]] - before[use]
                    stall = Stall(use, resumed, state.stall)
                    following = _MergeState(free, compute, stall, state, supplied=True)
                    fronts.setdefault((placed + 1, drained), []).append(following)
                if drained < len(drains) and (drains[drained].ready <= use or placed == len(supplies)):
                    pack, on_channel, unpack, _ = of_drains[drained]
                    reached = time_at(state, min(drains[drained].ready, use), use, before)
                    free = max(state.channel_free, reached + pack) + on_channel
                    compute = state.compute + pack + unpack
                    following = _MergeState(free, compute, state.stall, state, supplied=False)
                    fronts.setdefault((placed, drained + 1), []).append(following)
    raise AssertionError("every order of one side alone can be completed")


def _order_of(state: _MergeState, supplies: Order, drains: Order) -> Order:
    """Follow the parents of a state back to the start; return the order of buckets that led to it."""
    out: Order = []
    i, j = len(supplies), len(drains)
    while state.parent is not None:
        if state.supplied:
            i -= 1
            out.append(supplies[i])
        else:
            j -= 1
            out.append(drains[j])
        state = state.parent
    return out[::-1]


# ---- places ----------------------------------------------------------------------------------------------------------
def _held_by_drains(tasks: Tasks, drains: Order) -> list[int]:
    """Bytes that reductions hold during each segment.

    Each reduction is launched when it is complete, and waited for at the launch of the next one.
    """
    launches = [
        bucket.at(bucket.ready, max(bucket.ready, min(following.ready, bucket.due)))
        for bucket, following in itertools.zip_longest(drains, drains[1:], fillvalue=drains[-1])
    ] if drains else []  # fmt: skip
    return held_by_collectives(tasks, launches)


def earliest_places(tasks: Tasks, supplies: Order, drains: Order, budget: float) -> list[int]:
    """For each bucket of ``supplies``, in launch order, find the first segment before which it fits into ``budget``."""
    held = _held_by_drains(tasks, drains)
    room = [
        budget - tasks.persistent - segment.bytes - more for segment, more in zip(tasks.segments, held, strict=True)
    ]
    out, earliest = [], 0
    for bucket in supplies:
        members = tasks.members(bucket.kind, bucket.indices)
        total = sum(task.size.full for task in members)
        world = tasks.channels[members[0].channel].world
        sent = sum(task.size.sent for task in members if task.size.is_packed(bucket.form))
        received = sum(task.size.sent for task in members if task.size.is_unpacked(bucket.form))
        in_flight = sent // world + received
        ends = sorted(members, key=lambda task: task.last)
        alive, done = total, 0
        for segment in range(earliest, ends[-1].last + 1):
            while ends[done].last < segment and not (tasks.kernels and bucket.form == FLAT):
                alive -= ends[done].size.full
                done += 1
            room[segment] -= alive + (in_flight if segment <= bucket.due else 0)
        earliest = next((segment + 1 for segment in range(bucket.due, earliest - 1, -1) if room[segment] < 0), earliest)
        out.append(min(earliest, bucket.due))
        earliest = out[-1]
    return out


def placed_within(tasks: Tasks, order: Order, limit: float) -> Schedule | None:
    """The earliest schedule of an order that launches gathers only if memory has room; None if it cannot run."""
    supplies = [bucket for bucket in order if bucket.kind.supplies]
    drains = [bucket for bucket in order if not bucket.kind.supplies]
    places = earliest_places(tasks, supplies, drains, limit)
    return place(tasks, order, dict(zip(supplies, places, strict=True)))


def place(tasks: Tasks, order: Order, earliest: Mapping[OrderedBucket, int]) -> Schedule | None:
    """The earliest schedule of an order, with waits when the simulation has reductions done; None if it cannot run.

    If some of the model's own collectives use the same link, a schedule that delays them less is returned if it is
    faster.

    Args:
        earliest: for each bucket that supplies compute, the first segment before which it fits into memory.
    """
    launches: list[Launch] = []
    at = 0
    for bucket in order:
        at = max(at, earliest[bucket] if bucket.kind.supplies else bucket.ready)
        if at > bucket.due:
            return None
        launches.append(bucket.at(at, bucket.due))
    schedule = wait_when_done(tasks, tuple(launches))
    if not tasks.shares_links:
        return schedule
    later = between_models_own(tasks, launches)
    if all(a.at == b.at for a, b in zip(launches, later, strict=True)):
        return schedule
    between = wait_when_done(tasks, later)
    return min(schedule, between, key=lambda each: makespan(tasks, each))


def between_models_own(tasks: Tasks, launches: Sequence[Launch]) -> Schedule:
    """Move launches later, so that they do not delay the model's own collectives on their link; the order stays.

    This is greedy: each launch goes to the first place that least delays both its own first use and the next of the
    model's own collectives. For example, if a gather would still run when an all-reduce on the same link is launched,
    and its first use is late enough, it is launched after the all-reduce.
    """
    before = tasks.alone_before
    free: dict[int, float] = defaultdict(float)
    late = 0.0
    out: list[Launch] = []
    lowest = 0
    latest = [*itertools.accumulate((launch.wait for launch in reversed(launches)), min)][::-1]
    for launch, last in zip(launches, latest, strict=True):
        packing, on_channel, _, stream = tasks.costs_of(launch.kind, launch.indices, launch.form)
        model = [of.at for of in tasks.model_collectives if stream in of.streams]
        best: tuple[float, int, float] | None = None
        for at in range(max(lowest, launch.at), last + 1):
            end = max(free[stream], before[at] + late + packing) + on_channel
            following = bisect.bisect_left(model, at)
            due = [before[launch.wait]] if launch.kind.supplies or launch.wait == tasks.end else []
            due += [before[model[following]]] if following < len(model) else []
            delay = max([0.0, *(end - late - seconds for seconds in due)])
            if best is None or delay < best[0]:
                best = delay, at, end
            if delay == 0:
                break
        assert best is not None, "a launch is not due before the one ahead of it"
        delay, lowest, free[stream] = best
        late += delay
        out.append(launch.placed(lowest, launch.wait))
    return tuple(out)


def wait_when_done(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Move the waits for reductions to where the simulation has them done, plus ``WAIT_SLACK``; this frees memory."""
    timings, reached = timeline(tasks, schedule)
    out, segment = [], 0
    for launch, (start, end) in zip(schedule, timings, strict=True):
        if launch.kind.supplies:
            out.append(launch)
            continue
        done = end + WAIT_SLACK * (end - start)
        while segment < tasks.end and reached[segment] < done:
            segment += 1
        out.append(launch.placed(launch.at, min(max(segment, launch.at), launch.wait)))
    return tuple(out)
