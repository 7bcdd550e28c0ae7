"""Compare compiled_fsdp's plans with torch's passes and with fixed plans, on the same graphs, priced by one referee.

    python -m bench.plan_quality [--quick] [--alone] [--jobs N] [--json FILE]

A setting is a model (Llama-like or another, ``bench/capture.py``) with a world size, a sequence length and a memory
budget, on H100s (the profile in ``passes/cost/profiles.py``). ``bound_s`` is a time that no bucketing can beat, because
it counts collectives as bytes over bandwidth, without latency and copies. ``bound_latency_s`` also counts latency and
the copies that every form needs (``plan/bound.py``). ``step_s`` is forward and backward. With ``--alone`` each rank has
a node and its one NIC for itself, for example because tensor parallelism uses the other GPUs of the node.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import torch_plans
from bench.capture import SHAPES, Captured, capture, fake_group
from bench.referee import Price, price
from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.graph import argument, calls, ops
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.plain_schedules import least_peak
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.tools.cli.shapes import Shape

WORLDS = (8, 64, 512)
SEQUENCES = {"short": 2048, "long": 16384}
PHASES = ("forward", "backward")
PLAIN = {
    "one_ahead": PlanRules(bucket="module"),
    "unbucketed": PlanRules(bucket="parameter", overlap=False),
}
# A tight budget is the least memory of a plan with every collective alone, plus this share of the difference to the
# memory that compiled_fsdp takes without a budget.
TIGHT = 0.5


@dataclass
class Row:
    """The result of one system on one pair of graphs, forward and backward."""

    system: str
    prices: list[Price]
    plan_s: float

    @property
    def step(self) -> float:
        return sum(p.seconds for p in self.prices)

    @property
    def peak(self) -> int:
        return max(p.peak for p in self.prices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write a JSON list, one record per row and system")
    parser.add_argument("--quick", action="store_true", help="the small model and world size 8 only")
    parser.add_argument("--alone", action="store_true", help="groups of one rank a node")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes; more than cores would spoil planning times"
    )
    arguments = parser.parse_args()
    shapes, worlds = (SHAPES[-1:], WORLDS[:1]) if arguments.quick else (SHAPES, WORLDS)
    cases = list(itertools.product(shapes, worlds, SEQUENCES.values(), [arguments.alone]))
    records: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for case, found in zip(cases, pool.imap(measured, cases), strict=True):
            shape, world, sequence, _ = case
            show(shape, world, sequence, found)
            records += found
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(records, indent=1))
    print("\n".join(table(records)))
    summarise(records)


def measured(case: tuple[Shape, int, int, bool]) -> list[dict[str, Any]]:
    shape, world, sequence, alone = case
    torch.set_num_threads(1)
    with fake_group(world):
        return list(measure(shape, world, sequence, alone))


def show(shape: Shape, world: int, sequence: int, records: list[dict[str, Any]]) -> None:
    for budget, rows in itertools.groupby(records, key=lambda record: record["budget_bytes"]):
        found = list(rows)
        limit = "none" if budget is None else f"{budget / 1e9:.2f} GB"
        bound, with_latency = 1e3 * found[0]["bound_s"], 1e3 * found[0]["bound_latency_s"]
        print(
            f"{shape.name}, {world} ranks, {sequence} tokens, budget {limit}: bound {bound:.2f} ms, with latency "
            f"{with_latency:.2f} ms",
            flush=True,
        )
        for row in found:
            over = row["step_s"] / row["bound_s"] - 1
            print(
                f"  {row['system']:22} {1e3 * row['step_s']:9.2f} ms  {over:+8.2%}  peak "
                f"{row['peak_bytes'] / 1e9:7.3f} GB  {row['collectives']:4} collectives, planned in "
                f"{row['plan_s']:.2f} s",
                flush=True,
            )


def measure(shape: Shape, world: int, sequence: int, alone: bool) -> Iterator[dict[str, Any]]:
    """Yield the records of all systems for one model, without a budget and with a tight one."""
    captured = capture(shape, world, sequence, nodes=world if alone else None)
    tasks = [tasks_of(captured, phase) for phase in PHASES]
    held_always = tasks[0].persistent  # shards, gradients, optimizer state
    free = ours(captured, world, None)
    least = max(map(least_peak, tasks))
    held = max(ctx_peak for ctx_peak in free[1])
    budgets: list[float | None] = [None, least + TIGHT * (held - least)]
    plain = [plain_row(captured, world, name) for name in PLAIN]
    plain += [torch_row(captured, world, name, shape) for name in torch_plans.PASSES]
    for budget in budgets:
        bounds = [lower_bound(t, budget) for t in tasks]
        bound, with_latency = sum(b.seconds for b in bounds), sum(b.with_latency for b in bounds)
        mine = free[0] if budget is None else ours(captured, world, budget)[0]
        for row in (mine, *plain):
            yield {
                "model": shape.name,
                "world_size": world,
                "nodes": captured.nodes,
                "seq": sequence,
                "budget_bytes": budget,
                "system": row.system,
                "bound_s": bound,
                "bound_latency_s": with_latency,
                "step_s": row.step,
                "peak_bytes": row.peak + held_always,
                "plan_s": row.plan_s,
                "exposed_s": sum(p.exposed for p in row.prices),
                "collectives": sum(p.collectives for p in row.prices),
            }


def tasks_of(captured: Captured, phase: str) -> Tasks:
    ctx = captured.context(phase)
    return extract(arrange(copy_of(getattr(captured, phase)), ctx), ctx)[0]


def ours(captured: Captured, world: int, budget: float | None) -> tuple[Row, list[int]]:
    """Run compiled_fsdp's passes; return the row, and each phase's simulated peak, which counts persistent bytes."""
    seconds = 0.0
    prices, peaks = [], []
    for phase in PHASES:
        ctx = captured.context(phase, PlanRules(budget=budget))
        gm = copy_of(getattr(captured, phase))
        start = time.perf_counter()
        gm = run_passes(GRAPH_PASSES, gm, ctx)
        seconds += time.perf_counter() - start
        assert ctx.planned.simulation is not None
        peaks.append(ctx.planned.simulation.peak)
        prices.append(priced(gm, captured, phase, world))
    return Row("compiled_fsdp", prices, seconds), peaks


def plain_row(captured: Captured, world: int, name: str) -> Row:
    seconds, prices = 0.0, []
    for phase in PHASES:
        start = time.perf_counter()
        gm = plain(captured, phase, name)
        seconds += time.perf_counter() - start
        prices.append(priced(gm, captured, phase, world))
    return Row(name, prices, seconds)


def plain(captured: Captured, phase: str, name: str) -> torch.fx.GraphModule:
    """Return the lowered graph with one of the fixed plans in ``PLAIN``."""
    ctx = captured.context(phase, PLAIN[name])
    gm = run_passes(GRAPH_PASSES, copy_of(getattr(captured, phase)), ctx)
    torch_plans.mark_units(gm, lambda read: unit_of(ctx.reads[read].name))
    return gm


def unit_of(name: str) -> str:
    """Return a parameter's unit, for example ``layers.3`` for ``layers.3.attention.wq.weight``."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])


