"""Estimates of several settings, one after another or in several processes."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.estimate import Estimate, estimates
from compiled_fsdp.tools.cli.setting import Setting

Attempts = Callable[[Sequence[Setting]], Iterator[Estimate | OverBudget]]
"""Plans settings, and yields the plan of each one in order, or the error that no plan fits into its budget."""


def attempts(settings: Sequence[Setting], jobs: int) -> Iterator[Estimate | OverBudget]:
    """Plan settings in up to ``jobs`` processes at once, because each plan runs on one core.

    The model is captured once for settings that differ only in their budgets, unless a process would have nothing to
    do.
    """
    alike: list[list[int]] = []  # their numbers
    for number, setting in enumerate(settings):
        of_others = (others for others in alike if replace(settings[others[0]], budget=setting.budget) == setting)
        others = next(of_others, None)
        if others is None:
            alike.append([number])
        else:
            others.append(number)
    shares = max(1, jobs // max(1, len(alike)))
    parts = [numbers[i::shares] for numbers in alike for i in range(min(shares, len(numbers)))]
    plans = _plans([(settings[part[0]], [settings[number].budget for number in part]) for part in parts], jobs)
    found: dict[int, Estimate | OverBudget] = {}
    done = zip(parts, plans, strict=True)
    for number in range(len(settings)):
        while number not in found:
            part, planned = next(done)
            found |= zip(part, planned, strict=True)
        yield found[number]


def _plans(parts: Sequence[tuple[Setting, Sequence[float | None]]], jobs: int) -> Iterator[list[Estimate | OverBudget]]:
    if min(jobs, len(parts)) <= 1:
        yield from itertools.starmap(estimates, parts)
        return
    # not a fork, because torch has threads
    with ProcessPoolExecutor(min(jobs, len(parts)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(estimates, *zip(*parts, strict=True))
