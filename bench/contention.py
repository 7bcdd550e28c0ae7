"""Measure what a plan loses if the hardware's contention was assumed wrong.

    python -m bench.contention [--quick] [--jobs N]

For each setting of ``bench.plan_quality`` without a budget, forward and backward are planned with contention as it is,
with half of it, with one and a half times as much, and with none. Each plan is simulated with contention as it is. A
loss is a plan's time over the time of the plan for the true contention, minus 1. It may be negative, because no search
finds the best plan always. Nothing runs on a device.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.capture import SHAPES, capture, fake_group
from bench.plan_quality import PHASES, SEQUENCES, WORLDS, tasks_of
from bench.tables import table
from compiled_fsdp.passes.plan.choose import PlanRules, choose
from compiled_fsdp.passes.plan.simulate import makespan
from compiled_fsdp.passes.plan.tasks import Schedule, Tasks
from compiled_fsdp.tools.cli.shapes import Shape

TIMES = (0.5, 1.5, 0.0)
"""What contention is multiplied by when a plan is made."""
RULES = PlanRules()


@dataclass(frozen=True)
class Loss:
    """One setting: its step, and what each plan for a wrong contention loses.

    Attributes:
        setting: the model, the number of ranks, and the number of tokens.
        step: seconds of the plan for the true contention.
        losses: for each of ``TIMES``, the share by which that plan takes longer.
        changed: for each of ``TIMES``, whether the plan is another one.
    """

    setting: tuple[str, int, int]
    step: float
    losses: tuple[float, ...]
    changed: tuple[bool, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model and world size 8 only")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    arguments = parser.parse_args()
    shapes, worlds = (SHAPES[-1:], WORLDS[:1]) if arguments.quick else (SHAPES, WORLDS)
    cases = list(itertools.product(shapes, worlds, SEQUENCES.values()))
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        found = pool.map(measured, cases, chunksize=1)
    print("\n".join([*report(found)]))


def measured(case: tuple[Shape, int, int]) -> Loss:
    """Plan one setting with each contention."""
    shape, world, sequence = case
    torch.set_num_threads(1)
    with fake_group(world):
        captured = capture(shape, world, sequence)
        return losses((shape.name, world, sequence), [tasks_of(captured, phase) for phase in PHASES])


def losses(setting: tuple[str, int, int], graphs: Sequence[Tasks]) -> Loss:
    """Compare the plans of a step's graphs."""
    true = [_planned(tasks, 1.0) for tasks in graphs]
    step = _seconds(graphs, true)
    wrong = [[_planned(tasks, times) for tasks in graphs] for times in TIMES]
    return Loss(
        setting,
        step,
        tuple(_seconds(graphs, plans) / step - 1 for plans in wrong),
        tuple(plans != true for plans in wrong),
    )


def _planned(tasks: Tasks, times: float) -> Schedule:
    return choose(tasks.with_contention(times), RULES)[0]


def _seconds(graphs: Sequence[Tasks], plans: Sequence[Schedule]) -> float:
    return sum(makespan(tasks, plan) for tasks, plan in zip(graphs, plans, strict=True))


def report(found: Sequence[Loss]) -> list[str]:
    """Return a Markdown table, and a line for each of ``TIMES``."""
    head = ["model", "ranks", "tokens", "step, ms", *(f"{times:g} times" for times in TIMES)]
    rows = [
        [*map(str, one.setting), f"{1e3 * one.step:.1f}", *(f"{loss:+.2%}" for loss in one.losses)] for one in found
    ]
    lines = [table(head, rows)]
    for place, times in enumerate(TIMES):
        changed = sum(one.changed[place] for one in found)
        worst = max(one.losses[place] for one in found)
        lines.append(
            f"planned with {times:g} times the contention: {changed} of {len(found)} steps have another plan, which "
            f"takes at most {worst:.2%} longer"
        )
    return lines


if __name__ == "__main__":
    main()
