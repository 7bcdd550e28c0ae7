"""Where the tensors of a bucket lie, and the tables that tell a kernel.

A bucket is ``[world, row]`` elements of one dtype. In each rank's row stand the padded shards of all tensors, one after
the other. A tensor that is sharded on its first dimension holds a rank's shard in one piece, after those of the ranks
before; on another dimension, in pieces of ``inner`` elements with the other ranks' in between.
"""

# Why: docs/design.md, note N24

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ALIGNED = 16
"""Elements; pieces that begin at multiples of it are copied 16 bytes at a time."""
BLOCK = 4096
"""Elements that one program of a kernel copies."""
COLUMNS = ("offset", "numel", "inner", "limit", "first tile", "kind or place")
"""A line of the table that kernels read: see ``Segments``.

The last one is the tensor's dtype where it is packed, its place where it is unpacked.
"""
KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels read and write, in the order of their numbers in the table."""


@dataclass(frozen=True)
class Segments:
    """The tensors of a bucket.

    Attributes:
        offsets: where each one's padded shard begins in a row.
        numels: the shard's elements.
        inners: elements that lie together in the full tensor; ``numels`` where it is sharded on its first dimension.
        limits: elements of the tensor that is packed; after them there are zeros.
        row: elements of a rank's part of the bucket.
        world: how many ranks' parts it has.
    """

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    inners: tuple[int, ...]
    limits: tuple[int, ...]
    row: int
    world: int

    @property
    def strided(self) -> bool:
        """Whether a shard lies in pieces."""
        return any(0 < inner < numel for inner, numel in zip(self.inners, self.numels, strict=True))

    @property
    def places(self) -> tuple[int, ...]:
        """Where each full, padded tensor begins in the flat result of unpacking; one more: where that ends."""
        return places([self.world * numel for numel in self.numels])


def places(numels: Sequence[int]) -> tuple[int, ...]:
    """Where tensors begin that stand at multiples of ``ALIGNED`` elements in one; the last number is its size."""
    return tuple(itertools.accumulate((-(-n // ALIGNED) * ALIGNED for n in numels), initial=0))


def packed(
    numels: Sequence[int], inners: Sequence[int] | None = None, limits: Sequence[int] | None = None, world: int = 1
) -> Segments:
    """All tensors of a bucket, one after the other."""
    offsets = tuple(itertools.accumulate(numels, initial=0))
    full = [world * n for n in numels]
    return Segments(
        offsets[:-1], tuple(numels), tuple(inners or numels), tuple(limits or full), row=offsets[-1], world=world
    )


def shards_of(
    bucket: int, offsets: Sequence[int], numels: Sequence[int], inners: Sequence[int], world: int
) -> Segments:
    """Some tensors of a bucket of ``bucket`` elements."""
    limits = tuple(world * n for n in numels)
    return Segments(tuple(offsets), tuple(numels), tuple(inners), limits, row=bucket // world, world=world)


def inner_of(shard: Sequence[int], dim: int) -> int:
    """Elements of a padded shard of this shape that lie together in the full tensor, which is sharded on ``dim``."""
    return math.prod(shard[dim:])


@lru_cache(maxsize=4096)
def tables(
    segments: Segments, last: tuple[int, ...], block: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """The table, ``[tensors, columns]`` int64, and the tensor that each tile of ``block`` elements belongs to, int32.

    They are made once for a bucket, and for the stream that made them. ``last`` is the column that depends on whether
    the bucket is packed or unpacked.
    """
    tiles = [-(-numel // block) for numel in segments.numels]
    first = itertools.accumulate(tiles, initial=0)
    rows = list(
        zip(
            segments.offsets,
            segments.numels,
            map(_at_least_one, segments.inners),
            segments.limits,
            first,
            last,
            strict=False,
        )
    )
    owners = [i for i, count in enumerate(tiles) for _ in range(count)]
    return to_device(rows, torch.int64, device), to_device(owners, torch.int32, device)


@lru_cache(maxsize=4096)
def addresses(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The tensors' addresses on the device, ``[tensors]`` int64, by one asynchronous copy.

    There is no second copy where the allocator gives the same addresses, as it does for shards always and for gradients
    in most steps.
    """
    return to_device(list(pointers), torch.int64, device)


def to_device(rows: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor, which the host does not wait for.

    Raises:
        RuntimeError: while a CUDA graph is captured, which would make the copy later, and for itself alone.
    """
    if device.type != "cuda":
        return torch.tensor(rows, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "compiled_fsdp: a bucket's kernel met tensors that it does not know, inside of a CUDA graph's capture. Run "
            "the same step with the same tensors on the capturing stream first, or compile with options={'kernels': "
            "False}."
        )
    return torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def _at_least_one(inner: int) -> int:
    return max(inner, 1)  # of an empty tensor: kernels divide by it
