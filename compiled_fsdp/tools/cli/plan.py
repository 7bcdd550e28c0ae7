"""``compiled-fsdp plan``: plan a training step on ranks that you do not have."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from compiled_fsdp.base import progress
from compiled_fsdp.base.files import write_text
from compiled_fsdp.base.sizes import parse_size, too_small_a_budget
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli import budgets
from compiled_fsdp.tools.cli.attempts import attempts
from compiled_fsdp.tools.cli.estimate import Estimate
from compiled_fsdp.tools.cli.hardware import find
from compiled_fsdp.tools.cli.parallel import PRECISIONS, wire_policy
from compiled_fsdp.tools.cli.placements import Row, advice_of, compare, quickest
from compiled_fsdp.tools.cli.placements import table_of as table_of_placements
from compiled_fsdp.tools.cli.setting import NotPlannable, Setting
from compiled_fsdp.tools.cli.shapes import CHECKPOINTING, SHAPES
from compiled_fsdp.tools.timeline_files import write
from compiled_fsdp.tools.words import megabytes

WIDTH = 100
"""Columns of a table in a file or a pipe."""
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


class Several(click.ParamType):
    """The type of an option that takes one value, or several with commas between them.

    Args:
        name: the values' name in messages.
        read: makes a value of a text, or raises ValueError.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the values, in their order."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._read(text.strip()) for text in str(value).split(","))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def budget_of(text: str) -> float | None:
    """Parse bytes ("60GB", "60GiB", "60000000000"), a share of the device's memory ("0.8"), or "none" (gives None)."""
    if text.lower() == "none":
        return None
    size = parse_size(text)
    if not size > 0:
        raise ValueError("must be above 0")
    if why := too_small_a_budget(size):
        raise ValueError(f"it is {why}")
    return size if size <= 1 else float(round(size))


def _wire(text: str) -> str:
    wire_policy(text)
    return text


def _in_a_folder(_ctx: click.Context, _param: click.Parameter, file: Path | None) -> Path | None:
    """Check, before minutes of planning, that the folder of a file exists."""
    if file is not None and not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(file.parent)!r}.")
    return file


@click.command()
@click.option("--model", required=True, metavar="NAME", help=f"{', '.join(SHAPES)}, or package.module:function.")
@click.option(
    "--inputs",
    default="",
    metavar="MODULE:FUNCTION",
    help="The function that gets --batch and --seq and returns the model's arguments.",
)
@click.option(
    "--world-size",
    type=Several("ranks", _count),
    default="8",
    show_default=True,
    help="Number of ranks. Give several to compare them: 8,64,512.",
)
@click.option(
    "--replicate",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Groups of ranks with the same shards (HSDP).",
)
@click.option(
    "--tensor-parallel", type=click.IntRange(1), default=1, show_default=True,
    help="Ranks that split each layer between them; neighbours.",
)  # fmt: skip
@click.option(
    "--hardware", default="h100", show_default=True, metavar="NAME|FILE",
    callback=lambda _ctx, _param, name: find(name),
    help="A profile, as `compiled-fsdp hardware list` names them, or a measured one's file.",
)  # fmt: skip
@click.option(
    "--batch",
    type=Several("sequences", _count),
    default="1",
    show_default=True,
    help="Sequences of a microbatch on each rank. Give several to compare them: 1,2,4.",
)
@click.option(
    "--microbatches", type=click.IntRange(1), default=1, show_default=True,
    help="Microbatches of a step. Replicas and working copies reduce between nodes in the last one.",
)  # fmt: skip
@click.option(
    "--working-copy", type=click.IntRange(0), default=0, show_default=True,
    help="Neighbouring ranks that hold a copy of the parameters over the microbatches (HFSDP).",
)  # fmt: skip
@click.option("--seq", type=click.IntRange(1), default=4096, show_default=True, help="Tokens of a sequence.")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="bf16",
    show_default=True,
    help="Of parameters and of reduced gradients; bf16-weights and bf16-all also keep weights and moments in bfloat16.",
)
@click.option(
    "--reshard-after-forward", default="true", show_default=True, metavar="true|false|auto|RANKS",
    help="As fully_shard takes it; auto: what saves most time under the budget stays.",
)  # fmt: skip
@click.option(
    "--checkpointing",
    type=click.Choice(CHECKPOINTING),
    default="none",
    show_default=True,
    help="What backward computes again instead of keeping it in memory.",
)
@click.option(
    "--budget", type=Several("bytes", budget_of), default="none", show_default=True,
    help="Memory on each rank: 60GB, a share such as 0.9, none; or several.",
)  # fmt: skip
@click.option(
    "--curve", type=FILE, callback=_in_a_folder, metavar="FILE.html",
    help="Plan budgets from the least that fits to none, and draw the step's time over them.",
)  # fmt: skip
@click.option(
    "--placements", is_flag=True,
    help="Compare FSDP, HSDP, replicas and what stays unsharded under each --budget (by default the device's memory).",
)  # fmt: skip
@click.option(
    "--fit", type=click.Choice(["batch", "seq"]),
    help="The largest batch, or multiple of --seq, that fits into --budget (by default the device's memory).",
)  # fmt: skip
@click.option(
    "--wire", type=Several("codecs", _wire), default="none", show_default=True,
    help="How collectives are compressed, gathers/reductions: int8, or float8_e4m3fn/bfloat16. Give several to compare "
    "them: none,int8.",
)  # fmt: skip
@click.option(
    "--transport", type=click.Choice(["backend", "symm_mem"]), default="backend", show_default=True,
    help="What sends: NCCL, or copy engines inside a node.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes that plan at once.")
