"""A short soak, of which ``python -m tests.soak`` does a long one: nothing grows, and every loss is FSDP2's."""

import pytest
import torch

from tests.soak import Counts, growth, run


@pytest.mark.more
def test_nothing_grows_in_three_rounds():
    steps, found = run(240, 60)
    assert steps == 240
    if torch.__version__ < "2.13":  # it remembers how DTensors of AdamW are sharded, anew in each step
        found = [line for line in found if "objects grew" not in line]
    assert not found, "\n".join(found)


def _counts(**values: list[int]) -> list[Counts]:
    steady = dict.fromkeys(Counts.__dataclass_fields__, 1000)
    return [Counts(**steady | {name: of[i] for name, of in values.items()}) for i in range(4)]


def test_what_counts_as_growth():
    assert growth(_counts()) == []
    assert growth(_counts(tensors=[5, 7, 6, 5])) == []
    assert growth(_counts(tensors=[5, 15, 25, 35])) == ["tensors grew from 5 to 35: [5, 15, 25, 35]"]
    assert growth(_counts(memory=[0, 10**6, 2 * 10**6, 3 * 10**6])) == []
    assert growth(_counts(memory=[0, 10**7, 2 * 10**7, 3 * 10**7]))[0].startswith("memory grew")
    assert growth(_counts()[:1]) == ["there are fewer than two counts"]
