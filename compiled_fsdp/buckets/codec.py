"""Codecs: what a tensor is on the wire, where it is not sent as it is. The layout of a bucket of encoded tensors.

    bfloat16              its elements in bfloat16
    int8/256              blocks of 256 elements, each an integer from -127 to 127 times the block's scale (float32)
    float8_e4m3fn/256     the same with 8-bit floating-point numbers

Each tensor is encoded by itself, from its first element on, so that what is received of it does not depend on the
bucket that carries it. Its bytes: the elements, the scales at the next multiple of 4, and zeros up to a multiple of 16.
What cannot be held (infinities, NaN) makes its block NaN; zeros stay zeros.
"""

# Why: docs/design.md, note N67

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest element of a block becomes, by the name of the dtype."""

NAMES = ("bfloat16", *_LARGEST)
BLOCK = 256
RESIDUAL_ITEMSIZE = 4
"""Bytes of an element of what is kept for error feedback: float32."""
_ALIGNED, _SCALE_BYTES = 16, 4


@dataclass(frozen=True)
class Codec:
    """How tensors are encoded; it travels through graphs as text: "int8/256"."""

    # The name of the dtype that elements are sent in: one of ``NAMES``.
    name: str
    # How many elements share a scale; 0 where there are no scales.
    block: int

    def __str__(self) -> str:
        return f"{self.name}/{self.block}" if self.block else self.name

    @staticmethod
    @functools.cache
    def parse(text: str) -> Codec:
        """What ``str`` wrote."""
        name, _, block = text.partition("/")
        return Codec(name, int(block or 0))

    @staticmethod
    def of(name: str, block: int) -> Codec:
        """The codec of a dtype, with blocks of so many elements where it has scales."""
        return Codec(name, block if name in _LARGEST else 0)

    @property
    def dtype(self) -> torch.dtype:
        """In which elements are sent."""
        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    @property
    def largest(self) -> float:
        """What the largest element of a block becomes."""
        return _LARGEST[self.name]

    def blocks(self, numel: int) -> int:
        """How many scales a tensor of ``numel`` elements has."""
        return -(-numel // self.block) if self.block else 0

    def scales_at(self, numel: int) -> int:
        """At which of a tensor's bytes its scales begin."""
        return _aligned(numel * self.dtype.itemsize, _SCALE_BYTES)

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded tensor of ``numel`` elements."""
        return _aligned(self.scales_at(numel) + _SCALE_BYTES * self.blocks(numel), _ALIGNED)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def nbytes(codec: str, numel: int) -> int:
    """Bytes of a tensor of ``numel`` elements, encoded by the codec of this text."""
    return Codec.parse(codec).nbytes(numel)


def sent_nbytes(codec: str, numel: int, dtype: torch.dtype) -> int:
    """Bytes of a tensor of ``numel`` elements as it is sent: in ``dtype``, or encoded, if there is a codec."""
    return nbytes(codec, numel) if codec else numel * dtype.itemsize


def byte_offsets(codec: str, numels: Sequence[int]) -> tuple[int, ...]:
    """Where encoded tensors begin in each row of a flat bucket, in bytes; one more: the row's bytes."""
    return tuple(itertools.accumulate((nbytes(codec, numel) for numel in numels), initial=0))
