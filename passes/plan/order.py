"""The order of launches: rules, and the best interleaving of gathers and reductions by dynamic programming.

A schedule is made in two steps. An order lists buckets; ``place`` puts each at a run, as early as memory and its gradients
allow. So every order becomes a schedule that can run, or is found not to be one.
"""

# Why: docs/design.md, note N18; docs/design.md, note N20; docs/design.md, note N21

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.passes.plan.bucketing import Bucketing, form_of
from compiled_fsdp.passes.plan.simulate import memory_curve, timeline
from compiled_fsdp.passes.plan.tasks import FLAT, Launch, Schedule, Tasks


@dataclass(frozen=True)
class Bucket:
    """A bucket without its place. ``ready``: the run before which its launch can stand at the earliest; ``due``: at the latest."""

    gathers: bool
    items: tuple[int, ...]
    form: str
    ready: int
    due: int

    def at(self, run: int, wait: int) -> Launch:
        return Launch(self.gathers, self.items, self.form, run, wait)


Order = list[Bucket]


def buckets_of(tasks: Tasks, gathers: bool, bucketing: Bucketing, form: str | None = None) -> Order:
    """Buckets in the order in which they are needed, or complete; in the cheapest form, or those of several tensors in ``form``.

    One of reductions that cannot go together is divided.
    """
    parts = bucketing if gathers else [part for members in bucketing for part in _together(tasks, members)]
    out = [bucket_of(tasks, gathers, members, form) for members in parts]
    return sorted(out, key=lambda bucket: bucket.due if gathers else bucket.ready)


def bucket_of(tasks: Tasks, gathers: bool, members: tuple[int, ...], form: str | None = None) -> Bucket:
    """A bucket; one of reductions that cannot go together is due before it is ready."""
    items = [tasks.items(gathers)[i] for i in members]
    if form is None or len(members) == 1:
        form = form_of(tasks, gathers, members)
    if gathers:
        return Bucket(True, members, form, 0, min(item.first for item in items))
    return Bucket(False, members, form, max(item.first for item in items), min(item.last for item in items))


def _together(tasks: Tasks, members: tuple[int, ...]) -> Bucketing:
    """Reductions divided so that none is needed before the last of its bucket is complete."""
    parts: list[list[int]] = []
    ready = due = 0
    for i in members:
        item = tasks.reductions[i]
        ready, due = max(ready, item.first), min(due, item.last)
        if parts and ready <= due:
            parts[-1].append(i)
        else:
            parts.append([i])
            ready, due = item.first, item.last
    return tuple(map(tuple, parts))


# ---- rules -----------------------------------------------------------------------------------------------------------
Places = Mapping[tuple[int, ...], tuple[int, int]]
"""By the items of a bucket: the run at whose start it is to go out at the latest, and its turn among those of its run."""


def asked_places(tasks: Tasks, gathers: Order) -> Places:
    """Where the prefetch lists of a graph's units put gathers: at the first use of a unit's parameters (of a unit that gathers
    nothing here, where its first gradient is complete) what is left of itself, and then its list."""
    begins: dict[int, int] = {}
    lists: dict[int, tuple[int, ...]] = {}
    for item in (*tasks.gathers, *tasks.reductions):
        begins.setdefault(item.unit, item.first)
        if item.ahead:
            lists[item.unit] = item.ahead
    of_unit: dict[int, Order] = {}
    for bucket in gathers:
        of_unit.setdefault(tasks.gathers[bucket.items[0]].unit, []).append(bucket)
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for unit in sorted(lists, key=lambda unit: begins[unit]):
        for bucket in (bucket for other in (unit, *lists[unit]) for bucket in of_unit.get(other, ())):
            if bucket.due > begins[unit]:
                places.setdefault(bucket.items, (begins[unit], len(places)))
    return places


