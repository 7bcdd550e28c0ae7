"""Repeated runs of a sequence."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_fsdp.passes.repeats import Repeat, repeats


@pytest.mark.parametrize(
    ("sequence", "least", "expected"),
    [
        ("", 1, []),
        ("abc", 1, []),
        ("abcXabcYabc", 2, [Repeat(3, (0, 4, 8), 3)]),
        ("abcXabcYabc", 4, []),
        ("abcabcabcabc", 2, [Repeat(3, (0, 3, 6, 9), 3)]),  # and not abcabc twice
        ("aaaa", 2, [Repeat(2, (0, 2), 2)]),
        ("abcdeXabcdeYfghZfgh", 2, [Repeat(5, (0, 6), 5), Repeat(3, (12, 16), 3)]),
    ],
)
def test_repeats(sequence: str, least: int, expected: list[Repeat]):
    assert repeats([*map(ord, sequence)], [1] * len(sequence), least) == expected


def test_weights():
    """Of two runs the heavier one comes first, although it is shorter."""
    sequence = [1, 2, 3, 9, 1, 2, 3, 8, 4, 7, 4]
    weights = [1, 1, 1, 1, 1, 1, 1, 1, 5, 1, 5]
    assert repeats(sequence, weights, 3) == [Repeat(1, (8, 10), 5), Repeat(3, (0, 4), 3)]
    assert repeats(sequence, weights, 4) == [Repeat(1, (8, 10), 5)]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_random_sequences(sequence: list[int], least: int):
    found = repeats(sequence, [1] * len(sequence), least)
    places = [place for run in found for start in run.starts for place in range(start, start + run.length)]
    assert len(places) == len(set(places)), "runs have a place in common"
    for run in found:
        assert run.length >= least
        assert len({tuple(sequence[start : start + run.length]) for start in run.starts}) == 1
        assert len(run.starts) > 1
    assert all(before.saved >= after.saved for before, after in pairwise(found))
    if not found:
        assert not any(
            sequence[a : a + least] == sequence[b : b + least]
            for a in range(len(sequence) - least + 1)
            for b in range(a + least, len(sequence) - least + 1)
        ), "a run was missed"


def test_layers_with_something_between_some_of_them():
    """Most of 126 equal layers, of 50 calls each, are one function: the time is that of a few sorts."""
    layer = [*range(50)]
    sequence: list[int] = []
    for number in range(126):
        sequence += [*layer[:20], 1000 + number, *layer[20:]]
    (only,) = repeats(sequence, [1] * len(sequence), 12)
    assert (only.length, len(only.starts)) == (50, 125)  # from one of the numbers between to the next
