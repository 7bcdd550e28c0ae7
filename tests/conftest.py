from collections.abc import Iterator

import pytest
import torch

from tests.harness.cases import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The processes behind all `@distributed` tests; fails the last test when one exits badly."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
