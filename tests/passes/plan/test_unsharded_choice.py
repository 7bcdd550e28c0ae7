"""What stays unsharded: on layers whose second gathers are exposed, or hidden."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.plain_schedules import at_once, least_peak, usual_limit
from compiled_fsdp.passes.plan.search import OverBudget, search
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.passes.plan.unsharded_choice import (
    MIN_GAIN_OF_KEEPING_MORE,
    choose_unsharded,
    tasks_with_kept,
)

LAYERS, SIZE = 6, 100


def layers(
    compute: float | list[float],
    sizes: list[int] | None = None,
    *,
    latency: float = 0.0,
    rate: float = SIZE,
    contention: float = 0.0,
) -> tuple[Tasks, Tasks]:
    """Forward and backward of layers; by default equal ones, a parameter of 100 bytes each, whose gather and reduction
    take a second."""
    sizes = sizes or [SIZE] * LAYERS
    count = len(sizes)
    seconds = compute if isinstance(compute, list) else [compute] * count
    channels = {kind: CommChannel(latency, 0.0, rate, 100) for kind in "gr"}

    def segments(order: list[int], times: int) -> tuple[ComputeSegment, ...]:
        own = [ComputeSegment((f"use {i}",), times * seconds[i], 10, contention) for i in order]
        return (*own, ComputeSegment(("end",), 0.0, 10))

    order = list(reversed(range(count)))
    forward = Tasks(
        "forward",
        segments(list(range(count)), 1),
        tuple(CollectiveTask(i, i, 0, "g", TensorSize(size), i, i) for i, size in enumerate(sizes)),
        (),
        channels,
        largest_block_bytes=max(sizes),
    )
    backward = Tasks(
        "backward",
        segments(order, 2),
        tuple(CollectiveTask(i, i, 0, "g", TensorSize(sizes[i]), at, at) for at, i in enumerate(order)),
        tuple(CollectiveTask(i, i, 0, "r", TensorSize(sizes[i]), at + 1, count) for at, i in enumerate(order)),
        channels,
        largest_block_bytes=max(sizes),
    )
    return forward, backward


def test_only_the_first_gather_is_worth_keeping_where_the_others_hide():
    """Backward computes for 4 s while a gather and a reduction take one each: only its first gather is exposed."""
    assert choose_unsharded(*layers(compute=2.0), budget=10_000) == {LAYERS - 1}


def test_where_communication_takes_longer_all_that_fits_is_kept():
    forward, backward = layers(compute=0.1)
    assert choose_unsharded(forward, backward, budget=10_000) == set(range(LAYERS))
    room = max(least_peak(forward), least_peak(backward)) + 2 * SIZE
    kept = choose_unsharded(forward, backward, budget=room)
    assert 1 <= len(kept) < LAYERS
    for tasks in tasks_with_kept(forward, backward, kept):
        assert search(tasks, room).simulation.peak <= room


def seconds_with(graphs: tuple[Tasks, Tasks], kept, budget: float) -> float:
    """Seconds of both graphs, as the choice sees them; infinity if they do not fit."""
    try:
        found = [search(tasks, budget, quick=True).simulation for tasks in tasks_with_kept(*graphs, kept)]
    except OverBudget:
        return float("inf")
    return sum(simulation.seconds for simulation in found)


@settings(max_examples=60, deadline=None)
@given(
    layers_of=st.lists(st.tuples(st.sampled_from([1, 10, 50, 200]), st.sampled_from([0.0, 0.1, 0.5, 3.0])), min_size=1,
                       max_size=6),
    latency=st.sampled_from([0.0, 0.1, 1.0]),
    rate=st.sampled_from([20.0, 100.0, 400.0]),
    contention=st.sampled_from([0.0, 0.3]),
    room=st.sampled_from([None, 0.9, 1.0, 1.3, 1.6, 1e4]),
)  # fmt: skip
def test_no_slower_than_keeping_all_or_nothing(layers_of, latency, rate, contention, room):
    """Under every budget: without room it is as resharding, and with room it is as keeping everything."""
    sizes, compute = ([of[place] for of in layers_of] for place in (0, 1))
    graphs = layers(compute, sizes, latency=latency, rate=rate, contention=contention)
    usual = max(map(usual_limit, graphs))
    budget = usual if room is None else room * usual
    try:
        kept = choose_unsharded(*graphs, None if room is None else budget)
    except OverBudget:
        assert seconds_with(graphs, (), budget) == float("inf")
        return
    nothing, everything = (seconds_with(graphs, reads, budget) for reads in ((), range(len(sizes))))
    most = (1 + MIN_GAIN_OF_KEEPING_MORE) * min(nothing, everything)
    assert seconds_with(graphs, kept, budget) <= most * (1 + 1e-9)


def test_with_room_and_slow_wires_everything_is_kept():
    """Then no gather is sent again: the bytes are those of ``reshard_after_forward=False``."""
    graphs = layers(compute=0.01)
    assert choose_unsharded(*graphs, 1e6) == frozenset(range(LAYERS))
    assert not tasks_with_kept(*graphs, range(LAYERS))[1].gathers


def test_a_kept_parameter_lives_to_the_end_of_forward_and_is_an_input_of_backward():
    forward, backward = layers(compute=1.0)
    kept_forward, kept_backward = tasks_with_kept(forward, backward, {0})
    assert [task.last for task in kept_forward.gathers] == [LAYERS, 1, 2, 3, 4, 5]
    assert len(kept_backward.gathers) == LAYERS - 1
    grown = [
        a - b
        for a, b in zip((r.bytes for r in kept_backward.segments), (r.bytes for r in backward.segments), strict=True)
    ]
    assert grown == [SIZE] * LAYERS + [0]  # read 0's last use is in backward's last layer
    assert max(memory_curve(kept_forward, at_once(kept_forward))) >= max(memory_curve(forward, at_once(forward)))


def test_nothing_fits():
    forward, backward = layers(compute=1.0)
    with pytest.raises(OverBudget, match=r"needs .* bytes"):
        choose_unsharded(forward, replace(backward, persistent=10_000), budget=500)
