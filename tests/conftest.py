import functools
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.harness.cases import Pool

# The number of test files that share processes. With fewer files, more work is repeated in new processes; with more
# files, there are too few groups for many workers.
FILES = 4

# Like in torch's CI: an op whose result shares memory with an input without saying so is an error, not a warning.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

# A slow machine makes no test red. (With CI=1 hypothesis has no deadline by itself.)
settings.register_profile("any machine", settings(), deadline=None)
settings.load_profile("any machine")

pool = Pool()
_began = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=math.inf, help="skip tests that would begin after so many")


def pytest_xdist_auto_num_workers() -> int:
    """Return half as many workers as cores, because two ranks are busy at a time. At least two, because ranks wait for
    each other, and some tests have no ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores // 2)


def group_of(item: pytest.Item) -> str:
    """Return the group of a test. Files of a group run in one worker and share processes.

    They are neighbours in a folder. The groups do not depend on which tests are asked for.
    """
    files = _files_of(item.path.parent)
    number = files.index(item.path) // FILES if item.path in files else item.path.name
    return f"{item.path.parent} {number}"


@functools.cache
def _files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_*.py"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


@pytest.fixture
def ranks() -> Pool:
    """The processes of the `@distributed` tests in a group of files."""
    return pool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fail the group's last test if one of the group's processes exits badly."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem) != group_of(item):
            pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Take pytest's handlers from the logger of torch's structured traces, because torch writes these if it has one.

    pytest gives one to each logger that does not propagate. Traces take time and hide what a test has logged.
    """
    traces = logging.getLogger("torch.__trace")
    for handler in list(traces.handlers):
        if type(handler).__module__ == "_pytest.logging":
            traces.removeHandler(handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if time.monotonic() - _began > 60 * item.config.getoption("minutes"):
        pytest.skip("no time is left (--minutes)")
