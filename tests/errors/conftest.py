from collections.abc import Iterator

import pytest

from tests.harness.fake import fake_group


@pytest.fixture
def rank_0_of_4(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process is rank 0 of 4 that do not exist, but for tests on real ranks."""
    if "ranks" in request.fixturenames:
        yield
        return
    with fake_group(4):
        yield
