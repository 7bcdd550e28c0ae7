"""The placements of parameters over ranks and nodes: the planned step of each, and the quickest that fits a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.attempts import Attempts
from compiled_fsdp.tools.cli.estimate import Estimate
from compiled_fsdp.tools.cli.parallel import wire_policy
from compiled_fsdp.tools.cli.setting import Setting
from compiled_fsdp.tools.words import megabytes


@dataclass(frozen=True)
class Placement:
    """A placement of a model's parameters.

    Attributes:
        name: "FSDP", "HFSDP", "HSDP" or "replicate", and how long full parameters are kept.
        replicate: how many groups of ranks hold the same shards.
        reshard_after_forward, working_copy: as ``Setting`` has them.
    """

    name: str
    replicate: int
    reshard_after_forward: bool | int | str
    working_copy: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place in a table: by replicas, and then by how much stays unsharded."""
        kept = {True: 0, "auto": 2, False: 3}.get(self.reshard_after_forward, 1)
        return self.replicate, self.working_copy, kept

    @property
    def options(self) -> str:
        """The options of ``compiled-fsdp plan`` that plan it alone; "" for the defaults."""
        reshard = f"--reshard-after-forward {str(self.reshard_after_forward).lower()}"
        given = {
            f"--replicate {self.replicate}": self.replicate > 1,
            reshard: self.reshard_after_forward is not True,
            f"--working-copy {self.working_copy}": self.working_copy > 0,
        }
        return " ".join(option for option, is_given in given.items() if is_given)


@dataclass(frozen=True)
class Row:
    """One planned step of a table of placements.

    Attributes:
        placement: the placement.
        setting: the step; its budget is None if the placement was planned without one.
        found: the plan, or the error that no plan fits into the budget.
    """

    placement: Placement
    setting: Setting
    found: Estimate | OverBudget

    def fits(self, budget: float) -> bool:
        """Whether there is a plan, and it needs no more than ``budget`` bytes."""
        return isinstance(self.found, Estimate) and self.found.peak_bytes <= budget

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinity if there is no plan."""
        return self.found.step_s if isinstance(self.found, Estimate) else float("inf")


def placements_of(setting: Setting) -> list[Placement]:
    """The placements over the ranks of a setting; those within nodes only if the ranks fill several whole nodes.

    A working copy is among them if there are several microbatches over which it stays, and gradients are not encoded.
    """
    data = setting.world_size // setting.tensor_parallel
    node = setting.hardware.ranks_per_node // setting.tensor_parallel
    out = [Placement("FSDP", 1, True), Placement("FSDP, kept", 1, False)]
    if node > 1 and data > node and data % node == 0:
        out += [
            Placement(f"FSDP, {node} in backward", 1, node),
            Placement("HSDP", data // node, True),
            Placement("HSDP, kept", data // node, False),
        ]
        if setting.microbatches > 1 and wire_policy(setting.wire).reduce is None:
            out.append(Placement("HFSDP", 1, True, working_copy=node))
    return [*out, Placement("replicate", data, True)]


def compare(setting: Setting, budgets: Iterable[float], planned: Attempts) -> list[Row]:
    """Plan each placement without a budget, and again under each budget into which that plan does not fit.

    If a plan that keeps all parameters does not fit, ``reshard_after_forward="auto"`` is planned under the budget, too,
    because it keeps some of them. A budget below ``Estimate.floor_bytes`` is not tried.

    Args:
        setting: the step; its placement and its budget are ignored.
        budgets: bytes on each rank.
        planned: plans the settings that it is given.

    Returns:
        The rows by placement, and those of one placement from the largest budget to the smallest.

    Raises:
        NotPlannable: as for ``estimate``.
    """
    free = _rows([(of, None) for of in placements_of(setting)], setting, planned)
    floors = {row.placement: row.found.floor_bytes for row in free if isinstance(row.found, Estimate)}
    tight: list[tuple[Placement, float]] = []
    for budget in sorted(set(budgets), reverse=True):
        over = [row.placement for row in free if not row.fits(budget)]
        for kept in [placement for placement in over if placement.reshard_after_forward is False]:
            auto = replace(kept, name=kept.name.replace("kept", "auto"), reshard_after_forward="auto")
            floors[auto] = min(floors[of] for of in floors if of.replicate == kept.replicate)
            over.append(auto)
        tight += [(placement, budget) for placement in over if floors[placement] <= budget]
    return sorted([*free, *_rows(tight, setting, planned)], key=lambda row: row.placement.order)


def _rows(asked: Sequence[tuple[Placement, float | None]], setting: Setting, planned: Attempts) -> list[Row]:
    settings = [
        replace(
            setting,
            replicate=of.replicate,
            reshard_after_forward=of.reshard_after_forward,
            working_copy=of.working_copy,
            budget=budget,
        )
        for of, budget in asked
    ]
    found = planned(settings)
    return [Row(of, one, plan) for (of, _), one, plan in zip(asked, settings, found, strict=True)]


def quickest(rows: Sequence[Row], budget: float) -> Row | None:
    """The quickest step that fits into a budget, whatever budget it was planned under; None if none fits.

    So a larger budget is never slower, because it admits all steps that a smaller one admits.
    """
    return min((row for row in rows if row.fits(budget)), key=lambda row: row.step_s, default=None)


def table_of(rows: Sequence[Row], budgets: Sequence[float]) -> Table:
    """Make a table with a line for each row; the budgets at which it is the quickest have a star.

    "under" is the budget of the plan. "inside" and "between" are the bytes that a rank sends inside its node and to
    other nodes.
    """
    table = Table()
    table.add_column("placement", no_wrap=True)
    for name in ("under\nGB", "step\nms", "exposed\nms", "peak\nGB", "inside\nGB", "between\nGB", "fits\nGB"):
        table.add_column(name, justify="right", no_wrap=True)
    best = [(budget, quickest(rows, budget)) for budget in budgets]
    for row in rows:
        under = "" if row.setting.budget is None else _short(row.setting.budget)
        if isinstance(row.found, Estimate):
            cells = [f"{1e3 * row.found.step_s:,.1f}", f"{1e3 * row.found.exposed_s:,.1f}"]
            cells += [f"{size / 1e9:,.1f}" for size in (row.found.peak_bytes, *row.found.sent_bytes)]
        else:
            cells = ["no plan", "", f"> {row.found.least / 1e9:,.1f}", "", ""]
        fits = [_short(budget) + "*" * (row is one) for budget, one in best if row.fits(budget)]
        table.add_row(row.placement.name, under, *cells, " ".join(fits))
    return table


def advice_of(rows: Sequence[Row], budgets: Sequence[float]) -> list[str]:
    """A line for each budget: the quickest placement that fits, and the options that plan it alone."""
    lines = []
    for budget in budgets:
        row, words = quickest(rows, budget), f" the quickest in {megabytes(budget)}: "
        if row is None:
            lines.append(f"{words}no placement fits")
            continue
        limit = [] if row.setting.budget is None else [f"--budget {row.setting.budget / 1e9:.12g}GB"]
        options = " ".join(filter(None, [row.placement.options, *limit]))
        lines.append(words + row.placement.name + (f" ({options})" if options else ""))
    return lines


def _short(size: float) -> str:
    return f"{size / 1e9:g}"
