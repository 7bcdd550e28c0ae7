"""Pytest tests that run on several ranks. Tests of neighbouring files with the same world size share processes."""

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.harness.spawn import TIMEOUT, Ranks

Case = Callable[..., None]


def variants(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return `values` as parameters of a test. All except those in `quick` are marked `more`, so that `make test` runs
    `quick` alone.

    A tuple holds the values of several arguments. For example, `@pytest.mark.parametrize("way", variants(WAYS,
    "eager"))` leaves the compiled variant to `make test-all`.
    """
    values = list(values)
    missing = [value for value in quick if value not in values]
    assert not missing, f"these are not among the values: {missing}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=[] if value in quick else pytest.mark.more
        )
        for value in values
    ]


def distributed(
    world_size: int = 2, *, reset: bool = False, timeout: float = TIMEOUT
) -> Callable[[Case], Callable[..., None]]:
    """Make a pytest test of a function `test_x(rank, world_size, ...)` that runs in `world_size` processes.

    Tests of a few files with the same world size share their processes and the code compiled there, like models that
    follow each other in a program. `reset=True` is for a test that counts compiles, reads their logs, or changes
    torch's global switches: compiled code is dropped before it and after it.

    Further arguments come from parametrization or from fixtures whose values pickle (`tmp_path`), the same on every
    rank. The test fails with each rank's traceback when a rank raises, dies or takes over `timeout` seconds; the
    next test then gets new processes. Fixtures never run on the ranks.
    """

    def decorate(case: Case) -> Callable[..., None]:
        @functools.wraps(case)
        def test(ranks: "Pool", **arguments: Any) -> None:
            __tracebackhide__ = True
            ranks.get(world_size).run(case, timeout=timeout, reset=reset, **arguments)

        given = list(inspect.signature(case).parameters.values())[2:]
        by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in given]
        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *by_name])
        return pytest.mark.timeout(0)(test)  # Ranks has limits of its own for each step, and reports more

    return decorate


# A process group has three or more threads for as long as its process lives, and they wake up a hundred times a second.
# With more threads than this, idle ranks would take half of a small machine.
MOST_THREADS = 90


class Pool:
    """The processes of a few test files, by world size. They start when a test first asks for them."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], Ranks] = {}

    def get(self, world_size: int, purpose: str = "") -> Ranks:
        """Return processes that are ready; new ones after a failure, or if tests have left many process groups behind.

        A failure ends only the processes of the same ``purpose``.
        """
        key = world_size, purpose
        ranks = self._ranks.get(key)
        if ranks is not None and ranks.alive and ranks.threads > MOST_THREADS:
            ranks.close()
        if ranks is None or not ranks.alive:
            ranks = self._ranks[key] = Ranks(world_size)
        return ranks

    def close(self) -> None:
        """End all processes; `get` starts new ones. Raises RankFailure when one ends badly."""
        with ExitStack() as stack:
            for ranks in self._ranks.values():
                stack.callback(ranks.close)
            self._ranks = {}