@click.option(
    "--json",
    "json_file",
    type=FILE,
    callback=_in_a_folder,
    help="Write all numbers, and every task of the plan, to this file.",
)
@click.option(
    "--timeline",
    type=FILE,
    callback=_in_a_folder,
    help="Draw the step: FILE.html is a page, FILE.json is for Perfetto.",
)
def plan(
    model: str, inputs: str, world_size: Sequence[int], replicate: int, tensor_parallel: int, hardware: Hardware,
    batch: Sequence[int], microbatches: int, working_copy: int, seq: int, precision: str, reshard_after_forward: str,
    checkpointing: str, budget: Sequence[float | None], curve: Path | None, placements: bool, fit: str | None,
    wire: Sequence[str], transport: str, jobs: int, json_file: Path | None, timeline: Path | None,
) -> None:  # fmt: skip
    """Plan a training step for ranks that you do not have: time, tokens per second, MFU, exposed communication, memory.

    The model is captured on the meta device under a fake process group, and planned as torch.compile would.
    """
    first = Setting(
        model,
        inputs,
        0,
        replicate,
        tensor_parallel,
        hardware,
        0,
        seq,
        precision,
        _reshard(reshard_after_forward),
        checkpointing,
        None,
        transport=transport,
        microbatches=microbatches,
        working_copy=working_copy,
    )
    settings = [
        replace(
            first,
            world_size=w,
            batch=b,
            budget=limit * hardware.memory if limit is not None and limit <= 1 else limit,
            wire=codecs,
        )
        for w, b, limit, codecs in itertools.product(world_size, batch, budget, wire)
    ]
    if timeline is not None and len(settings) > 1:
        raise click.UsageError("--timeline draws one step: give one world size, one batch, one budget and one --wire.")
    if timeline is not None and timeline.suffix not in (".html", ".json"):
        raise click.BadParameter(f"{timeline} must end in .html or .json.", param_hint="--timeline")
    if timeline is not None and timeline.suffix == ".html" and not _has_plotly():
        raise click.UsageError(
            "--timeline FILE.html is drawn by plotly, which is not installed: pip install plotly, or give FILE.json."
        )
    if (curve is not None or fit is not None) and (len(settings) > 1 or (curve is not None and fit is not None)):
        raise click.UsageError("--curve and --fit are about one step: give one value of each, and one of the two.")
    if curve is not None and (curve.suffix != ".html" or not _has_plotly()):
        raise click.UsageError("--curve draws a page: give FILE.html, and install plotly (pip install plotly).")
    if placements and (
        len(settings) > len(budget)
        or (replicate, working_copy, reshard_after_forward) != (1, 0, "true")
        or (curve or fit or timeline)
    ):
        raise click.UsageError(
            "--placements compares values of --replicate, --working-copy and --reshard-after-forward: leave them out, "
            "and --curve, --fit and --timeline, too, and give one value of each option but --budget."
        )
    console, bar = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if bar.is_terminal:  # the bar has the terminal's last line
        progress.log.setLevel(logging.ERROR)

    def planned_in_jobs(settings: Sequence[Setting]) -> Iterator[Estimate | OverBudget]:
        found, hidden = attempts(settings, jobs), not bar.is_terminal
        return iter(track(found, "planning", len(settings), console=bar, disable=hidden, transient=True))

    found: list[Estimate | OverBudget] = []
    rows: list[Row] = []
    limits = [float(setting.budget or hardware.memory) for setting in settings]
    knee = None
    try:
        if placements:
            rows = compare(settings[0], limits, planned_in_jobs)
            settings, found = [row.setting for row in rows], [row.found for row in rows]
        elif curve is not None:
            pairs = budgets.curve(settings[0], planned_in_jobs)
            budgets.draw(pairs, curve)
            settings, found, knee = [one for one, _ in pairs], [one for _, one in pairs], budgets.knee_of(pairs)
        elif fit is not None:
            limited = replace(settings[0], budget=settings[0].budget or float(hardware.memory))
            best, one = budgets.largest(limited, {"batch": "batch", "seq": "sequence"}[fit])
            settings, found = [best], [one]
            console.print(f" the largest --{fit} that fits: {best.batch if fit == 'batch' else best.sequence:,}")
        else:
            found = list(planned_in_jobs(settings))
            if len(found) == 1 and isinstance(found[0], OverBudget):
                raise found[0]
    except (NotPlannable, OverBudget) as error:
        raise click.ClickException(str(error)) from error
    planned = [estimated for estimated in found if isinstance(estimated, Estimate)]
    if placements:
        console.print(table_of_placements(rows, limits), *advice_of(rows, limits), sep="\n")
    else:
        console.print(_step(settings[0], planned[0]) if len(settings) == 1 else table_of(settings, found, knee))
    if json_file is not None:
        runs = [
            {"setting": _plain(setting)}
            | (json.loads(one.to_json()) if isinstance(one, Estimate) else {"error": str(one)})
            for setting, one in zip(settings, found, strict=True)
        ]
        for run, row in zip(runs, rows, strict=False):
            run |= {"placement": row.placement.name, "quickest_at": [b for b in limits if quickest(rows, b) is row]}
        write_text(json_file, json.dumps(runs[0] if len(runs) == 1 else runs))
    if timeline is not None:
        write(planned[0].timeline(), timeline)


