"""The order of launches: rules, and the best interleaving of gathers and reductions by dynamic programming.

A schedule is made in two steps. An order lists buckets; ``place`` puts each at a segment, as early as memory and its
gradients allow. So every order becomes a schedule that can run, or is found not to be one.
"""

# Why: docs/design.md, note N18; docs/design.md, note N20; docs/design.md, note N21

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.buckets.spec import FLAT, Kind
from compiled_fsdp.passes.plan.bucketing import Bucketing, form_of
from compiled_fsdp.passes.plan.frontier import Stall, State, pareto_front, time_at
from compiled_fsdp.passes.plan.simulate import held_by_collectives, makespan, timeline
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks

MAX_STATES_KEPT = 3
"""For one number of gathers and of reductions placed."""
WAIT_SLACK = 0.1
"""How much later than simulated a reduction is waited for, of its time on the channel."""


@dataclass(frozen=True)
class OrderedBucket:
    """A bucket in an order, which has no place among the graph's segments yet."""

    kind: Kind
    # Indices in ``Tasks.collectives(kind)``.
    indices: tuple[int, ...]
    # SINGLE, FLAT or COALESCED (see ``tasks.py``).
    form: str
    # The first segment before which it can be launched.
    ready: int
    # The last segment before which it can be launched.
    due: int

    def at(self, segment: int, wait: int) -> Launch:
        """The bucket launched before one segment and waited for before another."""
        return Launch(self.kind, self.indices, self.form, segment, wait)


Order = list[OrderedBucket]


def buckets_of(tasks: Tasks, kind: Kind, bucketing: Bucketing, form: str | None = None) -> Order:
    """Buckets in the order in which gathers are needed, or reductions are complete.

    They have the cheapest form; those of several tensors have ``form``, if it is given. A bucket of reductions that
    cannot share a collective is divided.
    """
    divided = bucketing if kind.supplies else [part for indices in bucketing for part in _divided(tasks, indices)]
    out = [bucket_of(tasks, kind, indices, form) for indices in divided]
    return sorted(out, key=lambda bucket: bucket.due if kind.supplies else bucket.ready)


def bucket_of(tasks: Tasks, kind: Kind, indices: tuple[int, ...], form: str | None = None) -> OrderedBucket:
    """A bucket. Reductions that cannot share a collective give one that is due before it is ready."""
    if form is None or len(indices) == 1:
        form = form_of(tasks, kind, indices)
    return OrderedBucket(kind, indices, form, *tasks.window(kind, indices))


def ordered(tasks: Tasks, launch: Launch) -> OrderedBucket:
    """A schedule's bucket without its place, in its form."""
    return replace(bucket_of(tasks, launch.kind, launch.indices), form=launch.form)


def _divided(tasks: Tasks, indices: tuple[int, ...]) -> Bucketing:
    """Reductions divided so that none is needed before the last of its bucket is complete."""
    parts: list[list[int]] = []
    ready = due = 0
    for i in indices:
        task = tasks.reductions[i]
        ready, due = max(ready, task.first), min(due, task.last)
        if parts and ready <= due:
            parts[-1].append(i)
        else:
            parts.append([i])
            ready, due = task.first, task.last
    return tuple(map(tuple, parts))


# ---- rules -----------------------------------------------------------------------------------------------------------
Places = Mapping[tuple[int, ...], tuple[int, int]]
"""By a bucket's indices: the segment before which it is launched at the latest, and its turn there."""


def asked_places(tasks: Tasks, gathers: Order) -> Places:
    """Where the prefetch lists of a graph's blocks put gathers.

    At the first use of a block's parameters the rest of the block is gathered, and then its list. A block that gathers
    nothing in this graph begins where its first gradient is complete.
    """
    begins: dict[int, int] = {}
    lists: dict[int, tuple[int, ...]] = {}
    for task in (*tasks.gathers, *tasks.reductions):
        begins.setdefault(task.block_number, task.first)
        if task.prefetch_blocks:
            lists[task.block_number] = task.prefetch_blocks
    of_block: dict[int, Order] = {}
    for bucket in gathers:
        of_block.setdefault(tasks.gathers[bucket.indices[0]].block_number, []).append(bucket)
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for block in sorted(lists, key=lambda block: begins[block]):
        for bucket in (bucket for other in (block, *lists[block]) for bucket in of_block.get(other, ())):
            if bucket.due > begins[block]:
                places.setdefault(bucket.indices, (begins[block], len(places)))
    return places


