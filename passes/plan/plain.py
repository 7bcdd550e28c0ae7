"""Plain plans: neighbouring buckets are merged if that costs next to nothing.

A launch is not free, even if the simulator hides its collective: it takes the host's time and, on GPUs, a share of the
multiprocessors. And rates are only known roughly. So a bucket is merged with a later one of its kind if the graph then
takes hardly longer, also with faster compute or a slower link, with which less is hidden.
"""

# Why: docs/design/planner.md, "Fewer launches"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from compiled_fsdp.passes.plan import order as orders
from compiled_fsdp.passes.plan.late import as_late_as_safe
from compiled_fsdp.passes.plan.order import Order, OrderedBucket
from compiled_fsdp.passes.plan.simulate import makespan, memory_curve
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks

SAME_SECONDS = 1.002
"""A schedule with fewer launches may take at most this many times as long."""
RATE_ERROR = 0.3
"""The share by which the link may be slower, or compute or the host faster, than assumed."""
SLOW_LINK = 8
"""The link may also be this many times slower than assumed, so that hardly anything is hidden and merges cost time."""
STEPS = 60_000
"""The most segments and launches that are simulated."""


def with_fewer_launches(tasks: Tasks, schedule: Schedule, limit: float, peak: float) -> Schedule:
    """Return ``schedule`` with launches as late as is safe, or a schedule with fewer launches that takes as long.

    Small buckets are merged first.

    Args:
        limit: the bytes that a schedule may hold when its gathers are placed early, before they are moved later.
        peak: the bytes that the result may hold if it has fewer launches.
    """
    worlds = [tasks, *_other_rates(tasks)]
    schedule = as_late_as_safe(tasks, schedule, limit)
    allowed = [SAME_SECONDS * makespan(world, schedule) for world in worlds]
    steps = len(tasks.segments) + len(schedule) + len(tasks.model_collectives)
    tries = STEPS // (steps * (len(worlds) + 2))
    order = [orders.ordered(tasks, launch) for launch in schedule]
    for small_alone in (True, False):
        at = 0
        while at < len(order):
            for merged in _mergers(tasks, order, at, small_alone=small_alone):
                if tries == 0:
                    return schedule
                tries -= 1
                placed = orders.placed_within(tasks, merged, limit)
                if placed is None:
                    continue
                late = as_late_as_safe(tasks, placed, limit)
                as_quick = all(makespan(world, late) <= most for world, most in zip(worlds, allowed, strict=True))
                if as_quick and max(memory_curve(tasks, late)) <= peak:
                    order, schedule = merged, late
                    break
            else:
                at += 1
    return schedule


def _other_rates(tasks: Tasks) -> Iterator[Tasks]:
    """Yield the tasks with a slower link, a much slower link, faster compute, and a faster host."""
    for share in (1 - RATE_ERROR, 1 / SLOW_LINK):
        slower = {name: channel.scaled(rate=share) for name, channel in tasks.channels.items()}
        yield replace(tasks, channels=slower)
    quicker = tuple(replace(segment, seconds=segment.seconds * (1 - RATE_ERROR)) for segment in tasks.segments)
    yield replace(tasks, segments=quicker)
    if tasks.host_seconds:
        host = {name: getattr(tasks, name) * (1 - RATE_ERROR) for name in ("host_seconds", "host_launch_seconds")}
        yield replace(tasks, **host)


def _mergers(tasks: Tasks, order: Order, at: int, *, small_alone: bool) -> Iterator[Order]:
    """Yield orders in which bucket ``at`` is merged with the next bucket of its kind.

    Args:
        small_alone: only merge if one of the two is small. Then a small bucket is also merged with the next small one.
    """
    bucket = order[at]
    later = [i for i in range(at + 1, len(order)) if order[i].kind is bucket.kind]
    later = [i for i in later if _channel(tasks, order[i]) == _channel(tasks, bucket)]
    small = [i for i in later if _is_small(tasks, order[i])]
    following = later[:1]
    if small_alone and not _is_small(tasks, bucket):
        following = [i for i in following if i in small]
    elif small_alone:
        following = list(dict.fromkeys([*following, *small[:1]]))
    for other in following:
        both = orders.bucket_of(tasks, bucket.kind, (*bucket.indices, *order[other].indices))
        rest = [b for i, b in enumerate(order) if i not in (at, other)]
        place = at if bucket.kind.supplies else other - 1
        yield [*rest[:place], both, *rest[place:]]


def _channel(tasks: Tasks, bucket: OrderedBucket) -> str:
    return tasks.members(bucket.kind, bucket.indices)[0].channel


def _is_small(tasks: Tasks, bucket: OrderedBucket) -> bool:
    """Whether most of a bucket's time on the channel is latency."""
    channel = tasks.channels[_channel(tasks, bucket)]
    total = sum(task.size.sent for task in tasks.members(bucket.kind, bucket.indices))
    return total / channel.bytes_per_second < channel.latency
