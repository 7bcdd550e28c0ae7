"""The search for a plan: a portfolio of orders, then local search, then fewer launches, as late as is safe.

No rule is best for all graphs, so several are simulated, and the fastest schedule that fits into memory is kept.
The effort is limited in simulated steps, never in time, so that the same tasks give the same plan on any machine.
"""

# Why: docs/design/planner.md, "The search for a plan"
# Why: docs/design/planner.md, "The memory limit without a budget"

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.adjust import wait_soon
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.bucketing import (
    Bucketing,
    by_size,
    by_unit,
    form_of,
    gather_buckets,
    one_by_one,
    reduction_buckets,
)
from compiled_fsdp.passes.plan.late import as_late_as_safe
from compiled_fsdp.passes.plan.order import Order, OrderedBucket
from compiled_fsdp.passes.plan.plain import with_fewer_launches
from compiled_fsdp.passes.plan.plain_schedules import at_once, one_ahead_schedule, per_unit, usual_limit
from compiled_fsdp.passes.plan.simulate import Simulation, makespan, memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

LAGS = (1, 2, 4, 12)
"""Limits on the complete reductions that may wait for their launch: for each limit one interleaving is tried."""
GOOD_ENOUGH = 1.0005
"""The portfolio ends at a schedule that takes at most this many times the lower bound."""
IMPROVE_ABOVE = 1.002
"""Local search goes on while the best schedule takes longer than this many times the lower bound."""
LOCAL_SEARCH_STEPS = 120_000
"""The most segments and launches that local search simulates, over all of its tries."""
MORE_MEMORY = 1.005
"""Without a budget, a schedule with fewer launches may hold at most this many times as much memory."""
DEVICE_SHARE = 0.01
"""If the host is slower than the device: the share of the device's time in a schedule's score, beside the host's."""
SHARE_WITHOUT_CONTENTION = 0.03
"""The share of the time without contention in a schedule's score."""
SHARE_PER_LAUNCH = 1e-6
"""The share that each launch adds to a schedule's score, so that fewer launches win if schedules are equal."""


