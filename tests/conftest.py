import os
from collections.abc import Iterator

import pytest
import torch

from tests.harness.cases import Pool


def pytest_xdist_auto_num_workers() -> int:
    """Half as many workers as cores, since two ranks are busy at a time; 0 for one worker, which needs no process of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // 2 if cores >= 4 else 0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """The processes behind the `@distributed` tests of one file; fails the last of them when one exits badly."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
