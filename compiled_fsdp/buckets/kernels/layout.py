"""The places of tensors in a bucket, and the tables from which a kernel reads them.

A bucket is ``[world, row]`` elements of one dtype. Each rank's row holds the padded shards of all tensors. Each shard
begins at a multiple of ``ALIGNED`` elements, and so does each row. In a tensor that is sharded on its first dimension a
rank's shard is one contiguous run, behind the shards of the ranks before it. In a tensor that is sharded on another
dimension a shard consists of several runs of ``inner`` elements, with the runs of the other ranks in between.
"""

# Why: docs/design/graphs-and-passes.md, "One Triton kernel copies a whole bucket"

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

ALIGNED = 16
"""Elements. Memory that begins at a multiple of it is copied 16 bytes at a time, by the kernels and by NCCL."""
BLOCKS = (4096, 1024, 256)
"""The choices for the elements that one program of a kernel copies (``Segments.block``)."""
COLUMNS = ("at", "start", "numel", "inner", "limit", "tensor or place", "kind")
"""The columns of the table that kernels read; it has a line for each block of each tensor's shard.

``at`` and ``start`` are the places at which the block begins in a row and in the shard. ``numel``, ``inner`` and
``limit`` are the tensor's in ``Segments``. Then comes the number of the tensor to pack, or the place in the flat result
to unpack to. ``kind`` is the number of the dtype in ``KINDS`` if the tensor is packed.
"""
KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that kernels read and write, in the order of their numbers in the table."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The places of a bucket's tensors. The tuples have an entry for each tensor.

    Attributes:
        offsets: the element at which the padded shard begins in a row.
        numels: the padded shard's elements.
        inners: the elements of a run; equal to ``numels`` if the tensor is sharded on its first dimension.
        limits: the elements of the tensor to pack. The kernel packs zeros behind them.
        row: elements of a row, which is one rank's part of the bucket.
        world: the number of rows.
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
        """Whether a shard consists of several runs."""
        return any(0 < inner < numel for inner, numel in zip(self.inners, self.numels, strict=True))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each full, padded tensor in the flat result of unpacking, and at the end the result's size."""
        return places([self.world * numel for numel in self.numels])

    @cached_property
    def block(self) -> int:
        """The first of ``BLOCKS`` that the shards fill by half or more on average; if none does, the last."""
        total = sum(self.numels)
        return next((n for n in BLOCKS if 2 * total >= n * sum(-(-numel // n) for numel in self.numels)), BLOCKS[-1])

    def table(self, kinds: tuple[int, ...] | None, block: int, device: torch.device, stream: int) -> Tensor:
        """The table, ``[blocks, columns]`` int64, made once for each stream.

        Args:
            kinds: to pack, the numbers of the tensors' dtypes, or one number if they share a dtype; None to unpack.
            block: elements of a block.
            device: where the table is.
            stream: the stream whose kernels read it.
        """
        key = kinds, block, device, stream
        if (table := self._tables.get(key)) is None:
            table = self._tables[key] = to_device(self._lines(kinds, block), torch.int64, device)
        return table

    def _lines(self, kinds: tuple[int, ...] | None, block: int) -> list[tuple[int, ...]]:
        count = len(self.numels)
        last = self.places if kinds is None else range(count)
        of = [0] * count if kinds is None else kinds * count if len(kinds) == 1 else kinds
        # at least 1, because kernels divide by ``inner``, and that of an empty tensor is 0
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
    """The places of tensors in a flat one, at multiples of ``ALIGNED`` elements, and at the end the flat one's size."""
    return tuple(itertools.accumulate(map(aligned, numels), initial=0))


@lru_cache(maxsize=4096)  # every step has the same buckets
def packed(
    numels: tuple[int, ...],
    inners: tuple[int, ...] | None = None,
    limits: tuple[int, ...] | None = None,
    world: int = 1,
) -> Segments:
    """The places of tensors that are packed one after the other into a bucket of their own."""
    *offsets, row = places(numels)
    return Segments(tuple(offsets), numels, inners or numels, limits or tuple([world * n for n in numels]), row, world)


@lru_cache(maxsize=4096)
def shards_of(
    bucket: int, offsets: tuple[int, ...], numels: tuple[int, ...], inners: tuple[int, ...], world: int
) -> Segments:
    """The places of some tensors of an existing bucket of ``bucket`` elements."""
    return Segments(offsets, numels, inners, tuple([world * n for n in numels]), bucket // world, world)


def inner_of(shard: Sequence[int], dim: int) -> int:
    """Elements of a run of a padded shard with the shape ``shard``, in a full tensor that is sharded on ``dim``."""
    return math.prod(shard[dim:])


@lru_cache(maxsize=4096)
def addresses(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The tensors' addresses on the device, ``[tensors]`` int64, by one asynchronous copy.

    Addresses that were copied before are not copied again. Shards always keep their addresses, and the allocator gives
    gradients the same ones in most steps.
    """
    return to_device(list(pointers), torch.int64, device)


def current_stream(tensor: Tensor) -> int:
    """The current CUDA stream of the tensor's device; 0 on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def to_device(rows: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers into a tensor on the device; the host does not wait for the copy.

    Raises:
        RuntimeError: a CUDA graph is being captured. The copy would run only when that graph is replayed, and only for
            that graph.
    """
    if device.type != "cuda":
        return torch.tensor(rows, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "compiled_fsdp: while a CUDA graph was captured, a bucket got tensors that it has not had before. Run the "
            "same step with the same tensors on the capturing stream first, or compile with options={'kernels': False}."
        )
    return torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)