class OverBudget(CompiledFsdpError, RuntimeError):
    """No plan fits into the memory budget. A budget of ``least`` bytes would be enough."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least

    def __reduce__(self) -> tuple[Any, ...]:  # between processes
        return type(self), (str(self), self.least)


@dataclass(frozen=True)
class Found:
    """A schedule that the search has found."""

    schedule: Schedule
    simulation: Simulation
    # The rule or search that made it, for logs.
    origin: str


def search(
    tasks: Tasks,
    budget: float | None = None,
    fixed: Mapping[Kind, Bucketing] | None = None,
    *,
    quick: bool = False,
    merge: bool = True,
    bucket: object = "auto",
) -> Found:
    """Find the fastest schedule whose peak is within ``budget`` bytes; without a budget, within ``usual_limit``.

    Args:
        fixed: the buckets of each kind. Then only orders are searched.
        quick: whether to skip local search and the search for fewer launches.
        merge: whether to search for fewer launches.
        bucket: the value of the option ``bucket`` that has given ``fixed``, for the error message.

    Raises:
        OverBudget: no plan fits; the message says how many bytes would be enough.
    """
    base = at_once(tasks)
    limit = usual_limit(tasks) if budget is None else budget
    best: Found | None = None
    least = float("inf")
    tried: set[Schedule] = set()
    portfolio = itertools.chain([("at once", base)], _portfolio(tasks, limit))
    if fixed is not None:
        sides = orders.sides_of(tasks, fixed)
        base = one_ahead_schedule(tasks, *sides, overlap=False)
        limit = max(limit, max(memory_curve(tasks, base)) + tasks.spare_bytes) if budget is None else limit
        portfolio = itertools.chain([("at once", base)], _orders(tasks, "given buckets", *sides, limit))
    bound = lower_bound(tasks, limit).with_latency
    for origin, schedule in portfolio:
        for named, candidate in ((origin, schedule), (f"{origin}, waits soon", wait_soon(tasks, schedule))):
            if candidate in tried or not _fits(tasks, candidate, limit):
                continue
            tried.add(candidate)
            if (score := _score(tasks, candidate, least)) < least:
                best, least = Found(candidate, simulate(tasks, candidate), named), score
        if best is not None and best.simulation.seconds < GOOD_ENOUGH * bound:
            break
    if best is None:
        raise over_budget(tasks.phase, max(memory_curve(tasks, base)), limit, bucket)
    if fixed is None and not quick:
        best = _improved(tasks, best, limit)
    schedule = as_late_as_safe(tasks, best.schedule, limit)
    if fixed is None and merge and not quick:
        peak = MORE_MEMORY * max(memory_curve(tasks, schedule)) if budget is None else budget
        merged = with_fewer_launches(tasks, best.schedule, limit, peak)
        if len(merged) < len(schedule):
            return Found(merged, simulate(tasks, merged), f"{best.origin}, merged")
    return Found(schedule, simulate(tasks, schedule), best.origin)


def over_budget(phase: str, needed: int, budget: float, bucket: object = "auto") -> OverBudget:
    """Make the error that says how many bytes would be enough."""
    plan = "even with one collective at a time" if bucket == "auto" else f"with the option 'bucket' at {bucket!r}"
    return OverBudget(
        f"compiled_fsdp: option 'memory_budget': the {phase} graph needs {needed:,} bytes on each rank {plan}, but the "
        f"budget is {budget:,.0f} bytes. Give more, shard over more ranks, checkpoint activations, or take a smaller "
        "batch.",
        needed,
    )


def _score(tasks: Tasks, schedule: Schedule, least: float = float("inf")) -> float:
    """Seconds of a schedule, slightly changed so that equal schedules can be compared.

    Each launch adds a little. If the host is slower than the device, the device's time still counts a little, because
    otherwise all schedules with the same number of launches would be equal. The time without contention counts a
    little, too, because contention is the least certain of the costs: of two schedules that take as long, the one that
    waits less for collectives is quicker if there is less contention.

    Args:
        least: a score that is of no interest if it is not below this may be any number that is not below.
    """
    device, host = makespan(tasks, schedule, host=False), tasks.host_bound(len(schedule))
    per_launch = 1 + SHARE_PER_LAUNCH * len(schedule)
    if tasks.has_contention:
        shortest = tasks.seconds_before[-1]
        if per_launch * (device + SHARE_WITHOUT_CONTENTION * (shortest - device)) < least:
            shortest = makespan(tasks.without_contention, schedule, host=False)
        device += SHARE_WITHOUT_CONTENTION * (shortest - device)
    seconds = max(device, host) - DEVICE_SHARE * max(0.0, host - device)
    return seconds * per_launch


# ---- portfolio -------------------------------------------------------------------------------------------------------
def _portfolio(tasks: Tasks, limit: float) -> Iterator[tuple[str, Schedule]]:
    """Yield (origin, schedule) for FSDP2's orders, and for each division into buckets with each rule for the order."""
    yield "one ahead by unit", per_unit(tasks)
    if tasks.has_prefetch_lists:
        yield "prefetch lists", per_unit(tasks, asked=True)
    yield "one ahead by parameter", per_unit(tasks, bucketing="parameter")
    seen = set()
    for name, gathers, reductions in _bucketings(tasks, limit):
        if (gathers, reductions) in seen:
            continue
        seen.add((gathers, reductions))
        sides = orders.sides_of(tasks, {Kind.GATHER: gathers, Kind.REDUCE: reductions})
        yield from _orders(tasks, name, *sides, limit)


