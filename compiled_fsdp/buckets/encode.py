"""Ops that encode tensors into a bucket, and decode them.

    encode      tensors [rows * numel]      ->  a bucket [rows * row bytes], uint8
    decode      a bucket                    ->  one tensor of it from every row, [rows * numel]
    decode_sum  a bucket                    ->  the sum or average of one tensor's rows, added in float32, [numel]

Compilers treat each as an opaque op, so that every rank computes the same numbers in compiled and in eager code. On the
CPU the ops process a tensor in chunks that fit into the cache. On GPUs each is one Triton kernel (``kernels/codec.py``)
with the same results.
"""

# Why: docs/design/communication.md, "A codec is an op on a whole bucket"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.codec import Codec, byte_offsets

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# unsafe because on GPUs it makes tables of addresses while it runs
_lib.define("encode(Tensor[] tensors, int rows, str codec) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
_lib.define("decode(Tensor bucket, int offset, int numel, int rows, str codec, ScalarType dtype) -> Tensor")
_lib.define(
    "decode_sum(Tensor bucket, int offset, int numel, int rows, int rank, bool average, str codec, ScalarType dtype) "
    "-> Tensor"
)

_ELEMENTS_AT_ONCE = 128 * 1024
_SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale. A block with a smaller one is sent as zeros, because a subnormal number's inverse is infinite."""


def encode(tensors: Sequence[Tensor], rows: int, codec: str, residuals: Sequence[Tensor] | None = None) -> Tensor:
    """Encode ``tensors``, each of ``rows`` rows, side by side into one bucket ``[rows * row bytes]`` of uint8.

    Args:
        residuals: for error feedback a float32 tensor ``[rows, numel]`` for each tensor, with the rounding errors of
            earlier buckets. They are added before encoding. Then each is overwritten with this bucket's errors; errors
            that are not finite become 0.
    """
    if tensors[0].is_cuda:
        return _kernels().encode(tensors, rows, codec, residuals)
    how = Codec.parse(codec)
    numels = [tensor.numel() // rows for tensor in tensors]
    *places, row = byte_offsets(codec, numels)
    bucket = torch.zeros(rows, row, dtype=torch.uint8, device=tensors[0].device)
    for i, (tensor, numel, place) in enumerate(zip(tensors, numels, places, strict=True)):
        if not numel:
            continue
        source = tensor.reshape(rows, numel)
        elements, scales = _fields(bucket, place, numel, how)
        for piece, blocks in _pieces(numel, rows, how):
            residual = None if residuals is None else residuals[i][:, piece]
            _encode(source[:, piece], elements[:, piece], scales[:, blocks], how, residual)
    return bucket.view(-1)


def decode(bucket: Tensor, offset: int, numel: int, rows: int, codec: str, dtype: torch.dtype) -> Tensor:
    """Decode the tensor whose bytes begin at ``offset`` of each of a bucket's rows: ``[rows * numel]`` of ``dtype``."""
    if bucket.is_cuda:
        return _kernels().decode(bucket, offset, numel, rows, codec, dtype)
    how = Codec.parse(codec)
    out = torch.empty(rows, numel, dtype=dtype, device=bucket.device)
    if not numel:
        return out.view(-1)
    elements, scales = _fields(bucket.view(rows, -1), offset, numel, how)
    for piece, blocks in _pieces(numel, rows, how):
        _decode(elements[:, piece], scales[:, blocks], how, out[:, piece])
    return out.view(-1)


def decode_sum(
    bucket: Tensor, offset: int, numel: int, rows: int, rank: int, average: bool, codec: str, dtype: torch.dtype
) -> Tensor:
    """Decode a tensor as ``decode`` does, and sum or average its rows: ``[numel]`` of ``dtype``.

    The rows are added in float32, in the order of ``add_in_ring_order`` (``rank`` is this rank's number).
    """
    if bucket.is_cuda:
        return _kernels().decode_sum(bucket, offset, numel, rows, rank, average, codec, dtype)
    how = Codec.parse(codec)
    out = torch.empty(numel, dtype=dtype, device=bucket.device)
    if not numel:
        return out.view(-1)
    elements, scales = _fields(bucket.view(rows, -1), offset, numel, how)
    for piece, blocks in _pieces(numel, rows, how):
        each = torch.empty(rows, piece.stop - piece.start, dtype=torch.float32, device=bucket.device)
        _decode(elements[:, piece], scales[:, blocks], how, each)
        total = each[(rank - 1) % rows]
        for after in range(2, rows + 1):
            total += each[(rank - after) % rows]
        out[piece] = total.div_(rows) if average else total
    return out


def _kernels() -> ModuleType:
    """The kernels for GPUs.

    Raises:
        RuntimeError: Triton is not installed.
    """
    try:
        from compiled_fsdp.buckets.kernels import codec
    except ImportError as error:
        raise RuntimeError(
            "compiled_fsdp: on GPUs wire_policy needs Triton, which cannot be imported. Install it, or shard without "
            "wire_policy."
        ) from error
    return codec


# ---- one tensor ------------------------------------------------------------------------------------------------------
def _fields(bucket: Tensor, place: int, numel: int, how: Codec) -> tuple[Tensor, Tensor]:
    """Views of the elements and of the scales, by row, of the tensor that begins at byte ``place`` of each row."""
    elements = bucket.narrow(1, place, numel * how.dtype.itemsize).view(how.dtype)
    scales = bucket.narrow(1, place + how.scales_at(numel), 4 * how.blocks(numel)).view(torch.float32)
    return elements, scales


def _pieces(numel: int, rows: int, how: Codec) -> Iterator[tuple[slice, slice]]:
    """Slices of the elements and blocks to process at once: whole blocks, and at the end a block that is not full."""
    block = how.block or 1
    whole = numel // block * block
    step = max(_ELEMENTS_AT_ONCE // rows // block * block, block)
    for start in range(0, whole, step):
        end = min(start + step, whole)
        yield slice(start, end), slice(start // block, end // block)
    if whole < numel:
        yield slice(whole, numel), slice(whole // block, whole // block + 1)


def _in_blocks(rows: Tensor, scales: Tensor) -> Tensor:
    """View ``[rows, numel]`` as ``[rows, blocks, elements]``."""
    return rows.unflatten(1, (scales.shape[1], -1))


def _encode(source: Tensor, elements: Tensor, scales: Tensor, how: Codec, residual: Tensor | None) -> None:
    if residual is not None:
        source = residual.add_(source)
    if not how.block:
        elements.copy_(source)
    else:
        blocks = _in_blocks(source.to(torch.float32), scales)
        scaled = blocks.abs()
        torch.div(scaled.amax(2), how.largest, out=scales)
        scales.masked_fill_(scales < _SMALLEST, 0.0).masked_fill_(scales.isinf(), float("nan"))
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        torch.mul(blocks, inverse.unsqueeze(2), out=scaled)
        if how.dtype is torch.int8:
            scaled.round_()
        _in_blocks(elements, scales).copy_(scaled)
    if residual is not None:
        sent = torch.empty_like(source)
        _decode(elements, scales, how, sent)
        residual.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


def _decode(elements: Tensor, scales: Tensor, how: Codec, out: Tensor) -> None:
    if not how.block:
        out.copy_(elements)
        return
    factors = scales.unsqueeze(2)
    if how.dtype is torch.float8_e4m3fn:
        numbers, factors = _narrow_floats(elements), factors * 256
    else:
        numbers = elements
    into = _in_blocks(out, scales)
    if out.dtype is torch.float32 and numbers.dtype is torch.int8:
        torch.mul(_in_blocks(numbers, scales), factors, out=into)
    else:
        into.copy_(_in_blocks(numbers, scales).to(torch.float32).mul_(factors))


def _narrow_floats(elements: Tensor) -> Tensor:
    """8-bit floating-point numbers divided by 256, in float16.

    The bits are moved, because torch's own cast takes six times as long. A NaN becomes a number, which is harmless
    because the scale of its block is NaN.
    """
    wide = elements.view(torch.int8).to(torch.int16)
    return ((wide & 0x7F) << 7).bitwise_or_(wide & -0x8000).view(torch.float16)


# ---- registration ----------------------------------------------------------------------------------------------------
def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in ("CPU", "CUDA"):
        _lib.impl(name, run, device)
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


def fake_encode(tensors: Sequence[Tensor], rows: int, codec: str) -> Tensor:
    """The fake implementation of ``encode``: an empty bucket of the right size."""
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
