"""Tasks by hand and at random, and random schedules of them.

Numbers are small: a channel moves one byte a second unless said otherwise, so sizes are seconds.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import hypothesis.strategies as st

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.plan.channels import COPIES
from compiled_fsdp.passes.plan.tasks import (
    COALESCED,
    FLAT,
    SINGLE,
    CollectiveTask,
    CommChannel,
    ComputeSegment,
    Launch,
    ModelCollective,
    Schedule,
    Tasks,
)
from tests.passes.random_cases import cases

QUICK = cases(60)

FREE = CommChannel(latency=0.0, each=0.0, bytes_per_second=1.0, world=2)


def tasks_of(
    seconds: Sequence[float],
    gathers: Sequence[tuple] = (),
    reductions: Sequence[tuple] = (),
    *,
    channel: CommChannel = FREE,
    memory: Sequence[int] | None = None,
    contention: float = 0.0,
    **options,
) -> Tasks:
    """Tasks of a forward or backward by hand.

    ``seconds``: of each segment; the empty one at the end is added. A gather is (bytes, first use, last use), a
    reduction (bytes, complete before this segment), all on one channel, each a block of its own.
    """
    names = [(f"segment {i}",) for i in range(len(seconds))]
    memory = memory or [0] * len(seconds)
    segments = [ComputeSegment(*of, contention) for of in zip(names, seconds, memory, strict=True)] + [
        ComputeSegment(("end",), 0.0, 0)
    ]
    read = [CollectiveTask(i, i, 0, "channel", TensorSize(size), *of) for i, (size, *of) in enumerate(gathers)]
    made = [
        CollectiveTask(i, i, 0, "channel", TensorSize(size), *of, last=len(seconds))
        for i, (size, *of) in enumerate(reductions)
    ]
    largest_block_bytes = max([task.size.sent for task in (*read, *made)], default=0)
    options = {"largest_block_bytes": largest_block_bytes, "copy_contention": contention, **options}
    return Tasks(
        "backward" if made else "forward", tuple(segments), tuple(read), tuple(made), {"channel": channel}, **options
    )


def with_size(task: CollectiveTask, **changes: int) -> CollectiveTask:
    """The task with other bytes: fields of ``TensorSize``."""
    return replace(task, size=replace(task.size, **changes))


def gather(members: int | tuple[int, ...], at: int, wait: int, form: str | None = None) -> Launch:
    return _launch(Kind.GATHER, members, at, wait, form)


def reduction(members: int | tuple[int, ...], at: int, wait: int, form: str | None = None) -> Launch:
    return _launch(Kind.REDUCE, members, at, wait, form)


def _launch(kind: Kind, members: int | tuple[int, ...], at: int, wait: int, form: str | None) -> Launch:
    indices = (members,) if isinstance(members, int) else members
    return Launch(kind, indices, form or (FLAT if len(indices) > 1 else SINGLE), at, wait)


def layers(
    count: int,
    forward: Sequence[float],
    sizes: Sequence[int],
    channel: CommChannel,
    *,
    backward: bool = False,
    **options,
) -> Tasks:
    """Equal layers whose parameters are used one after the other; ``forward``: seconds of compute with each.

    In a backward each takes twice as long, and the parameters come last; a gradient is complete after its use.
    """
    each = len(sizes)
    order = range(count * each)
    segments = [ComputeSegment((f"use {i}",), forward[i % each] * (1 + backward), 0) for i in order]
    gathers, reductions = [], []
    for place in order:
        layer, position = divmod(place, each)
        task = CollectiveTask(place, layer, position, "gather", TensorSize(sizes[position]), place, place)
        gathers.append(task)
        if backward:
            reductions.append(replace(task, channel="reduce", first=place + 1, last=len(segments)))
    channels = {"gather": channel, "reduce": replace(channel, received_share=1 / channel.world)}
    return Tasks(
        "backward" if backward else "forward",
        (*segments, ComputeSegment(("end",), 0.0, 0)),
        tuple(gathers),
        tuple(reductions),
        channels,
        largest_block_bytes=sum(sizes),
        **options,
    )


LLAMA = [2 * n for n in (4096, 4096**2, 4096 * 1024, 4096 * 1024, 4096**2, 4096, *3 * [4096 * 14336])]
"""Bytes of a layer of an 8 B model: norm, q, k, v, o, norm, gate, up, down."""
FAST = CommChannel(latency=30e-6, each=5e-6, bytes_per_second=100e9, world=8)


@st.composite
def random_tasks(draw, *, segments: int = 6, gathers: int = 5, reductions: int = 5, free: bool = False) -> Tasks:
    """Any tasks of at most so many; ``free``: without copies and contention."""
    times = st.one_of(st.integers(0, 9).map(float), st.floats(0, 9).map(lambda x: round(x, 3)))
    count = draw(st.integers(1, segments))
    world = draw(st.sampled_from([2, 4]))
    reduce_received = draw(st.sampled_from([1 / world, 1.0]))
    streams = draw(st.sampled_from([(0, 0, 0), (0, 0, 1), (0, 1, 2)]))
    channels = {
        name: CommChannel(
            latency=draw(st.sampled_from([0.0, 0.5, 3.0])),
            each=draw(st.sampled_from([0.0, 0.25])),
            bytes_per_second=draw(st.sampled_from([1.0, 3.0, 8.0])),
            world=world,
            stream=stream,
            received_share=0.0 if name == "gather" else reduce_received,
            quick=draw(st.sampled_from([None, (0.0, 0.5), (0.25, 0.75)])),
        )
        for name, stream in zip(("gather", "reduce", "other"), streams, strict=True)
    }
    encoded = set() if free else draw(st.sets(st.sampled_from(["gather", "reduce", "other"])))
    for name in encoded - {"gather"}:  # an all-to-all
        channels[name] = replace(channels[name], received_share=1.0)
    sizes = st.integers(1, 12).map(lambda n: n * world)
    units = st.integers(0, 2)
    kernels, offloads = not free and draw(st.booleans()), not free and draw(st.booleans())
    which = st.sampled_from(["other", "first", "first"])

    def task(i: int, kind: str) -> CollectiveTask:
        # a gradient is complete after the first segment, and mostly not needed before the end
        first = draw(st.integers(0 if kind == "gather" else 1, count))
        last = draw(st.integers(first, count)) if kind == "gather" or draw(st.integers(0, 3)) == 0 else count
        channel = kind if draw(which) == "first" else "other"
        copied, size = not free and draw(st.booleans()), draw(sizes)
        host = size // world if offloads and kind == "gather" and draw(st.booleans()) else 0
        if channel in encoded:
            decoded, copied = draw(st.sampled_from([2, 4])) * size, copied and kind == "reduce"
            sent = TensorSize(size, decoded=decoded, host=host, copied=copied)
            return CollectiveTask(i, draw(units), i, channel, sent, first, last)
        gap = world * draw(st.integers(0, 2)) if kernels else 0
        wider = (size, size // world) if kind == "reduce" and copied and draw(st.booleans()) else (0, 0)
        unpacked = not free and kind == "gather" and draw(st.integers(0, 3)) == 0
        sent = TensorSize(
            size, gap=gap, host=host, wider=wider[0], wider_shard=wider[1],
            cast_shard=size // world if any(wider) else 0, copied=copied, unpacked=unpacked,
        )  # fmt: skip
        return CollectiveTask(i, draw(units), i, channel, sent, first, last)

    def members(kind: str, most: int) -> tuple[CollectiveTask, ...]:
        return tuple(sorted((task(i, kind) for i in range(draw(st.integers(0, most)))), key=lambda x: x.first))

    slows = not free and draw(st.booleans())
    contention = st.sampled_from([0.0, 0.25, 1.0] if slows else [0.0])
    read, made = members("gather", gathers), members("reduce", reductions)
    own = draw(model_collectives(count, streams)) if draw(st.booleans()) else ()
    channels["model"] = replace(channels["gather"], latency=draw(st.sampled_from([0.0, 0.5])), stream=9)
    return Tasks(
        "backward",
        (
            *(
                ComputeSegment((f"segment {i}",), draw(times), draw(st.integers(0, 40)), draw(contention))
                for i in range(count)
            ),
            ComputeSegment(("end",), 0.0, 0),
        ),
        read,
        made,
        channels,
        own,
        copy_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.01, 0.25])),
        kernel_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.0, 0.2])),
        host_copy_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.1])),
        kernels=kernels,
        launch_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.0, 0.1])),
        host_launch_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.0, 0.5])),
        host_seconds=0.0 if free else draw(st.sampled_from([0.0, 0.0, 8.0])),
        copy_contention=draw(contention),
        collective_contention=draw(contention),
        persistent=draw(st.sampled_from([0, 100])),
        largest_block_bytes=max(
            sum(x.size.full for x in kind if x.block_number == unit) for kind in (read, made) for unit in range(3)
        ),
    )


@st.composite
def model_collectives(draw, segments: int, streams: Sequence[int]) -> tuple[ModelCollective, ...]:
    """Up to three: the model's own, over a link of their own or that of some of ours, and copies to host memory."""

    def one(at: int) -> ModelCollective:
        wait = draw(st.one_of(st.just(at), st.integers(at, segments)))
        if (kind := draw(st.sampled_from(["all_reduce", "all_reduce", *COPIES]))) in COPIES:
            return ModelCollective(kind, "model", draw(st.integers(1, 12)), 1, at, wait, (10 + COPIES.index(kind),))
        shared = draw(st.sets(st.sampled_from(streams)))
        sizes = draw(st.integers(1, 12)), draw(st.integers(1, 2))
        return ModelCollective(kind, "model", *sizes, at, wait, (*sorted(shared), 9))

    return tuple(map(one, sorted(draw(st.lists(st.integers(0, segments), min_size=1, max_size=3)))))


