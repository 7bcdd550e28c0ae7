"""Ops that encode tensors into a bucket, and decode them.

    encode      tensors [rows * numel]      ->  a bucket [rows * row bytes], uint8
    decode      a bucket                    ->  one tensor of it in every row, [rows * numel]
    decode_sum  a bucket                    ->  the sum or average of its rows, added in float32, [numel]

Each is one op for whatever compiles the graph, so that every rank computes the same numbers, whichever way it runs. On
the CPU they go through their tensors in pieces that fit into the cache; on GPUs they are torch's own kernels.
"""

# Why: docs/design.md, note N67

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.comm.codec import Codec, byte_offsets

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
_lib.define("encode(Tensor[] tensors, int rows, str codec) -> Tensor")
_lib.define("decode(Tensor bucket, int offset, int numel, int rows, str codec, ScalarType dtype) -> Tensor")
_lib.define(
    "decode_sum(Tensor bucket, int offset, int numel, int rows, int rank, bool average, str codec, ScalarType dtype) "
    "-> Tensor"
)

_ELEMENTS_AT_ONCE = 128 * 1024
_SMALLEST = torch.finfo(torch.float32).tiny
"""Of scales: with a smaller one its block is sent as zeros, since the inverse of a subnormal number is infinite."""


def encode(tensors: Sequence[Tensor], rows: int, codec: str, residuals: Sequence[Tensor] | None = None) -> Tensor:
    """Encode ``tensors``, each of ``rows`` rows, side by side into one bucket ``[rows * row bytes]`` of uint8.

    Args:
        residuals: of each tensor float32 ``[rows, numel]``, what earlier buckets did not carry of it: it is added
            before, and is what this bucket does not carry afterwards. What is not finite leaves none.
    """
    how = Codec.parse(codec)
    numels = [tensor.numel() // rows for tensor in tensors]
    *places, row = byte_offsets(codec, numels)
    bucket = torch.zeros(rows, row, dtype=torch.uint8, device=tensors[0].device)
    for i, (tensor, numel, place) in enumerate(zip(tensors, numels, places, strict=True)):
        source = tensor.reshape(rows, numel)
        for r in range(rows):
            elements, scales = _fields(bucket[r], place, numel, how)
            residual = None if residuals is None else residuals[i][r]
            for piece, blocks in _pieces(numel, how, source.device):
                _encode(source[r, piece], elements[piece], scales[blocks], how, residual, piece)
    return bucket.view(-1)


def decode(bucket: Tensor, offset: int, numel: int, rows: int, codec: str, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes begin at ``offset`` of each of a bucket's ``rows``: ``[rows * numel]`` of ``dtype``."""
    how, by_row = Codec.parse(codec), bucket.view(rows, -1)
    out = torch.empty(rows, numel, dtype=dtype, device=bucket.device)
    for r in range(rows):
        elements, scales = _fields(by_row[r], offset, numel, how)
        for piece, blocks in _pieces(numel, how, bucket.device):
            _decode(elements[piece], scales[blocks], how, out[r, piece])
    return out.view(-1)


def decode_sum(
    bucket: Tensor, offset: int, numel: int, rows: int, rank: int, average: bool, codec: str, dtype: torch.dtype
) -> Tensor:
    """The sum, or average, of such a tensor's rows: added in float32, in the order of ``add_in_ring_order``."""
    how, by_row = Codec.parse(codec), bucket.view(rows, -1)
    fields = [_fields(by_row[(rank - after) % rows], offset, numel, how) for after in range(1, rows + 1)]
    out = torch.empty(numel, dtype=dtype, device=bucket.device)
    for piece, blocks in _pieces(numel, how, bucket.device):
        total, added = torch.empty(2, piece.stop - piece.start, dtype=torch.float32, device=bucket.device)
        for number, (elements, scales) in enumerate(fields):
            _decode(elements[piece], scales[blocks], how, added if number else total)
            if number:
                total += added
        out[piece] = total.div_(rows) if average else total
    return out


# ---- one tensor's row ------------------------------------------------------------------------------------------------
def _fields(row: Tensor, place: int, numel: int, how: Codec) -> tuple[Tensor, Tensor]:
    """The elements and the scales of the tensor whose bytes begin at ``place`` of a bucket's row: views."""
    elements = row.narrow(0, place, numel * how.dtype.itemsize).view(how.dtype)
    scales = row.narrow(0, place + how.scales_at(numel), 4 * how.blocks(numel)).view(torch.float32)
    return elements, scales


def _pieces(numel: int, how: Codec, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Elements and blocks that are worked on at once: whole blocks, and at the end one that is not full."""
    block = how.block or 1
    whole = numel // block * block
    step = max(_ELEMENTS_AT_ONCE // block * block, block) if device.type == "cpu" else max(whole, 1)
    for start in range(0, whole, step):
        end = min(start + step, whole)
        yield slice(start, end), slice(start // block, end // block)
    if whole < numel:
        yield slice(whole, numel), slice(whole // block, whole // block + 1)


def _encode(
    source: Tensor, elements: Tensor, scales: Tensor, how: Codec, residual: Tensor | None, piece: slice
) -> None:
    if residual is not None:
        source = residual[piece].add_(source)
    if not how.block:
        elements.copy_(source)
    else:
        blocks = source.to(torch.float32).view(scales.numel(), -1)
        scaled = blocks.abs()
        torch.div(scaled.amax(1), how.largest, out=scales)
        scales.masked_fill_(scales < _SMALLEST, 0.0)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        torch.mul(blocks, inverse.unsqueeze(1), out=scaled)
        if how.dtype is torch.int8:
            scaled.round_()
        elements.view_as(scaled).copy_(scaled)
    if residual is not None:
        sent = torch.empty_like(source)
        _decode(elements, scales, how, sent)
        source.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


def _decode(elements: Tensor, scales: Tensor, how: Codec, out: Tensor) -> None:
    if not how.block:
        out.copy_(elements)
    elif out.dtype is torch.float32 and how.dtype is torch.int8:
        blocks = scales.numel(), -1
        torch.mul(elements.view(blocks), scales.unsqueeze(1), out=out.view(blocks))
    else:
        blocks = scales.numel(), -1
        out.view(blocks).copy_(elements.view(blocks).to(torch.float32).mul_(scales.unsqueeze(1)))


# ---- registration ----------------------------------------------------------------------------------------------------
def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in ("CPU", "CUDA"):
        _lib.impl(name, run, device)
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


def fake_encode(tensors: Sequence[Tensor], rows: int, codec: str) -> Tensor:
    """What ``encode`` returns, without memory."""
    row = byte_offsets(codec, [tensor.numel() // rows for tensor in tensors])[-1]
    return tensors[0].new_empty(rows * row, dtype=torch.uint8)


_register("encode", encode, fake_encode)
_register(
    "decode",
    decode,
    lambda bucket, offset, numel, rows, codec, dtype: bucket.new_empty(rows * numel, dtype=dtype),
)
_register(
    "decode_sum",
    decode_sum,
    lambda bucket, offset, numel, rows, rank, average, codec, dtype: bucket.new_empty(numel, dtype=dtype),
)
