"""Ops that copy into a flat bucket and out of it on the CPU: torch's own operations, as one op for each bucket.

    cat_bucket    tensors, side by side                                   ->  one tensor
    split_bucket  a bucket with a row for each rank [rows * row]          ->  by tensor [rows, numel]
    sum_bucket    what an all-to-all left, [num_pieces * row], one a rank ->  by tensor the sum [1, numel]

Code generated for these copies has every tensor's place in its text, so that no two buckets share a kernel, nor do
kernels that read a parameter out of its bucket. Inductor generates none for an op that it does not know.
"""

# Why: docs/design.md, note N57

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
_lib.define("cat_bucket(Tensor[] tensors, int dim) -> Tensor")
_lib.define("split_bucket(Tensor bucket, int[] numels, int rows) -> Tensor[]")
_lib.define("sum_bucket(Tensor bucket, int[] numels, int num_pieces, int rank, bool average) -> Tensor[]")


def _split(bucket: Tensor, numels: Sequence[int], rows: int) -> list[Tensor]:
    # no view of each: it takes as long as the copy of a small one
    return torch.ops.aten.split_with_sizes_copy.default(bucket.view(rows, -1), numels, 1)


def _sum(bucket: Tensor, numels: Sequence[int], num_pieces: int, rank: int, average: bool) -> list[Tensor]:
    return _split(add_in_ring_order(bucket.view(num_pieces, -1), rank, average=average), numels, 1)


def add_in_ring_order(pieces: Tensor, rank: int, *, average: bool) -> Tensor:
    """The sum or average of pieces ``[num_pieces, n]``, in the order of gloo's ring.

    That is from the rank before this one (``rank``) downwards, so that nearly all sums are bit for bit those of its
    reduce-scatter.
    """
    num_pieces = pieces.shape[0]
    if num_pieces > MOST_ADDED:
        total = pieces.sum(0)
    else:
        total = pieces[(rank - 1) % num_pieces]
        for after in range(2, num_pieces + 1):
            total = total + pieces[(rank - after) % num_pieces]
    return total / num_pieces if average else total


MOST_ADDED = 16
"""Ranks whose pieces are added one by one; with more, graphs would be mostly additions."""


def _register(name: str, run: Any, fake: Any) -> None:
    _lib.impl(name, run, "CPU")
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


_register("cat_bucket", torch.cat, torch.cat)
_register(
    "split_bucket",
    _split,
    lambda bucket, numels, rows: [bucket.new_empty(rows, numel) for numel in numels],
)
_register(
    "sum_bucket",
    _sum,
    lambda bucket, numels, num_pieces, rank, average: [bucket.new_empty(1, numel) for numel in numels],
)