def _has_plotly() -> bool:
    try:
        import plotly  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _reshard(text: str) -> bool | int | str:
    words: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    if text.lower() in words:
        return words[text.lower()]
    if text.isdigit() and int(text) > 1:
        return int(text)
    raise click.BadParameter(
        f"{text!r} is not true, false, auto or a number of ranks.", param_hint="--reshard-after-forward"
    )


def _plain(setting: Setting) -> dict[str, Any]:
    return asdict(setting) | {"hardware": setting.hardware.name}


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{share:.1%}"


def _step(setting: Setting, e: Estimate) -> Table:
    """Make a table of one step, with a number in each line."""
    table = Table(show_header=False, box=None)
    rows = {
        "step": f"{1e3 * e.step_s:,.1f} ms: "
        + ", ".join(f"{graph.timeline.name} {1e3 * graph.step_s:,.1f}" for graph in e.graphs)
        + f", AdamW {1e3 * e.optimizer_s:,.1f}",
        "no plan is quicker than": f"{1e3 * e.bound_s:,.1f} ms",
        "tokens a second": f"{e.tokens_per_second:,.0f} on each rank, "
        f"{e.tokens_per_second * setting.world_size:,.0f} in all",
        "MFU": f"{_percent(e.mfu)}" + ("" if e.mfu is None else f" of {e.peak_flops or 0:.4g} FLOP/s"),
        "communication": f"{e.hidden:.1%} hidden; {1e3 * e.exposed_s:,.1f} ms exposed",
        "peak on a rank": f"{megabytes(e.peak_bytes)} of {setting.hardware.memory / 1e9:,.0f} GB"
        + (": too much" if e.peak_bytes > setting.hardware.memory else "")
        + ("" if setting.budget is None else f", budget {megabytes(setting.budget)}"),
        **({"for backward": str(e.for_backward)} if e.for_backward is not None and e.for_backward.is_cut else {}),
        "launches": ", ".join(f"{_launches(graph.timeline.tasks)} in {graph.name}" for graph in e.graphs),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _launches(tasks: Sequence[Any]) -> int:
    return sum(task.kind in ("gather", "reduce") for task in tasks)


def table_of(settings: Sequence[Setting], found: Sequence[Estimate | OverBudget], knee: int | None = None) -> Table:
    """Make a table with a line for each setting; the line ``knee`` of a curve is marked."""
    table = Table()
    encoded = any(setting.wire != "none" for setting in settings)
    if encoded:
        table.add_column("wire", no_wrap=True)
    for name in ("ranks", "batch", "budget\nGB", "step\nms", "bound\nms", "tokens/s\na rank", "MFU", "exposed\nms",
                 "peak\nGB"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    if knee is not None:
        table.add_column("", no_wrap=True)
    for number, (setting, one) in enumerate(zip(settings, found, strict=True)):
        limit = "none" if setting.budget is None else f"{setting.budget / 1e9:,.1f}"
        row = [str(setting.world_size), str(setting.batch), limit]
        if isinstance(one, Estimate):
            row += [f"{1e3 * one.step_s:,.1f}", f"{1e3 * one.bound_s:,.1f}", f"{one.tokens_per_second:,.0f}"]
            row += [_percent(one.mfu), f"{1e3 * one.exposed_s:,.1f}", f"{one.peak_bytes / 1e9:,.1f}"]
        else:
            row += ["no plan", "", "", "", "", f"> {one.least / 1e9:,.1f}"]
        table.add_row(*([setting.wire] if encoded else []), *row, *(["knee"] if number == knee else []))
    return table