def one_ahead(
    gathers: Order, reductions: Order, *, after: bool = False, overlap: bool = True, asked: Places | None = None
) -> list[tuple[Bucket, int]]:
    """FSDP2's order, with places: the next gather goes out before the wait for this one, or ``after`` it (less memory), or
    with its own wait (not ``overlap``), or earlier where that is ``asked`` for; a reduction when it is complete."""
    placed: list[tuple[Bucket, int, int]] = []
    for i, bucket in enumerate(gathers):
        at = bucket.due if not overlap or after else gathers[i - 1].due if i else 0
        usual = at, len(gathers)
        placed.append((bucket, *min(usual, (asked or {}).get(bucket.items, usual))))
    placed += [(bucket, bucket.ready, 0) for bucket in reductions]
    # at one run: what is needed there, then complete reductions, then gathers ahead, those that were asked for first
    placed.sort(key=lambda p: (p[1], p[2] if p[0].gathers and p[0].due > p[1] else -1))
    return [(bucket, at) for bucket, at, _ in placed]


def gathers_first(gathers: Order, reductions: Order) -> Order:
    """Every gather before any reduction that is complete behind the first use of the gather before it."""
    keys = [(gathers[i - 1].due if i else 0, 0, i) for i in range(len(gathers))]
    keyed = [*zip(keys, gathers, strict=True), *(((r.ready, 1, i), r) for i, r in enumerate(reductions))]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


def reductions_first(gathers: Order, reductions: Order) -> Order:
    """A reduction goes before every gather that is not needed at once when it is complete."""
    keyed = [((g.due, 1), g) for g in gathers] + [((r.ready, 0), r) for r in reductions]
    return [bucket for _, bucket in sorted(keyed, key=lambda k: k[0])]


# ---- the best interleaving -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _State:
    """``gathers`` and ``reductions`` placed; as ``bucketing._State``."""

    link_free: float
    compute: float
    parent: _State | None
    gathered: bool
    stalls: _State | None  # the last state that stopped compute
    stalled_at: int = 0
    resumed: float = 0.0


def interleave(tasks: Tasks, gathers: Order, reductions: Order, earliest: Sequence[int], lag: int) -> Order:
    """The fastest merge of two orders; ``earliest`` is the first run before which each gather bucket fits into memory.

    States are (gathers placed, reductions placed) with a Pareto front of link and compute times. At most ``lag`` complete
    reductions wait for their launch, since their gradients hold memory.
    """
    before = tasks.before
    uses = [bucket.due for bucket in gathers] + [tasks.end]
    costs = [_costs(tasks, bucket) for bucket in (*gathers, *reductions)]
    of_gathers, of_reductions = costs[: len(gathers)], costs[len(gathers) :]
    complete = list(itertools.accumulate((sum(r.ready <= use for r in reductions) for use in uses), max))
    fronts: dict[tuple[int, int], list[_State]] = {(0, 0): [_State(0.0, before[uses[0]], None, True, None)]}
    for placed in range(len(gathers) + 1):
        use = uses[placed]
        lowest = max(0, (complete[placed - 1] if placed else 0) - lag) if placed < len(gathers) else 0
        for reduced in range(lowest, len(reductions) + 1):
            front = fronts.pop((placed, reduced), None)
            if front is None:
                continue
            front = _front(front)
            if placed == len(gathers) and reduced == len(reductions):
                return _order_of(min(front, key=lambda s: max(s.compute, s.link_free)), gathers, reductions)
            for state in front:
                if placed < len(gathers):
                    pack, on_link, unpack = of_gathers[placed]
                    at = min(max(earliest[placed], 0), use)
                    free = max(state.link_free, _time_at(state, at, use, before) + pack) + on_link
                    resumed = max(state.compute + pack, free) + unpack
                    compute = resumed + before[uses[placed + 1]] - before[use]
                    fronts.setdefault((placed + 1, reduced), []).append(
                        _behind_gather(state, free, compute, use, resumed)
                    )
                if reduced < len(reductions) and (reductions[reduced].ready <= use or placed == len(gathers)):
                    pack, on_link, unpack = of_reductions[reduced]
                    ready = _time_at(state, min(reductions[reduced].ready, use), use, before)
                    free = max(state.link_free, ready + pack) + on_link
                    fronts.setdefault((placed, reduced + 1), []).append(
                        _State(free, state.compute + pack + unpack, state, False, state.stalls)
                    )
    raise AssertionError("every order of gathers alone can be completed")


def _behind_gather(state: _State, free: float, compute: float, use: int, resumed: float) -> _State:
    """The state behind a gather, at whose first use compute may have stopped."""
    stall = _State(free, compute, None, True, state.stalls, use, resumed)
    return _State(free, compute, state, True, stall, use, resumed)


