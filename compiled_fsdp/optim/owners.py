"""Which rank computes with which whole matrix, and in which round: plain data, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

Round = tuple[tuple[int, ...], ...]
"""For each rank, the matrices that it owns in this round, as their places in the caller's list."""

ROUND_BYTES = 4 << 20
"""A round has at least so many bytes, if there are enough matrices: small messages would cost latency."""


def owners(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide matrices among ranks so that the ranks work about equally long.

    The most expensive matrix that is left goes to the rank with the least work: Graham's "longest processing time
    first" (1969). The rank with the most work has at most 4/3 of the least possible.

    For example, ``owners([3, 1, 2, 2], 2)`` is ``[[0, 1], [2, 3]]``.

    Args:
        costs: of each matrix, in any unit.
        ranks: how many.

    Returns:
        For each rank its matrices, the most expensive first.
    """
    work = [0.0] * ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    for matrix in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(ranks), key=lambda rank: (work[rank], rank))
        work[owner] += costs[matrix]
        found[owner].append(matrix)
    return found


def rounds(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[Round]:
    """Divide matrices among ranks, and each rank's matrices into rounds; one all-to-all sends a round.

    In round k each rank gets its k-th matrix, or several if they are small. So all ranks compute at the same time while
    the next round is sent.

    Args:
        costs: of each matrix, in any unit.
        sizes: the bytes of each matrix.
        ranks: how many.
    """
    each = owners(costs, ranks)
    found: list[Round] = []
    begin, size = 0, 0
    longest = max(map(len, each))
    for place in range(longest):
        size += sum(sizes[own[place]] for own in each if place < len(own))
        if size >= ROUND_BYTES or place == longest - 1:
            found.append(tuple(tuple(own[begin : place + 1]) for own in each))
            begin, size = place + 1, 0
    return found
