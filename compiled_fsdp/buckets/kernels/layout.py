"""Where the tensors of a bucket lie, and the tables that tell a kernel.

A bucket is ``[world, row]`` elements of one dtype. In each rank's row stand the padded shards of all tensors, each from
a multiple of ``ALIGNED`` elements on, as the next rank's row does. A tensor that is sharded on its first dimension
holds a rank's shard in one piece, after those of the ranks before; on another dimension, in pieces of ``inner``
elements with the other ranks' in between.
"""

# Why: docs/design.md, note N24

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

ALIGNED = 16
"""Elements; what begins at multiples of it is copied 16 bytes at a time, by NCCL too."""
BLOCKS = (4096, 1024, 256)
"""Elements that one program of a kernel copies: the first of which half have work on average, or the last."""
COLUMNS = ("at", "start", "numel", "inner", "limit", "tensor or place", "kind")
"""A line of the table that kernels read, one for each block of each tensor's shard.

``at`` is where the block begins in a row, ``start`` where in the shard; then those of ``Segments``; the tensor that is
packed, or where in the flat result it is unpacked to; its dtype's place in ``KINDS``, where it is packed.
"""
KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels read and write, in the order of their numbers in the table."""


@dataclass(frozen=True, eq=False)
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
    _tables: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def strided(self) -> bool:
        """Whether a shard lies in pieces."""
        return any(0 < inner < numel for inner, numel in zip(self.inners, self.numels, strict=True))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each full, padded tensor begins in the flat result of unpacking; one more: where that ends."""
        return places([self.world * numel for numel in self.numels])

    @cached_property
    def block(self) -> int:
        """The one of ``BLOCKS`` that suits the shards."""
        total = sum(self.numels)
        return next((n for n in BLOCKS if 2 * total >= n * sum(-(-numel // n) for numel in self.numels)), BLOCKS[-1])

    def table(self, kinds: tuple[int, ...] | None, block: int, device: torch.device, stream: int) -> Tensor:
        """The table, ``[blocks, columns]`` int64, made once for each stream.

        Args:
            kinds: where the tensors are packed: the numbers of their dtypes; one alone is that of all.
            block: elements of a block.
        """
        key = kinds, block, device, stream
        if (table := self._tables.get(key)) is None:
            table = self._tables[key] = to_device(self._lines(kinds, block), torch.int64, device)
        return table

    def _lines(self, kinds: tuple[int, ...] | None, block: int) -> list[tuple[int, ...]]:
        count = len(self.numels)
        last = self.places if kinds is None else range(count)
        of = [0] * count if kinds is None else kinds * count if len(kinds) == 1 else kinds
        # kernels divide by ``inner``, which is 0 in an empty tensor
        each = zip(self.offsets, self.numels, self.inners, self.limits, last, of, strict=False)
        return [
            (offset + start, start, numel, max(inner, 1), limit, tensor, kind)
            for offset, numel, inner, limit, tensor, kind in each
            for start in range(0, numel, block)
        ]


def aligned(numel: int) -> int:
    """``numel`` rounded up to a multiple of ``ALIGNED``."""
    return -(-numel // ALIGNED) * ALIGNED


def places(numels: Sequence[int]) -> tuple[int, ...]:
    """Where tensors begin that stand at multiples of ``ALIGNED`` elements in one; the last number is its size."""
    return tuple(itertools.accumulate(map(aligned, numels), initial=0))


@lru_cache(maxsize=4096)  # a step has the same buckets as the one before
def packed(
    numels: tuple[int, ...],
    inners: tuple[int, ...] | None = None,
    limits: tuple[int, ...] | None = None,
    world: int = 1,
) -> Segments:
    """All tensors of a bucket, one after the other."""
    *offsets, row = places(numels)
    return Segments(tuple(offsets), numels, inners or numels, limits or tuple([world * n for n in numels]), row, world)


@lru_cache(maxsize=4096)
def shards_of(
    bucket: int, offsets: tuple[int, ...], numels: tuple[int, ...], inners: tuple[int, ...], world: int
) -> Segments:
    """Some tensors of a bucket of ``bucket`` elements."""
    return Segments(offsets, numels, inners, tuple([world * n for n in numels]), bucket // world, world)


def inner_of(shard: Sequence[int], dim: int) -> int:
    """Elements of a padded shard of this shape that lie together in the full tensor, which is sharded on ``dim``."""
    return math.prod(shard[dim:])


@lru_cache(maxsize=4096)
def addresses(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The tensors' addresses on the device, ``[tensors]`` int64, by one asynchronous copy.

    There is no second copy where the allocator gives the same addresses, as it does for shards always and for gradients
    in most steps.
    """
    return to_device(list(pointers), torch.int64, device)


def current_stream(tensor: Tensor) -> int:
    """The stream that the tensor's device runs kernels on; 0 on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


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
