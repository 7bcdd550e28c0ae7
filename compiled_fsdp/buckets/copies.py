"""Ops that copy tensors into a flat bucket and out of it on the CPU: one op per bucket, torch's own operations inside.

    cat_bucket    tensors                                                 ->  one tensor: all of them side by side
    split_bucket  a bucket with a row for each rank, [rows * row]         ->  for each tensor [rows, numel]
    sum_bucket    a bucket after an all-to-all, [num_pieces * row]        ->  for each tensor the sum [1, numel]

Inductor does not know these ops, so it generates no code for them. Generated copies would contain every tensor's place
in the bucket, so no two buckets could share a kernel. The same holds for kernels that read a parameter from its bucket.
"""

# Why: docs/design/graphs-and-passes.md, "On the CPU one op copies a whole bucket"

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
    # copies, not views: a view takes as long as the copy of a small tensor
    return torch.ops.aten.split_with_sizes_copy.default(bucket.view(rows, -1), numels, 1)


def _sum(bucket: Tensor, numels: Sequence[int], num_pieces: int, rank: int, average: bool) -> list[Tensor]:
    return _split(add_in_ring_order(bucket.view(num_pieces, -1), rank, average=average), numels, 1)


def add_in_ring_order(pieces: Tensor, rank: int, *, average: bool) -> Tensor:
    """Sum or average the addends ``pieces``, ``[num_pieces, n]`` with one row per rank, in the order of gloo's ring.

    The order begins with the rank before this rank (``rank``) and goes downwards, so that nearly all sums equal those
    of gloo's reduce-scatter bit for bit. More than ``MOST_ADDED`` addends are added in torch's own order.
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
"""The most addends that are added one by one. With more of them, a graph would consist mostly of additions."""


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
