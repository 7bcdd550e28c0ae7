import functools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.cases import Pool

# Files that share processes. With fewer, more is done for the first time in a process; with more, there are too few
# groups for many workers.
FILES = 4

# As torch has it in CI: an op whose result is its input's memory, and does not say so, is an error and no warning.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

pool = Pool()
_began = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=math.inf, help="skip tests that would begin after so many")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many workers as cores, since two ranks are busy at a time. Two at least: ranks wait for each other, and
    some tests have none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores // 2)


def group_of(item: pytest.Item) -> str:
    """The files that run in one worker and share processes: neighbours in a folder, whatever of it is asked for."""
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
    """The processes of the `@distributed` tests of a group of files."""
    return pool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The group's last test fails where one of its processes exits badly."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem) != group_of(item):
            pool.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if time.monotonic() - _began > 60 * item.config.getoption("minutes"):
        pytest.skip("no time is left (--minutes)")