def _costs(tasks: Tasks, bucket: Bucket) -> tuple[float, float, float]:
    items = [tasks.items(bucket.gathers)[i] for i in bucket.items]
    return (
        tasks.packing(items, bucket.form, bucket.gathers),
        tasks.seconds(items, bucket.form),
        tasks.unpacking(items, bucket.form, bucket.gathers),
    )


def _time_at(state: _State, at: int, use: int, before: Sequence[float]) -> float:
    if at >= use:
        return state.compute
    here = state.stalls
    while here is not None and at <= here.stalled_at:
        here = here.stalls
    return before[at] if here is None else here.resumed + before[at] - before[here.stalled_at]


def _front(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.compute, s.link_free)):
        if not kept or state.link_free < kept[-1].link_free - 1e-12:
            kept.append(state)
    return kept[:3]


def _order_of(state: _State, gathers: Order, reductions: Order) -> Order:
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
    """Bytes that reductions hold during each run if each is launched when complete and waited for at the next one's launch."""
    launches = [
        bucket.at(bucket.ready, max(bucket.ready, min(following.ready, bucket.due)))
        for bucket, following in itertools.zip_longest(reductions, reductions[1:], fillvalue=reductions[-1])
    ] if reductions else []  # fmt: skip
    only = replace(tasks, gathers=(), persistent=0, runs=tuple(replace(run, bytes=0) for run in tasks.runs))
    return list(memory_curve(only, tuple(launches)))


def earliest_places(tasks: Tasks, gathers: Order, reductions: Order, budget: float) -> list[int]:
    """For each gather bucket, launched in this order, the first run before which it fits into memory."""
    held = reduction_memory(tasks, reductions)
    room = [budget - tasks.persistent - run.bytes - more for run, more in zip(tasks.runs, held, strict=True)]
    out, earliest = [], 0
    for bucket in gathers:
        items = [tasks.gathers[i] for i in bucket.items]
        total = sum(item.bytes for item in items)
        world = tasks.links[items[0].link].world
        ends = sorted(items, key=lambda item: item.last)
        alive, done = total, 0
        for run in range(earliest, ends[-1].last + 1):
            while ends[done].last < run and not (tasks.kernels and bucket.form == FLAT):
                alive -= ends[done].bytes
                done += 1
            room[run] -= alive + ((total + total // world) if bucket.form == FLAT and run <= bucket.due else 0)
        earliest = next((run + 1 for run in range(bucket.due, earliest - 1, -1) if room[run] < 0), earliest)
        out.append(min(earliest, bucket.due))
        earliest = out[-1]
    return out


def place(tasks: Tasks, order: Order, earliest: dict[tuple[int, ...], int]) -> Schedule | None:
    """The earliest schedule of an order, with waits where the simulation has reductions done; None if it cannot run.

    ``earliest`` holds the first run before which each gather bucket fits, by its items.
    """
    launches: list[Launch] = []
    at = 0
    for bucket in order:
        at = max(at, earliest[bucket.items] if bucket.gathers else bucket.ready)
        if at > bucket.due:
            return None
        launches.append(bucket.at(at, bucket.due))
    return wait_when_done(tasks, tuple(launches))


def wait_when_done(tasks: Tasks, schedule: Schedule, *, slack: float = 0.1) -> Schedule:
    """Reductions waited for where the simulation has them done, ``slack`` of their time on the link later, so that they hold
    memory no longer than needed."""
    flights, reached = timeline(tasks, schedule)
    out, run = [], 0
    for flight in flights:
        launch = flight.launch
        if not launch.gathers:
            done = flight.end + slack * (flight.end - flight.start)
            while run < tasks.end and reached[run] < done:
                run += 1
            launch = replace(launch, wait=min(max(run, launch.at), launch.wait))
        out.append(launch)
    return tuple(out)


def wait_soon(tasks: Tasks, schedule: Schedule) -> Schedule:
    """Reductions waited for at the next one's launch at the latest: less memory."""
    out: list[Launch] = []
    following = tasks.end
    for launch in reversed(schedule):
        if not launch.gathers:
            out.append(replace(launch, wait=max(launch.at, min(launch.wait, following))))
            following = launch.at
        else:
            out.append(launch)
    return tuple(reversed(out))