@st.composite
def random_schedules(draw, tasks: Tasks) -> Schedule:
    """Any schedule that can run: any buckets, forms, places and order."""
    launches: list[Launch] = []
    for kind in Kind:
        members = tasks.collectives(kind)
        left = list(draw(st.permutations(range(len(members)))))
        while left:
            bucket = [left.pop()]
            for i in list(left):
                first = max(members[j].first for j in (*bucket, i))
                last = min(members[j].last for j in (*bucket, i))
                same = members[i].channel == members[bucket[0]].channel
                if same and (kind.supplies or first <= last) and draw(st.booleans()):
                    left.remove(i)
                    bucket.append(i)
            form = SINGLE if len(bucket) == 1 else draw(st.sampled_from([FLAT, COALESCED]))
            if kind.supplies:
                lowest, highest = 0, min(members[i].first for i in bucket)
            else:
                lowest, highest = max(members[i].first for i in bucket), min(members[i].last for i in bucket)
            at = draw(st.integers(lowest, highest))
            wait = draw(st.one_of(st.just(highest), st.integers(at, highest)))
            launches.append(Launch(kind, tuple(bucket), form, at, wait))
    shuffled = draw(st.permutations(launches))
    return tuple(sorted(shuffled, key=lambda launch: launch.at))


@st.composite
def tasks_and_schedules(draw, **options) -> tuple[Tasks, Schedule]:
    tasks = draw(random_tasks(**options))
    return tasks, draw(random_schedules(tasks))


def single_schedules(tasks: Tasks) -> Iterator[Schedule]:
    """Every schedule of tiny tasks (4 at most) that launches each collective alone and waits when it is due."""
    everything = [(kind, i) for kind in Kind for i in range(len(tasks.collectives(kind)))]
    assert len(everything) <= 4
    places = []
    for kind, i in everything:
        task = tasks.collectives(kind)[i]
        places.append(range(task.first + 1) if kind.supplies else range(task.first, task.last + 1))
    for order in itertools.permutations(range(len(everything))):
        for at in itertools.product(*(places[k] for k in order)):
            if all(a <= b for a, b in itertools.pairwise(at)):
                yield tuple(_alone(tasks, *everything[k], segment) for k, segment in zip(order, at, strict=True))


def _alone(tasks: Tasks, kind: Kind, i: int, at: int) -> Launch:
    task = tasks.collectives(kind)[i]
    return Launch(kind, (i,), SINGLE, at, task.first if kind.supplies else task.last)


def without_latency(tasks: Tasks) -> Tasks:
    """The same tasks on channels that cost nothing but bytes."""
    channels = {name: replace(channel, latency=0.0, each=0.0) for name, channel in tasks.channels.items()}
    return replace(tasks, channels=channels)
