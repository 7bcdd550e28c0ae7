"""Published steps beside planned ones: the rows, how a step is put together, and the page."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.reference_rows import float8_bytes, rows
from bench.references import Planned, markdown, of_estimate, sources, summary
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.tools.cli.shapes import SHAPES

BY_NUMBER = {row.row: row for row in rows()}
PAGE = Path(__file__).parents[2] / "docs" / "references.md"


def step(**changes):
    """A forward of 1 s and a backward of 3 s, of which 0.5 and 2 s are compute."""
    memory = SimpleNamespace(memory=((0.0, 10**9),))
    graphs = (
        SimpleNamespace(step_s=1.0, compute_s=0.5, timeline=memory),
        SimpleNamespace(step_s=3.0, compute_s=2.0, timeline=memory),
    )
    known = {"graphs": graphs, "optimizer_s": 0.25, "exposed_s": 1.0, "peak_bytes": 10**9, "parameters": 10**9}
    return SimpleNamespace(**{**known, **changes})


def test_numbers_are_unique_and_uses_are_known():
    assert len(BY_NUMBER) == len(list(rows())) == 32
    assert {row.use for row in rows()} == {"fit", "check"}
    assert sum(row.use == "check" for row in rows()) >= 20


def test_published_seconds_are_those_of_the_published_rates():
    """Row 2: 9,364 tokens a second on each GPU, two microbatches of 4 x 4,096 tokens. Row 13: four of 8 x 2,048."""
    assert BY_NUMBER["2"].seconds == pytest.approx(2 * 4 * 4096 / 9364, rel=1e-3)
    assert BY_NUMBER["13"].seconds == pytest.approx(4 * 8 * 2048 / 1039)


def test_each_microbatch_has_a_forward_and_a_backward():
    planned = of_estimate(BY_NUMBER["13"], step())
    assert (planned.seconds, planned.compute, planned.exposed) == (4 * 4 + 0.25, 4 * 2.5, 4)


def test_one_rank_has_no_collectives():
    """It is planned with two ranks, so that the optimizer's part of each is a half."""
    planned = of_estimate(BY_NUMBER["1"], step())
    assert (planned.seconds, planned.exposed) == (4 * 2.5 + 2 * 0.25, 0)


def test_full_gradients_wait_for_the_last_microbatch():
    """In the dtype of reductions, in addition to the memory at the backward's start; there are no sharded ones then."""
    graph = SimpleNamespace(
        step_s=1.0, compute_s=0.5, timeline=SimpleNamespace(memory=((0.0, 5 * 10**8), (1.0, 10**9)))
    )
    for number, of_weights in (("2", 4 - 2 / 2), ("3", 4 - 2 / 4)):
        planned = of_estimate(BY_NUMBER[number], step(graphs=(graph,)))
        assert planned.peak == 5 * 10**8 + round(10**9 * of_weights)
    assert of_estimate(replace(BY_NUMBER["2"], pending_bytes=0), step(graphs=(graph,))).peak == step().peak_bytes


def test_casts_to_float8_take_time():
    row = BY_NUMBER["8"]
    casts = of_estimate(row, step()).seconds - 4.25
    assert casts == pytest.approx(float8_bytes(row.shape, 2 * 8192) / row.hardware.copy)
    tiny = SHAPES["tiny"]
    linears = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 256)
    assert float8_bytes(tiny, 10) == 7 * 10 * tiny.layers * linears
    assert row.hardware.matmul("bfloat16") * row.hardware.attention[0] == pytest.approx(
        BY_NUMBER["5"].hardware.matmul("bfloat16") * PROFILES["h100"].attention[0]
    )


def test_summary():
    planned = [
        Planned(number, use, 1 + error, 1.0, 0, 0, 0, 0, None)
        for number, use, error in (("1", "fit", 0.5), ("2", "check", -0.1), ("3", "check", 0.2), ("4", "check", 0.3))
    ]
    assert summary(planned) == (
        "1 fit rows: median error 50%, nine in ten within 50%, largest 50%; 0 within 25%\n"
        "3 check rows: median error 20%, nine in ten within 30%, largest 30%; 2 within 25%"
    )


def test_the_page_has_all_rows():
    """The settings and the published figures on the page are those of the rows."""
    written = markdown([of_estimate(row, step()) for row in rows()])
    times = [line.split("|")[1:8] for line in written.splitlines()[2:] if line.count("|") == 10]
    on_page = [line.split("|")[1:8] for line in PAGE.read_text().splitlines() if line.count("|") == 10]
    assert len(times) == len(BY_NUMBER)
    assert [cells for cells in times if cells not in on_page] == []
    assert sources([of_estimate(row, step()) for row in rows()]) in PAGE.read_text()
