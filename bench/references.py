"""Plan published training steps as their sources ran them, and compare planned with published times.

    python -m bench.references [--rows 5,6] [--jobs N] [--json FILE]
    python -m bench.references --markdown FILE   # the tables of docs/references.md, from such a file

The rows are in ``bench/reference_rows.py``. Nothing runs on a device, because every figure is a prediction of the cost
model. The error is planned / published - 1. Rows marked "fit" may have been used to choose constants, so that only the
errors of "check" rows say how good the predictions are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from functorch.compile import default_partition

from bench.reference_rows import Row, float8_bytes, rows
from bench.tables import table
from compiled_fsdp.compiler import compilation
from compiled_fsdp.tools.cli.estimate import Estimate, estimate
from compiled_fsdp.tools.cli.parallel import PRECISIONS
from compiled_fsdp.tools.cli.setting import Setting


@dataclass(frozen=True)
class Planned:
    """A planned row. Times are seconds of the whole step, and sizes are bytes on one rank."""

    row: str
    use: str
    seconds: float
    published: float
    compute: float
    exposed: float
    optimizer: float
    peak: int
    published_memory: float | None

    @property
    def error(self) -> float:
        """How far the planned time is above the published one, as a share of that: -0.1 is a tenth too quick."""
        return self.seconds / self.published - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", metavar="NUMBERS", help="only these rows, for example 5,7a")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--json", metavar="FILE", help="write the planned rows as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="print the tables of docs/references.md from a JSON file")
    arguments = parser.parse_args()
    chosen = list(rows())
    if arguments.markdown:
        print(markdown([Planned(**one) for one in json.loads(Path(arguments.markdown).read_text())]))
        return
    if arguments.rows:
        numbers = arguments.rows.split(",")
        if unknown := set(numbers) - {row.row for row in chosen}:
            parser.error(f"--rows: there is no row {', '.join(sorted(unknown))}")
        chosen = [row for row in chosen if row.row in numbers]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        planned = []
        for row, one in zip(chosen, pool.imap(plan, chosen), strict=True):
            planned.append(one)
            print(_line(row, one), flush=True)
    print(summary(planned))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([vars(one) for one in planned]))


def plan(row: Row) -> Planned:
    """Plan one row as its source ran it."""
    whole = row.world > 1
    setting = Setting(
        model=row.shape,
        inputs="",
        world_size=row.world if whole else 2,
        replicate=row.replicate,
        tensor_parallel=1,
        hardware=row.hardware,
        batch=row.batch,
        sequence=row.sequence,
        precision=row.precision,
        reshard_after_forward=row.reshard,
        checkpointing=row.checkpointing,
        budget=None,
        wire=row.wire,
        options=(
            *row.system.options,
            ("codegen", "inductor" if row.system.fused else "aot_eager"),
            *((("optimizer_bytes_per_element", row.optimizer_bytes),) if row.optimizer_bytes is not None else ()),
        ),
    )
    with contextlib.nullcontext() if row.system.fused else keeps_as_eager_code():
        return of_estimate(row, estimate(setting))


@contextlib.contextmanager
def keeps_as_eager_code() -> Iterator[None]:
    """Cut joint graphs so that backward has what eager autograd saves; a compiler computes some of it again."""

    def cut(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        return default_partition(joint, inputs, **kwargs)

    with mock.patch.object(compilation, "min_cut_partition", cut):
        yield


def of_estimate(row: Row, step: Estimate) -> Planned:
    """Sum up one step: each microbatch has a forward and a backward, and the optimizer runs once.

    A row with one rank is planned with two, and only compute counts, because there are no collectives.
    """
    alone = row.world == 1
    compute = sum(graph.compute_s for graph in step.graphs)
    seconds = compute if alone else sum(graph.step_s for graph in step.graphs)
    optimizer = step.optimizer_s * (2 if alone else 1)
    casts = float8_bytes(row.shape, row.sequence * row.batch) / row.hardware.copy if row.float8 else 0.0
    return Planned(
        row.row,
        row.use,
        row.microbatches * (seconds + casts) + optimizer,
        row.seconds,
        row.microbatches * (compute + casts),
        0.0 if alone else row.microbatches * step.exposed_s,
        optimizer,
        max(step.peak_bytes, _bytes_with_pending(row, step)),
        row.memory,
    )


def _bytes_with_pending(row: Row, step: Estimate) -> int:
    """The bytes at the beginning of the last microbatch's backward, if full gradients of the others wait for it.

    There are no sharded gradients then. Later, each reduction frees a full gradient.
    """
    if not row.pending_bytes:
        return 0
    gradient = PRECISIONS[row.precision].weights.itemsize / row.world
    at_start = step.graphs[-1].timeline.memory[0][1]
    return round(at_start + step.parameters * (row.pending_bytes - gradient))


def summary(planned: Sequence[Planned]) -> str:
    """Return the distribution of the errors in time, for rows of each use apart."""
    lines = []
    for use in ("fit", "check"):
        errors = sorted(abs(one.error) for one in planned if one.use == use)
        if errors:
            ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
            within = sum(error <= 0.25 for error in errors)
            lines.append(
                f"{len(errors)} {use} rows: median error {statistics.median(errors):.0%}, nine in ten within "
                f"{ninth:.0%}, largest {errors[-1]:.0%}; {within} within 25%"
            )
    return "\n".join(lines)


def _line(row: Row, one: Planned) -> str:
    memory = "" if not row.memory else f", memory {one.peak / 1e9:.1f} of {row.memory / 1e9:.1f} GB"
    return (
        f"{row.row:>3} {row.use:5} {row.shape.name:10} x {row.world:3} {row.hardware.name}: "
        f"{one.seconds:.3f} s planned, {one.published:.3f} published, {one.error:+.0%} "
        f"(compute {one.compute:.3f}, exposed {one.exposed:.3f}){memory}"
    )


def markdown(planned: Sequence[Planned]) -> str:
    """Return the tables of docs/references.md, and the summary."""
    by_number = {row.row: row for row in rows()}
    both = [(by_number[one.row], one) for one in planned]
    head = ["row", "use", "model", "ranks", "sequence, batch", "system", "published, s", "planned, s", "error"]
    times = [
        [
            row.row,
            row.use,
            row.shape.name,
            f"{row.world} {row.hardware.name.upper()}",
            f"{row.sequence:,}, {row.batch}" + (f" x {row.microbatches}" if row.microbatches > 1 else ""),
            row.system.name + ("" if row.checkpointing == "none" else f", {row.checkpointing} checkpointing"),
            f"{one.published:.3g}",
            f"{one.seconds:.3g}",
            f"{one.error:+.0%}",
        ]
        for row, one in both
    ]
    memory = [
        [
            row.row,
            row.memory_kind,
            f"{row.memory / 1e9:.1f}",
            f"{one.peak / 1e9:.1f}",
            f"{one.peak / row.memory - 1:+.0%}",
        ]
        for row, one in both
        if row.memory
    ]
    heads = ["row", "kind", "published, GB", "planned, GB", "error"]
    return "\n".join([table(head, times), summary(planned), "", sources(planned), table(heads, memory)])


def sources(planned: Sequence[Planned]) -> str:
    """Return the table of sources, and of the settings that they leave open."""
    by_number = {row.row: row for row in rows()}
    numbers: dict[tuple[str, str], list[str]] = {}
    for one in planned:
        row = by_number[one.row]
        numbers.setdefault((row.source, row.assumed), []).append(row.row)
    head = ["rows", "source", "assumed, because the source does not say"]
    return table(head, ([", ".join(found), *key] for key, found in numbers.items()))


if __name__ == "__main__":
    main()
