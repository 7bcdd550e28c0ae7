"""Estimates of several settings, one after another or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.estimate import Estimate, Setting, estimate

Attempts = Callable[[Sequence[Setting]], Iterator[Estimate | OverBudget]]
"""Plans settings, and yields the plan of each one in order, or the error that no plan fits into its budget."""


def attempt(setting: Setting) -> Estimate | OverBudget:
    """Plan a step, and return the error if no plan fits into its budget."""
    try:
        return estimate(setting)
    except OverBudget as error:
        return error


def attempts(settings: Sequence[Setting], jobs: int) -> Iterator[Estimate | OverBudget]:
    """Plan settings in up to ``jobs`` processes at once, because each plan runs on one core."""
    jobs = min(jobs, len(settings))
    if jobs <= 1:
        yield from map(attempt, settings)
        return
    # not a fork, because torch has threads
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(attempt, settings)