def _orders(tasks: Tasks, name: str, supplies: Order, drains: Order, limit: float) -> Iterator[tuple[str, Schedule]]:
    """Yield (origin, schedule) for each rule for the order of given buckets."""
    places = orders.earliest_places(tasks, supplies, drains, limit)
    earliest = dict(zip(supplies, places, strict=True))
    choices = []
    folded = tasks.with_waits_as_compute
    for lag in LAGS if supplies and drains else LAGS[:1]:
        choices.append((f"lag {lag}", orders.interleave(folded, supplies, drains, places, lag)))
    if supplies and drains:
        choices.append(("gathers first", orders.supplies_first(supplies, drains)))
        choices.append(("reductions first", orders.drains_first(supplies, drains)))
    for rule, order in choices:
        schedule = orders.place(tasks, order, earliest)
        if schedule is not None:
            yield f"{name}, {rule}", schedule
    yield f"{name}, one ahead", one_ahead_schedule(tasks, supplies, drains)


def _bucketings(tasks: Tasks, limit: float) -> Iterator[tuple[str, Bucketing, Bucketing]]:
    """Yield (name, buckets of gathers, buckets of reductions) for several divisions into buckets."""
    units = by_unit(tasks.gathers), by_unit(tasks.reductions)
    yield "by unit", *units
    model_load = {kind: _load_of_model(tasks, kind) for kind in Kind}
    tasks = tasks.with_waits_as_compute
    # the load: seconds on the channel of collectives of the other kind
    reduced = [tasks.reductions[max(bucket, key=lambda i: tasks.reductions[i].first)].first for bucket in units[1]]
    reduction_load = _sum(_load(tasks, Kind.REDUCE, units[1], reduced), model_load[Kind.GATHER])
    gathers = gather_buckets(tasks, limit, reduction_load)
    used = [min(tasks.gathers[i].first for i in bucket) for bucket in gathers]
    mirrored_load = _load(tasks, Kind.GATHER, gathers, [len(tasks.segments) - use for use in used])
    mirrored_load = _sum(mirrored_load, model_load[Kind.REDUCE])
    reductions = reduction_buckets(tasks, limit, mirrored_load)
    yield "best buckets", gathers, reductions
    if tasks.reductions and tasks.gathers:
        yield "best gathers, reductions by unit", gathers, units[1]
        yield "gathers by unit, best reductions", units[0], reductions
        apart = (
            gather_buckets(tasks, limit, model_load[Kind.GATHER]),
            reduction_buckets(tasks, limit, model_load[Kind.REDUCE]),
        )
        yield "best buckets apart", *apart
    yield "alone", one_by_one(tasks.gathers), one_by_one(tasks.reductions)
    # if collectives take longer than compute, buckets of equal size that just fit into memory are best
    for share in (1, 2, 3, 4, 6):
        megabytes = tasks.largest_block_bytes / share / 1e6
        yield f"1/{share} unit", by_size(tasks.gathers, megabytes), by_size(tasks.reductions, megabytes)


def _load(tasks: Tasks, kind: Kind, bucketing: Bucketing, at: list[int]) -> list[float]:
    """Seconds that all buckets before each segment take on the channel.

    Args:
        at: the segment of each bucket.
    """
    load = [0.0] * (len(tasks.segments) + 2)
    for bucket, segment in zip(bucketing, at, strict=True):
        load[segment + 1] += tasks.seconds(tasks.members(kind, bucket), form_of(tasks, kind, bucket))
    return list(itertools.accumulate(load))


def _load_of_model(tasks: Tasks, kind: Kind) -> list[float] | None:
    """Seconds that the model's own collectives before each segment take on the links of gathers, or of reductions.

    For reductions, segments are counted in the graph in reverse (see ``bucketing.mirror``). None if no link is shared.
    """
    streams = {tasks.channels[task.channel].stream for task in tasks.collectives(kind)}
    load = [0.0] * (len(tasks.segments) + 2)
    for of, seconds in zip(tasks.model_collectives, tasks.model_seconds, strict=True):
        if streams.intersection(of.streams):
            load[(of.at if kind.supplies else tasks.end - of.at) + 1] += seconds
    return list(itertools.accumulate(load)) if any(load) else None


def _sum(load: list[float], more: list[float] | None) -> list[float]:
    return load if more is None else [a + b for a, b in zip(load, more, strict=True)]


