"""Questions about memory: a step's time over the memory budget, and the largest batch or sequence that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compiled_fsdp.base.files import write_text
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.attempts import Attempts
from compiled_fsdp.tools.cli.estimate import Estimate, estimate
from compiled_fsdp.tools.cli.setting import Setting

POINTS = 9
"""How many budgets a curve has, from the least that fits to the memory of the plan without a budget."""
TOO_LITTLE = 1e3
"""Bytes for which no model has a plan, so that the error says how much is enough."""
_ENOUGH = 1.001  # a plan's own peak as a budget, with room for what it rounds


def curve(setting: Setting, planned: Attempts) -> list[tuple[Setting, Estimate]]:
    """Plan a step under budgets from the least that fits to none, in even steps.

    Args:
        setting: the step; its budget is ignored.
        planned: plans the settings that it is given.
    """
    unlimited, too_little = (replace(setting, budget=budget) for budget in (None, TOO_LITTLE))
    free, error = planned([unlimited, too_little])
    assert isinstance(free, Estimate), "no budget, but a plan that does not fit"
    assert isinstance(error, OverBudget), f"a plan for {TOO_LITTLE:.0f} bytes"
    least, most = error.least, _ENOUGH * free.peak_bytes
    budgets = [float(round(least + (most - least) * i / (POINTS - 1))) for i in range(POINTS - 1)]
    settings = [replace(setting, budget=budget) for budget in budgets]
    # the least budget is rounded, and may be too little
    found = [(one, plan) for one, plan in zip(settings, planned(settings), strict=True) if isinstance(plan, Estimate)]
    return [*found, (unlimited, free)]


def knee(points: Sequence[tuple[float, float]]) -> int:
    """The place of the point of a falling curve that is farthest below the line from the first to the last point.

    Below it a byte less costs much, above it a byte more brings little (Satopaa et al., "Finding a Kneedle in a
    Haystack", 2011). For example 1 of ``[(0, 10), (1, 2), (10, 0)]``.
    """
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x0 == x1 or y0 == y1:
        return 0
    below = [(1 - (x - x0) / (x1 - x0)) - (y - y1) / (y0 - y1) for x, y in points]
    return max(range(len(points)), key=below.__getitem__)


def knee_of(found: Sequence[tuple[Setting, Estimate]]) -> int:
    """The place of a curve's knee: of step times over peaks."""
    return knee([(one.peak_bytes, one.step_s) for _, one in found])


def draw(found: Sequence[tuple[Setting, Estimate]], file: Path) -> None:
    """Draw a curve as a page that needs no other file."""
    import plotly.graph_objects as go

    at = knee_of(found)
    memory, times = [one.peak_bytes / 1e9 for _, one in found], [1e3 * one.step_s for _, one in found]
    figure = go.Figure(go.Scatter(x=memory, y=times, mode="lines+markers", name="planned step"))
    figure.add_annotation(x=memory[at], y=times[at], text=f"knee: {memory[at]:,.1f} GB, {times[at]:,.0f} ms", ay=-40)
    setting = found[0][0]
    name = setting.model if isinstance(setting.model, str) else "model"
    figure.update_layout(
        title=f"{name}, {setting.world_size} x {setting.hardware.name}, {setting.batch} x {setting.sequence} tokens",
        xaxis_title="peak on a rank, GB", yaxis_title="step, ms", xaxis_rangemode="tozero", template="simple_white",
    )  # fmt: skip
    write_text(file, figure.to_html(include_plotlyjs=True))


def largest(setting: Setting, what: str) -> tuple[Setting, Estimate]:
    """The largest batch, or the largest multiple of the given sequence length, that fits into the setting's budget.

    Args:
        setting: the step, with a budget.
        what: "batch" or "sequence".

    Raises:
        OverBudget: what the setting asks for does not fit itself.
    """
    unit: int = getattr(setting, what)

    def planned(count: int) -> tuple[Setting, Estimate]:
        one = replace(setting, **{what: count * unit})  # type: ignore[arg-type]
        return one, estimate(one)

    fits, best, too_many = 1, planned(1), None
    while too_many is None or too_many - fits > 1:
        count = 2 * fits if too_many is None else (fits + too_many) // 2
        try:
            best, fits = planned(count), count
        except OverBudget:
            too_many = count
    return best
