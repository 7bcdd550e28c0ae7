"""Tasks by hand and at random, and random schedules of them.

Numbers are small: a link moves one byte a second unless said otherwise, so sizes are seconds.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

from compiled_fsdp.passes.plan.tasks import COALESCED, FLAT, SINGLE, Item, Launch, Link, Run, Schedule, Tasks

QUICK = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

FREE = Link(latency=0.0, each=0.0, bytes_per_second=1.0, world=2)


def tasks_of(
    seconds: Sequence[float],
    gathers: Sequence[tuple] = (),
    reductions: Sequence[tuple] = (),
    *,
    link: Link = FREE,
    memory: Sequence[int] | None = None,
    **options,
) -> Tasks:
    """Tasks of a forward or backward by hand.

    ``seconds``: of each run; the empty one at the end is added. A gather is (bytes, first use, last use), a reduction
    (bytes, complete before this run), all on one link, each a unit of its own.
    """
    names = [(f"run {i}",) for i in range(len(seconds))]
    memory = memory or [0] * len(seconds)
    runs = [Run(*of) for of in zip(names, seconds, memory, strict=True)] + [Run(("end",), 0.0, 0)]
    read = [Item(i, i, 0, "link", *of) for i, of in enumerate(gathers)]
    made = [Item(i, i, 0, "link", *of, last=len(seconds)) for i, of in enumerate(reductions)]
    unit_bytes = max([item.bytes for item in (*read, *made)], default=0)
    options = {"unit_bytes": unit_bytes, **options}
    return Tasks("backward" if made else "forward", tuple(runs), tuple(read), tuple(made), {"link": link}, **options)


def gather(items: int | tuple[int, ...], at: int, wait: int, form: str | None = None) -> Launch:
    return _launch(True, items, at, wait, form)


def reduction(items: int | tuple[int, ...], at: int, wait: int, form: str | None = None) -> Launch:
    return _launch(False, items, at, wait, form)


def _launch(gathers: bool, items: int | tuple[int, ...], at: int, wait: int, form: str | None) -> Launch:
    members = (items,) if isinstance(items, int) else items
    return Launch(gathers, members, form or (FLAT if len(members) > 1 else SINGLE), at, wait)


def layers(
    count: int, forward: Sequence[float], sizes: Sequence[int], link: Link, *, backward: bool = False, **options
) -> Tasks:
    """Equal layers whose parameters are used one after the other; ``forward``: seconds of compute with each.

    In a backward each takes twice as long, and the parameters come from behind; a gradient is complete behind its use.
    """
    each = len(sizes)
    order = range(count * each)
    runs = [Run((f"use {i}",), forward[i % each] * (1 + backward), 0) for i in order]
    gathers, reductions = [], []
    for place in order:
        layer, position = divmod(place, each)
        item = Item(place, layer, position, "gather", sizes[position], place, place)
        gathers.append(item)
        if backward:
            reductions.append(replace(item, link="reduce", first=place + 1, last=len(runs)))
    links = {"gather": link, "reduce": replace(link, received=1 / link.world)}
    return Tasks(
        "backward" if backward else "forward",
        (*runs, Run(("end",), 0.0, 0)),
        tuple(gathers),
        tuple(reductions),
        links,
        unit_bytes=sum(sizes),
        **options,
    )


LLAMA = [2 * n for n in (4096, 4096**2, 4096 * 1024, 4096 * 1024, 4096**2, 4096, *3 * [4096 * 14336])]
"""Bytes of a layer of an 8 B model: norm, q, k, v, o, norm, gate, up, down."""
FAST = Link(latency=30e-6, each=5e-6, bytes_per_second=100e9, world=8)


@st.composite
def random_tasks(draw, *, runs: int = 6, gathers: int = 5, reductions: int = 5, free: bool = False) -> Tasks:
    """Any tasks of at most so many; ``free``: without copies and contention."""
    times = st.one_of(st.integers(0, 9).map(float), st.floats(0, 9).map(lambda x: round(x, 3)))
    count = draw(st.integers(1, runs))
    world = draw(st.sampled_from([2, 4]))
    reduce_received = draw(st.sampled_from([1 / world, 1.0]))
    streams = draw(st.sampled_from([(0, 0, 0), (0, 0, 1), (0, 1, 2)]))
    links = {
        name: Link(
            latency=draw(st.sampled_from([0.0, 0.5, 3.0])),
            each=draw(st.sampled_from([0.0, 0.25])),
            bytes_per_second=draw(st.sampled_from([1.0, 3.0, 8.0])),
            world=world,
            stream=stream,
            received=0.0 if name == "gather" else reduce_received,
        )
        for name, stream in zip(("gather", "reduce", "other"), streams, strict=True)
    }
    sizes = st.integers(1, 12).map(lambda n: n * world)
    units = st.integers(0, 2)
    which = st.sampled_from(["other", "first", "first"])

    def item(i: int, kind: str) -> Item:
        # a gradient is complete behind the first run, and mostly not needed before the end
        first = draw(st.integers(0 if kind == "gather" else 1, count))
        last = draw(st.integers(first, count)) if kind == "gather" or draw(st.integers(0, 3)) == 0 else count
        link = kind if draw(which) == "first" else "other"
        copied = kind == "reduce" and not free and draw(st.booleans())
        return Item(i, draw(units), i, link, draw(sizes), first, last, copied)

    def items(kind: str, most: int) -> tuple[Item, ...]:
        return tuple(sorted((item(i, kind) for i in range(draw(st.integers(0, most)))), key=lambda x: x.first))

    read, made = items("gather", gathers), items("reduce", reductions)
    return Tasks(
        "backward",
        (*(Run((f"run {i}",), draw(times), draw(st.integers(0, 40))) for i in range(count)), Run(("end",), 0.0, 0)),
        read,
        made,
        links,
        copy_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.01, 0.25])),
        contention=0.0 if free else draw(st.sampled_from([0.0, 0.25, 1.0])),
        persistent=draw(st.sampled_from([0, 100])),
        unit_bytes=max(sum(x.bytes for x in kind if x.unit == unit) for kind in (read, made) for unit in range(3)),
    )


@st.composite
def random_schedules(draw, tasks: Tasks) -> Schedule:
    """Any schedule that can run: any buckets, forms, places and order."""
    launches: list[Launch] = []
    for gathers in (True, False):
        items = tasks.items(gathers)
        left = list(draw(st.permutations(range(len(items)))))
        while left:
            bucket = [left.pop()]
            for i in list(left):
                first = max(items[j].first for j in (*bucket, i))
                last = min(items[j].last for j in (*bucket, i))
                same = items[i].link == items[bucket[0]].link
                if same and (gathers or first <= last) and draw(st.booleans()):
                    left.remove(i)
                    bucket.append(i)
            form = SINGLE if len(bucket) == 1 else draw(st.sampled_from([FLAT, COALESCED]))
            if gathers:
                lowest, highest = 0, min(items[i].first for i in bucket)
            else:
                lowest, highest = max(items[i].first for i in bucket), min(items[i].last for i in bucket)
            at = draw(st.integers(lowest, highest))
            wait = draw(st.one_of(st.just(highest), st.integers(at, highest)))
            launches.append(Launch(gathers, tuple(bucket), form, at, wait))
    shuffled = draw(st.permutations(launches))
    return tuple(sorted(shuffled, key=lambda launch: launch.at))


@st.composite
def tasks_and_schedules(draw, **options) -> tuple[Tasks, Schedule]:
    tasks = draw(random_tasks(**options))
    return tasks, draw(random_schedules(tasks))


def single_schedules(tasks: Tasks) -> Iterator[Schedule]:
    """Every schedule of tiny tasks that launches each item alone and waits when it is due; 4 items at most."""
    everything = [(gathers, i) for gathers in (True, False) for i in range(len(tasks.items(gathers)))]
    assert len(everything) <= 4
    places = []
    for gathers, i in everything:
        item = tasks.items(gathers)[i]
        places.append(range(item.first + 1) if gathers else range(item.first, item.last + 1))
    for order in itertools.permutations(range(len(everything))):
        for at in itertools.product(*(places[k] for k in order)):
            if all(a <= b for a, b in itertools.pairwise(at)):
                yield tuple(_alone(tasks, *everything[k], run) for k, run in zip(order, at, strict=True))


def _alone(tasks: Tasks, gathers: bool, i: int, at: int) -> Launch:
    item = tasks.items(gathers)[i]
    return Launch(gathers, (i,), SINGLE, at, item.first if gathers else item.last)


def without_latency(tasks: Tasks) -> Tasks:
    """The same tasks on links that cost nothing but bytes."""
    links = {name: replace(link, latency=0.0, each=0.0) for name, link in tasks.links.items()}
    return replace(tasks, links=links)