# ---- local search ----------------------------------------------------------------------------------------------------
def _improved(tasks: Tasks, best: Found, limit: float) -> Found:
    """Improve a schedule by local search: exchange, merge and split neighbouring buckets as long as it gets faster."""
    steps = len(tasks.segments) + len(best.schedule) + len(tasks.model_collectives)
    tries = LOCAL_SEARCH_STEPS // (steps * (3 if tasks.shares_links else 1))  # with shared links ``place`` tries more
    bound, least = lower_bound(tasks, limit).with_latency, _score(tasks, best.schedule)
    improved = True
    while improved and tries > 0 and best.simulation.seconds > IMPROVE_ABOVE * bound:
        improved = False
        for schedule in _neighbours(tasks, best, limit):
            if tries == 0:
                break
            tries -= 1
            if schedule is None:
                continue
            if (score := _score(tasks, schedule, least)) < least * (1 - 1e-6) and _fits(tasks, schedule, limit):
                origin = best.origin if best.origin.endswith("local search") else f"{best.origin}, local search"
                best, least, improved = Found(schedule, simulate(tasks, schedule), origin), score, True
                break
    return best


def _fits(tasks: Tasks, schedule: Schedule, limit: float) -> bool:
    return max(memory_curve(tasks, schedule)) <= limit


def _neighbours(tasks: Tasks, found: Found, limit: float) -> Iterator[Schedule | None]:
    """Yield schedules one change away, those near the longest stalls first; None for one that was yielded before."""
    order = [orders.ordered(tasks, launch) for launch in found.schedule]
    stalls = sorted(range(len(order)), key=lambda i: -found.simulation.timings[i].exposed)
    can_run: dict[tuple[tuple[Kind, tuple[int, ...]], ...], bool] = {}
    for i in stalls:
        for changed in _changes(tasks, order, i):
            key = tuple((bucket.kind, bucket.indices) for bucket in changed)
            if key not in can_run:  # an exchange of two neighbours comes up twice, once for each of them
                schedule = orders.placed_within(tasks, changed, limit)
                can_run[key] = schedule is not None
            else:
                schedule = None
            if can_run[key]:
                yield schedule


def _changes(tasks: Tasks, order: Order, i: int) -> Iterator[Order]:
    """Yield the order with bucket ``i`` exchanged with a neighbour, split, or merged with the next one of its kind."""
    for j in (i - 1, i):
        if 0 <= j < len(order) - 1:
            yield [*order[:j], order[j + 1], order[j], *order[j + 2 :]]
    bucket = order[i]

    def channel_of(bucket: OrderedBucket) -> str:
        return tasks.members(bucket.kind, bucket.indices)[0].channel

    if len(bucket.indices) > 1:
        # the half that is needed first is launched first; most reductions are all needed at the end
        indices = bucket.indices if bucket.kind.supplies else _by_need(tasks, bucket)
        for cut in dict.fromkeys((len(indices) // 2, 1, len(indices) - 1)):
            halves = [orders.bucket_of(tasks, bucket.kind, half) for half in (indices[:cut], indices[cut:])]
            yield [*order[:i], *halves, *order[i + 1 :]]
    following = next((j for j in range(i + 1, len(order)) if order[j].kind is bucket.kind), None)
    if following is not None and channel_of(order[following]) == channel_of(bucket):
        both = orders.bucket_of(tasks, bucket.kind, (*bucket.indices, *order[following].indices))
        at = i if bucket.kind.supplies else following
        rest = [b for j, b in enumerate(order) if j not in (i, following)]
        at -= 0 if bucket.kind.supplies else 1
        yield [*rest[:at], both, *rest[at:]]


def _by_need(tasks: Tasks, bucket: OrderedBucket) -> tuple[int, ...]:
    """The indices of a bucket's tensors in the order in which they are needed."""
    collectives = tasks.collectives(bucket.kind)
    return tuple(sorted(bucket.indices, key=lambda i: collectives[i].last))
