"""Plans as plain data."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from compiled_fsdp.passes.plan import Bucket, GraphPlan, Read

counts = st.integers(0, 2**62)
buckets = st.builds(Bucket, st.sampled_from(["gather", "reduce"]), st.lists(counts).map(tuple), counts, counts)
plans = st.builds(GraphPlan, st.sampled_from(["forward", "backward", "inference"]), st.lists(buckets).map(tuple))


@given(plans)
def test_json_round_trip(plan):
    """Equal and hashable as before, as the agreed plan is compared with this rank's."""
    again = GraphPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert isinstance(json.loads(plan.to_json()), dict)


def read(
    size: tuple[int, ...] = (5, 3), *, world: int = 2, itemsize: int = 4, keep: bool = False, trainable: bool = True
) -> Read:
    return Read(3, "blocks.1.weight", 0, world, size, "float32", itemsize, 2, 1, keep, trainable)


@pytest.mark.parametrize(
    ("size", "world", "itemsize", "expected"),
    [((5, 3), 2, 4, 72), ((5, 3), 1, 4, 60), ((5, 3), 4, 2, 48), ((1,), 8, 4, 32), ((2, 3, 4), 2, 8, 192)],
)
def test_bytes_are_of_the_full_padded_parameter(size, world, itemsize, expected):
    assert read(size, world=world, itemsize=itemsize).bytes == expected


def test_what_has_to_agree_says_nothing_of_names():
    """Equal layers and all ranks give the same line."""
    assert read().signature_line() == "float32[5, 3] mesh 0 of 2, bucket 2 position 1, resharded, float32 avg"
    assert read(keep=True, trainable=False).signature_line().endswith("kept, frozen")


@pytest.mark.parametrize("change", [{"size": (5, 4)}, {"world": 4}, {"keep": True}, {"trainable": False}])
def test_what_has_to_agree_shows_every_difference(change):
    arguments = {"size": (5, 3), "world": 2, "keep": False, "trainable": True}
    assert read(**arguments).signature_line() != read(**{**arguments, **change}).signature_line()


def test_text_for_people():
    plan = GraphPlan(
        "forward",
        (Bucket("gather", (3,), 0, 72), Bucket("reduce", (3,), 1, 7_200, transport="all_to_all", at="grad 3")),
    )
    assert str(plan) == (
        "forward:\n"
        "  0: gather [3] 72 bytes, mesh 0, flat, at start\n"
        "  1: reduce [3] 7,200 bytes, mesh 1, flat, all_to_all, at grad 3"
    )