def one_ahead(
    gathers: Order, reductions: Order, *, after: bool = False, overlap: bool = True, asked: Places | None = None
) -> list[tuple[OrderedBucket, int]]:
    """FSDP2's order: buckets, each with the segment before which it is launched.

    The next gather is launched before the wait for this one, a reduction when it is complete.

    Args:
        after: launch the next gather after the wait for this one: less memory.
        overlap: False launches each gather with its own wait.
        asked: gathers that prefetch lists want to be launched earlier.
    """
    placed: list[tuple[OrderedBucket, int, int]] = []
    for i, bucket in enumerate(gathers):
        at = bucket.due if not overlap or after else gathers[i - 1].due if i else 0
        usual = at, len(gathers)
        placed.append((bucket, *min(usual, (asked or {}).get(bucket.indices, usual))))
    placed += [(bucket, bucket.ready, 0) for bucket in reductions]
    # at one segment: what is needed there, complete reductions, gathers ahead that were asked for, other ones
    placed.sort(key=lambda p: (p[1], p[2] if p[0].kind.supplies and p[0].due > p[1] else -1))
    return [(bucket, at) for bucket, at, _ in placed]


def gathers_first(gathers: Order, reductions: Order) -> Order:
    """Every gather before any reduction that is complete after the first use of the gather before it."""
    keys = [(gathers[i - 1].due if i else 0, 0, i) for i in range(len(gathers))]
    keyed = [*zip(keys, gathers, strict=True), *(((r.ready, 1, i), r) for i, r in enumerate(reductions))]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


def reductions_first(gathers: Order, reductions: Order) -> Order:
    """A reduction goes before every gather that is not needed at once when it is complete."""
    keyed = [((g.due, 1), g) for g in gathers] + [((r.ready, 0), r) for r in reductions]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


# ---- the best interleaving -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _MergeState(State):
    """After some gathers and some reductions: as ``State``."""

    # The state before the last bucket; None before the first one.
    parent: _MergeState | None
    # Whether the last bucket gathers.
    gathered: bool


def interleave(tasks: Tasks, gathers: Order, reductions: Order, earliest: Sequence[int], lag: int) -> Order:
    """The fastest merge of two orders.

    For each number of gathers and of reductions placed there is a Pareto front of channel and compute times.

    Args:
        earliest: for each bucket of gathers, the first segment before which it fits into memory.
        lag: how many complete reductions may wait for their launch at most, since their gradients hold memory.
    """
    before = tasks.seconds_before
    uses = [bucket.due for bucket in gathers] + [tasks.end]
    costs = [tasks.costs_of(bucket.kind, bucket.indices, bucket.form) for bucket in (*gathers, *reductions)]
    of_gathers, of_reductions = costs[: len(gathers)], costs[len(gathers) :]
    ready = sorted(bucket.ready for bucket in reductions)
    complete = list(itertools.accumulate((bisect.bisect_right(ready, use) for use in uses), max))
    fronts: dict[tuple[int, int], list[_MergeState]] = {
        (0, 0): [_MergeState(0.0, before[uses[0]], None, None, gathered=True)]
    }
    for placed in range(len(gathers) + 1):
        use = uses[placed]
        lowest = max(0, (complete[placed - 1] if placed else 0) - lag) if placed < len(gathers) else 0
        for reduced in range(lowest, len(reductions) + 1):
            front = fronts.pop((placed, reduced), None)
            if front is None:
                continue
            front = pareto_front(front)[:MAX_STATES_KEPT]
            if placed == len(gathers) and reduced == len(reductions):
                return _order_of(min(front, key=lambda s: max(s.compute, s.channel_free)), gathers, reductions)
            for state in front:
                if placed < len(gathers):
                    pack, on_channel, unpack, _ = of_gathers[placed]
                    at = min(max(earliest[placed], 0), use)
                    free = max(state.channel_free, time_at(state, at, use, before) + pack) + on_channel
                    resumed = max(state.compute + pack, free) + unpack
                    compute = resumed + before[uses[placed + 1]] - before[use]
                    stall = Stall(use, resumed, state.stall)
                    following = _MergeState(free, compute, stall, state, gathered=True)
                    fronts.setdefault((placed + 1, reduced), []).append(following)
                if reduced < len(reductions) and (reductions[reduced].ready <= use or placed == len(gathers)):
                    pack, on_channel, unpack, _ = of_reductions[reduced]
                    reached = time_at(state, min(reductions[reduced].ready, use), use, before)
                    free = max(state.channel_free, reached + pack) + on_channel
                    compute = state.compute + pack + unpack
                    following = _MergeState(free, compute, state.stall, state, gathered=False)
                    fronts.setdefault((placed, reduced + 1), []).append(following)
    raise AssertionError("every order of gathers alone can be completed")


