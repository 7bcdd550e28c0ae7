"""What stays unsharded: on layers whose second gathers are exposed, or hidden."""

from dataclasses import replace

import pytest

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.plain_schedules import at_once, least_peak
from compiled_fsdp.passes.plan.search import OverBudget, search
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded, tasks_with_kept

LAYERS, SIZE = 6, 100


def layers(compute: float) -> tuple[Tasks, Tasks]:
    """Forward and backward of equal layers, a parameter of 100 bytes each, whose gather and reduction take a second."""
    channels = {"g": CommChannel(0.0, 0.0, SIZE, 100), "r": CommChannel(0.0, 0.0, SIZE, 100)}
    forward = Tasks(
        "forward",
        (*(ComputeSegment((f"use {i}",), compute, 10) for i in range(LAYERS)), ComputeSegment(("end",), 0.0, 10)),
        tuple(CollectiveTask(i, i, 0, "g", TensorSize(SIZE), i, i) for i in range(LAYERS)),
        (),
        channels,
        largest_block_bytes=SIZE,
    )
    order = list(reversed(range(LAYERS)))
    backward = Tasks(
        "backward",
        (*(ComputeSegment((f"use {i}",), 2 * compute, 10) for i in order), ComputeSegment(("end",), 0.0, 10)),
        tuple(CollectiveTask(i, i, 0, "g", TensorSize(SIZE), place, place) for place, i in enumerate(order)),
        tuple(CollectiveTask(i, i, 0, "r", TensorSize(SIZE), place + 1, LAYERS) for place, i in enumerate(order)),
        channels,
        largest_block_bytes=SIZE,
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