def torch_row(captured: Captured, world: int, name: str, shape: Shape) -> Row:
    """Run one of torch's passes on the graph that has every collective alone."""
    seconds, prices = 0.0, []
    units: list[Any] = ["embedding", *(f"layers.{i}" for i in range(shape.layers)), ["norm", "head"]]
    for phase in PHASES:
        gm = plain(captured, phase, "unbucketed")
        start = time.perf_counter()
        gm = torch_plans.run(name, gm, units)
        seconds += time.perf_counter() - start
        prices.append(priced(gm, captured, phase, world))
    return Row(name, prices, seconds)


def priced(gm: torch.fx.GraphModule, captured: Captured, phase: str, world: int) -> Price:
    shards = {argument(node, "shard").name for node in calls(getattr(captured, phase), ops.unshard.default)}
    hardware = captured.context(phase).hardware
    return price(gm, hardware, world, backward=phase == "backward", shards=frozenset(shards), nodes=captured.nodes)


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: a line per setting, with each system's step time over the bound and its peak."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    yield f"| model | ranks | tokens | budget, GB | bound, ms | with latency | {' | '.join(systems)} |"
    yield "|---" * (6 + len(systems)) + "|"
    keys = ("model", "world_size", "seq", "budget_bytes")
    for (model, world, sequence, budget), rows in itertools.groupby(records, key=lambda r: tuple(r[k] for k in keys)):
        found = {row["system"]: row for row in rows}
        first = next(iter(found.values()))
        limit = "" if budget is None else f"{budget / 1e9:.1f}"
        cells = [f"{row['step_s'] / row['bound_s'] - 1:+.1%}, {row['peak_bytes'] / 1e9:.1f}" for row in found.values()]
        bound = f"{1e3 * first['bound_s']:.1f}"
        latency = f"{first['bound_latency_s'] / first['bound_s'] - 1:+.1%}"
        yield f"| {model} | {world} | {sequence} | {limit} | {bound} | {latency} | {' | '.join(cells)} |"


def summarise(records: list[dict[str, Any]]) -> None:
    """Print compiled_fsdp's distance to the bound, and the rows in which a system with no more memory is quicker."""
    mine = [r for r in records if r["system"] == "compiled_fsdp"]
    for title, rows in (("without a budget", [r for r in mine if r["budget_bytes"] is None]),
                        ("with a tight budget", [r for r in mine if r["budget_bytes"] is not None])):  # fmt: skip
        over = [r["step_s"] / r["bound_s"] - 1 for r in rows]
        latency = [r["step_s"] / r["bound_latency_s"] - 1 for r in rows]
        print(
            f"{title}: {statistics.mean(over):.2%} over the bound on average, {max(over):.2%} at most; over the bound "
            f"with latency {statistics.mean(latency):.2%} and {max(latency):.2%}"
        )
    lost = [
        (other["system"], row["model"], row["world_size"], row["seq"])
        for row in mine
        for other in records
        if all(other[key] == row[key] for key in ("model", "world_size", "seq", "budget_bytes"))
        and other["peak_bytes"] <= row["peak_bytes"]
        and other["step_s"] < row["step_s"] * (1 - 1e-9)
    ]
    print(f"rows in which a system with no more memory is quicker: {lost or 'none'}")


if __name__ == "__main__":
    main()
