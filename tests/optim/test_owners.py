"""Which rank owns which matrix, and in which round."""

import itertools

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.optim.owners import ROUND_BYTES, owners, rounds

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@given(COSTS, st.integers(1, 3))
def test_each_matrix_has_one_owner_and_the_work_is_balanced(costs, ranks):
    found = owners(costs, ranks)
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    best = min(
        max(sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == r) for r in range(ranks))
        for chosen in itertools.product(range(ranks), repeat=len(costs))
    )
    assert max(sum(costs[i] for i in own) for own in found) <= 4 / 3 * best


@given(COSTS, st.integers(1, 3), st.integers(1, ROUND_BYTES))
def test_rounds_have_all_matrices_and_are_large_enough(costs, ranks, size):
    found = rounds(costs, [size] * len(costs), ranks)
    assert sorted(i for each in found for own in each for i in own) == list(range(len(costs)))
    assert all(size * sum(map(len, each)) >= ROUND_BYTES for each in found[:-1])


def test_rounds_of_a_transformers_layers():
    """Three matrices in each of four layers, of which two are four times as large; two ranks."""
    sizes = [4 << 20, 16 << 20, 16 << 20] * 4
    assert_expected_inline(
        "\n".join(map(str, rounds(sizes, sizes, 2))),
        """\
((1,), (2,))
((4,), (5,))
((7,), (8,))
((10,), (11,))
((0,), (3,))
((6,), (9,))""",
    )
