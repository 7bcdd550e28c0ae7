"""Codecs, which encode tensors for sending, and the byte layout of a bucket of encoded tensors.

    bfloat16              the elements in bfloat16
    int8/256              blocks of 256 elements, each an integer from -127 to 127 times the block's scale (float32)
    float8_e4m3fn/256     the same with 8-bit floating-point numbers

Each tensor is encoded by itself, from its first element on, so that its decoded values do not depend on the bucket that
carries it. Its bytes are the elements, then the scales from the next multiple of 4 on, then zeros up to a multiple of
16. In a codec with scales an infinity or a NaN makes its whole block NaN. Zeros stay zeros.
"""

# Why: docs/design/communication.md, "A codec is an op on a whole bucket"

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The number to which a block's largest element is scaled, by the name of the dtype."""

NAMES = ("bfloat16", *_LARGEST)
BLOCK = 256
RESIDUAL_ITEMSIZE = 4
"""Bytes per element of the residuals that error feedback keeps (float32)."""
_ALIGNED, _SCALE_BYTES = 16, 4


@dataclass(frozen=True)
class Codec:
    """An encoding of tensors. Graphs carry it as text, for example "int8/256"."""

    # The name of the dtype in which elements are sent: one of ``NAMES``.
    name: str
    # How many elements share a scale; 0 if the codec has no scales.
    block: int

    def __str__(self) -> str:
        return f"{self.name}/{self.block}" if self.block else self.name

    @staticmethod
    @functools.cache
    def parse(text: str) -> Codec:
        """The codec with this text: the inverse of ``str``."""
        name, _, block = text.partition("/")
        return Codec(name, int(block or 0))

    @staticmethod
    def of(name: str, block: int) -> Codec:
        """The codec that sends elements in the dtype ``name``; if it has scales, ``block`` elements share one."""
        return Codec(name, block if name in _LARGEST else 0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which elements are sent."""
        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    @property
    def largest(self) -> float:
        """The number to which a block's largest element is scaled."""
        return _LARGEST[self.name]

    def blocks(self, numel: int) -> int:
        """The number of scales of a tensor of ``numel`` elements."""
        return -(-numel // self.block) if self.block else 0

    def scales_at(self, numel: int) -> int:
        """The byte at which the scales begin in an encoded tensor of ``numel`` elements."""
        return _aligned(numel * self.dtype.itemsize, _SCALE_BYTES)

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded tensor of ``numel`` elements."""
        return _aligned(self.scales_at(numel) + _SCALE_BYTES * self.blocks(numel), _ALIGNED)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def nbytes(codec: str, numel: int) -> int:
    """Bytes of a tensor of ``numel`` elements, encoded by the codec with the text ``codec``."""
    return Codec.parse(codec).nbytes(numel)


def sent_nbytes(codec: str, numel: int, dtype: torch.dtype) -> int:
    """Bytes on the wire of a tensor of ``numel`` elements: in ``dtype``, or encoded if ``codec`` is not ""."""
    return nbytes(codec, numel) if codec else numel * dtype.itemsize


def byte_offsets(codec: str, numels: Sequence[int]) -> tuple[int, ...]:
    """The byte at which each encoded tensor begins in a row of a flat bucket, and at the end the bytes of a row."""
    return tuple(itertools.accumulate((nbytes(codec, numel) for numel in numels), initial=0))
