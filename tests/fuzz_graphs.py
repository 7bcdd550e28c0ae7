"""Fuzz passes and planner: check the properties in tests/passes on many random graphs, tasks and plans.

    python -m tests.fuzz_graphs --cases 100000 [--seed 0] [--minutes 60] [--only WORD ...] [--list]

The properties take turns. Each gets a batch of cases from one seed, then a batch from the next seed, until there are as
many cases as asked for, or the time is up. Hypothesis shrinks a failing case, which is printed with its seed; later
batches of the same property look for further faults. Exits with 1 if a property failed. No processes and no compiler
are needed: one core checks about twenty graphs a second.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch

from tests.passes import random_cases

MODULES = (
    "tests.passes.test_random_graphs",
    "tests.passes.test_random_regions",
    "tests.passes.test_random_joint",
    "tests.passes.test_plan",
    "tests.passes.plan.test_random_plans",
    "tests.passes.plan.test_simulate",
    "tests.passes.plan.test_search",
    "tests.passes.plan.test_sensitivity",
    "tests.passes.plan.test_bound",
    "tests.passes.plan.test_bucketing",
    "tests.passes.plan.test_plain",
    "tests.passes.plan.test_prefetch_lists",
)


class Property:
    """A test on random cases that counts its cases."""

    def __init__(self, module: str, name: str, test: Callable[[], None]) -> None:
        self.name = f"{module.removeprefix('tests.passes.')}.{name}"
        self.test = test
        self.cases = 0
        self.seconds = 0.0
        inner = test.hypothesis.inner_test  # type: ignore[attr-defined]

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.cases += 1
            return inner(*args, **kwargs)

        test.hypothesis.inner_test = counted  # type: ignore[attr-defined]

    def run(self, seed: int) -> str:
        """Run a batch; return the shrunk failure as text, or "" if there is none."""
        start = time.monotonic()
        try:
            hypothesis.seed(seed)(self.test)()
        except Exception as error:
            return "".join(traceback.format_exception(error, limit=-4))
        finally:
            self.seconds += time.monotonic() - start
        return ""


def properties(words: list[str]) -> Iterator[Property]:
    """Yield the properties whose names have one of ``words``; all properties if there are no words."""
    for module in MODULES:
        for name, test in vars(importlib.import_module(module)).items():
            if (
                name.startswith("test_")
                and hypothesis.is_hypothesis_test(test)
                and not inspect.signature(test).parameters
            ):
                found = Property(module, name, test)
                if not words or any(word in found.name for word in words):
                    yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all properties together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first batches (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="at most (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="properties whose names have one of these"
    )
    parser.add_argument("--no-shrink", action="store_true", help="print a failing case as it was drawn")
    parser.add_argument("--list", action="store_true", help="the properties' names, and nothing else")
    options = parser.parse_args()
    random_cases.load(shrink=not options.no_shrink)
    torch.set_num_threads(1)
    asked = list(properties(options.only))
    if options.list:
        print("\n".join(found.name for found in asked))
        return 0
    failed, seed, end = Counter[str](), options.seed, time.monotonic() + 60 * options.minutes
    while asked and time.monotonic() < end and sum(found.cases for found in asked) < options.cases:
        for found in asked:
            if wrong := found.run(seed):
                failed[found.name] += 1
                print(f"\n---- {found.name}, seed {seed}\n{wrong}", flush=True)
        done = sum(found.cases for found in asked)
        print(f"seed {seed}: {done:,} cases, {failed.total()} failures", flush=True)
        seed += 1
    print(table(asked, failed))
    return 1 if failed else 0


def table(asked: list[Property], failed: Counter[str]) -> str:
    """Return a Markdown table with the cases, seconds and failures of each property."""
    lines = ["| property | cases | seconds | failures |", "|---|---|---|---|"]
    lines += [f"| {p.name} | {p.cases:,} | {p.seconds:.0f} | {failed[p.name]} |" for p in asked]
    return "\n".join(
        [*lines, f"| all | {sum(p.cases for p in asked):,} | {sum(p.seconds for p in asked):.0f} | {failed.total()} |"]
    )


if __name__ == "__main__":
    sys.exit(main())