def _order_of(state: _MergeState, gathers: Order, reductions: Order) -> Order:
    out: Order = []
    i, j = len(gathers), len(reductions)
    while state.parent is not None:
        if state.gathered:
            i -= 1
            out.append(gathers[i])
        else:
            j -= 1
            out.append(reductions[j])
        state = state.parent
    return out[::-1]


# ---- places ----------------------------------------------------------------------------------------------------------
def reduction_memory(tasks: Tasks, reductions: Order) -> list[int]:
    """Bytes that reductions hold during each segment, by segment.

    Each is launched when it is complete and waited for at the next one's launch.
    """
    launches = [
        bucket.at(bucket.ready, max(bucket.ready, min(following.ready, bucket.due)))
        for bucket, following in itertools.zip_longest(reductions, reductions[1:], fillvalue=reductions[-1])
    ] if reductions else []  # fmt: skip
    return held_by_collectives(tasks, launches)


def earliest_places(tasks: Tasks, gathers: Order, reductions: Order, budget: float) -> list[int]:
    """For each gather bucket, launched in this order, the first segment before which it fits into memory."""
    held = reduction_memory(tasks, reductions)
    room = [
        budget - tasks.persistent - segment.bytes - more for segment, more in zip(tasks.segments, held, strict=True)
    ]
    out, earliest = [], 0
    for bucket in gathers:
        members = [tasks.gathers[i] for i in bucket.indices]
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
    """The earliest schedule of an order whose gathers are launched where memory has room; None if it cannot run."""
    gathers = [bucket for bucket in order if bucket.kind.supplies]
    reductions = [bucket for bucket in order if not bucket.kind.supplies]
    places = earliest_places(tasks, gathers, reductions, limit)
    return place(tasks, order, {bucket.indices: at for bucket, at in zip(gathers, places, strict=True)})


def place(tasks: Tasks, order: Order, earliest: dict[tuple[int, ...], int]) -> Schedule | None:
    """The earliest schedule of an order, with waits where the simulation has reductions done; None if it cannot run.

    Or, where the model has collectives of its own over the same link, one that delays them less, if that is faster.
    ``earliest`` holds for each bucket of gathers, by its indices, the first segment before which it fits into memory.
    """
    launches: list[Launch] = []
    at = 0
    for bucket in order:
        at = max(at, earliest[bucket.indices] if bucket.kind.supplies else bucket.ready)
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
    """Launches later, in the same order, where they then end before the next one of the model's own on their link.

    Greedy: of the places of each launch the first at which it delays that collective and its own first use the least.
    """
    before = tasks.alone_before
    free: dict[int, float] = defaultdict(float)
    late = 0.0
    out: list[Launch] = []
    lowest = 0
    latest = [launch.wait for launch in launches]
    for i in range(len(latest) - 2, -1, -1):
        latest[i] = min(latest[i], latest[i + 1])
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
    """Reductions waited for where they are done as simulated, with ``WAIT_SLACK``: they hold memory no longer."""
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
