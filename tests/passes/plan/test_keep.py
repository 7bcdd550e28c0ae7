"""What stays unsharded: on layers whose second gathers are exposed, or hidden."""

from dataclasses import replace

import pytest

from compiled_fsdp.passes.plan.keep import choose_kept, keeping
from compiled_fsdp.passes.plan.search import OverBudget, at_once, least_peak, search
from compiled_fsdp.passes.plan.simulate import memory_curve
from compiled_fsdp.passes.plan.tasks import Item, Link, Run, Tasks

LAYERS, SIZE = 6, 100


def layers(compute: float) -> tuple[Tasks, Tasks]:
    """Forward and backward of equal layers, a parameter of 100 bytes each, whose gather and reduction take a second."""
    links = {"g": Link(0.0, 0.0, SIZE, 100), "r": Link(0.0, 0.0, SIZE, 100)}
    ahead = Tasks(
        "forward",
        (*(Run((f"use {i}",), compute, 10) for i in range(LAYERS)), Run(("end",), 0.0, 10)),
        tuple(Item(i, i, 0, "g", SIZE, i, i) for i in range(LAYERS)),
        (),
        links,
        unit_bytes=SIZE,
    )
    order = list(reversed(range(LAYERS)))
    behind = Tasks(
        "backward",
        (*(Run((f"use {i}",), 2 * compute, 10) for i in order), Run(("end",), 0.0, 10)),
        tuple(Item(i, i, 0, "g", SIZE, place, place) for place, i in enumerate(order)),
        tuple(Item(i, i, 0, "r", SIZE, place + 1, LAYERS) for place, i in enumerate(order)),
        links,
        unit_bytes=SIZE,
    )
    return ahead, behind


def test_only_the_first_gather_is_worth_keeping_where_the_others_hide():
    """Backward computes for 4 s while a gather and a reduction take one each: only its first gather is exposed."""
    assert choose_kept(*layers(compute=2.0), budget=10_000) == {LAYERS - 1}


def test_where_communication_takes_longer_all_that_fits_is_kept():
    ahead, behind = layers(compute=0.1)
    assert choose_kept(ahead, behind, budget=10_000) == set(range(LAYERS))
    room = max(least_peak(ahead), least_peak(behind)) + 2 * SIZE
    kept = choose_kept(ahead, behind, budget=room)
    assert 1 <= len(kept) < LAYERS
    for tasks in keeping(ahead, behind, kept):
        assert search(tasks, room).simulation.peak <= room


def test_a_kept_parameter_lives_to_the_end_of_forward_and_is_an_input_of_backward():
    ahead, behind = layers(compute=1.0)
    kept_ahead, kept_behind = keeping(ahead, behind, {0})
    assert [item.last for item in kept_ahead.gathers] == [LAYERS, 1, 2, 3, 4, 5]
    assert len(kept_behind.gathers) == LAYERS - 1
    grown = [a - b for a, b in zip((r.bytes for r in kept_behind.runs), (r.bytes for r in behind.runs), strict=True)]
    assert grown == [SIZE] * LAYERS + [0]  # read 0's last use is in backward's last layer
    assert max(memory_curve(kept_ahead, at_once(kept_ahead))) >= max(memory_curve(ahead, at_once(ahead)))


def test_nothing_fits():
    ahead, behind = layers(compute=1.0)
    with pytest.raises(OverBudget, match=r"needs .* bytes"):
        choose_kept(ahead, replace(behind, persistent=10_000), budget=500)
