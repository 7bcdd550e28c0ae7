"""The Triton kernels that encode a bucket's tensors and decode them, bit for bit as ``buckets/encode.py`` does.

A program processes some thousand elements of one tensor's row, in whole blocks. It reads them once, and writes the
encoded elements, the scales, the residuals, and the zeros behind the tensor. ``encode`` is one launch for the whole
bucket. ``decode`` and ``decode_sum`` are one launch for each tensor that is taken from the bucket.
"""

# Why: docs/design/graphs-and-passes.md, "One Triton kernel copies a whole bucket"
# Why: docs/design/communication.md, "A codec is an op on a whole bucket"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_fsdp.buckets.codec import Codec, byte_offsets
from compiled_fsdp.buckets.kernels.layout import KINDS, addresses, current_stream, to_device

COLUMNS = ("place", "start", "numel", "scales", "end", "tensor")
"""The columns of the table that ``encode_blocks`` reads; it has a line for each program of a row.

``place`` is the byte at which the tensor begins in a bucket's row. ``start`` is the program's first element of the
tensor, and ``numel`` the number of the tensor's elements in a row. ``scales`` and ``end`` are the bytes, counted from
``place``, at which the scales begin and the tensor ends. ``tensor`` is the tensor's number.
"""
TILE = 4096
"""Elements that a program processes, rounded down to whole blocks, but at least one block."""

_WIDTH = tl.constexpr(len(COLUMNS))
_BFLOAT16, _INT8, _FLOAT8 = (tl.constexpr(n) for n in range(3))
_NUMBERS = {"bfloat16": 0, "int8": 1, "float8_e4m3fn": 2}
_KIND = dict(zip(KINDS, (tl.float32, tl.bfloat16, tl.float16), strict=True))
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_NEAREST = tl.constexpr(1.5 * 2**23)
"""Adding it to a small float32 and subtracting it again rounds to the nearest integer, halves to the even one."""


def encode(tensors: Sequence[Tensor], rows: int, codec: str, residuals: Sequence[Tensor] | None = None) -> Tensor:
    """``buckets.encode.encode`` by one kernel. The residuals have to be contiguous."""
    how, numels = Codec.parse(codec), tuple([tensor.numel() // rows for tensor in tensors])
    given = _of_one_dtype(tensors)
    device, stream = given[0].device, current_stream(given[0])
    row = byte_offsets(codec, numels)[-1]
    bucket = torch.empty(rows * row, dtype=torch.uint8, device=device)
    table = _table(codec, numels, device, stream)
    if not table.numel():
        return bucket
    pointers = addresses(tuple([tensor.data_ptr() for tensor in given]), device, stream)
    kept = pointers
    if residuals is not None:
        assert all(residual.is_contiguous() for residual in residuals)
        kept = addresses(tuple([residual.data_ptr() for residual in residuals]), device, stream)
    with torch.cuda.device_of(bucket):
        encode_blocks[(table.shape[0], rows)](
            bucket, pointers, kept, table, row, KIND=_KIND[given[0].dtype], FEEDBACK=residuals is not None,
            **shape(how), **OPTIONS,
        )  # fmt: skip
    return bucket


def decode(bucket: Tensor, offset: int, numel: int, rows: int, codec: str, dtype: torch.dtype) -> Tensor:
    """``buckets.encode.decode`` by one kernel."""
    out = torch.empty(rows * numel, dtype=dtype, device=bucket.device)
    _decode(bucket, out, offset, numel, rows, 0, codec, sums=False, average=False)
    return out


def decode_sum(
    bucket: Tensor, offset: int, numel: int, rows: int, rank: int, average: bool, codec: str, dtype: torch.dtype
) -> Tensor:
    """``buckets.encode.decode_sum`` by one kernel."""
    out = torch.empty(numel, dtype=dtype, device=bucket.device)
    _decode(bucket, out, offset, numel, rows, rank, codec, sums=True, average=average)
    return out


def _decode(bucket: Tensor, out: Tensor, offset: int, numel: int, rows: int, rank: int, codec: str, *,
            sums: bool, average: bool) -> None:  # fmt: skip
    how = Codec.parse(codec)
    if not numel:
        return
    grid = (triton.cdiv(numel, tile(how)), 1 if sums else rows)
    with torch.cuda.device_of(bucket):
        decode_blocks[grid](
            bucket, out, bucket.numel() // rows, offset, how.scales_at(numel), numel, rank, ROWS=rows,
            SUM=sums, AVERAGE=average, **shape(how), **OPTIONS,
        )  # fmt: skip


OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Without fusion, because a fused multiplication and addition is rounded once, but torch's two ops are rounded twice.
"""


def shape(how: Codec) -> dict[str, int]:
    """The constants of a program: it has ``BLOCKS`` blocks of ``BLOCK`` elements, each in a line of ``LINE`` lanes."""
    block = how.block or TILE
    line = triton.next_power_of_2(block)
    return {"CODEC": _NUMBERS[how.name], "BLOCK": block, "LINE": line, "BLOCKS": max(TILE // line, 1)}


def tile(how: Codec) -> int:
    """How many elements a program processes: ``TILE``, rounded down to whole blocks, but at least one block."""
    return shape(how)["BLOCKS"] * shape(how)["BLOCK"]


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous and of one dtype: their own if they share one of ``KINDS``, else float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = tensors[0].dtype if len(dtypes) == 1 and tensors[0].dtype in KINDS else torch.float32
    return [tensor.to(dtype).contiguous() for tensor in tensors]


@lru_cache(maxsize=4096)  # every step has the same buckets
def _table(codec: str, numels: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The table for ``encode_blocks``, ``[programs of a row, columns]`` int64."""
    how = Codec.parse(codec)
    places = byte_offsets(codec, numels)
    lines = [
        (place, start, numel, how.scales_at(numel), end - place, i)
        for i, (numel, place, end) in enumerate(zip(numels, places, places[1:], strict=False))
        for start in range(0, numel, tile(how))
    ]
    return to_device(lines, torch.int64, device)


# ---- kernels ---------------------------------------------------------------------------------------------------------
@triton.jit
def encode_blocks(bucket, pointers, residuals, table, row, KIND: tl.constexpr, FEEDBACK: tl.constexpr,
                  CODEC: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Encode the blocks of one tensor's row that the program's line of the table describes."""
    rank = tl.program_id(1).to(tl.int64)
    line = table + tl.program_id(0) * _WIDTH
    place, start, numel = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    scales, end, tensor = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
    to, at = bucket + _by_16(rank * row + place), rank * numel + start
    source, kept = tl.load(pointers + tensor), tl.load(residuals + tensor)
    aligned = (source % 16 == 0) & (kept % 16 == 0) & (at % 16 == 0)
    # ``_by_16`` divides and multiplies, so that the compiler sees a multiple; a hint would reach the other branch, too
    if aligned & (start + BLOCKS * BLOCK <= numel):
        _encode(to, _by_16(source), _by_16(kept), _by_16(at), start, numel, scales, True,
                KIND, FEEDBACK, CODEC, BLOCK, LINE, BLOCKS)  # fmt: skip
    else:
        _encode(to, source, kept, at, start, numel, scales, False, KIND, FEEDBACK, CODEC, BLOCK, LINE, BLOCKS)
    if start + BLOCKS * BLOCK >= numel:  # the tensor's last program writes zeros up to the scales and behind them
        gap = tl.arange(0, 16)
        written = numel * 2 if CODEC == _BFLOAT16 else numel
        tl.store(to + written + gap, 0, mask=written + gap < scales)
        written = scales if CODEC == _BFLOAT16 else scales + 4 * ((numel + BLOCK - 1) // BLOCK)
        tl.store(to + written + gap, 0, mask=written + gap < end)


@triton.jit(do_not_specialize=["offset", "scales", "numel", "rank"])
def decode_blocks(bucket, out, row, offset, scales, numel, rank, ROWS: tl.constexpr, SUM: tl.constexpr,
                  AVERAGE: tl.constexpr, CODEC: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
                  BLOCKS: tl.constexpr):  # fmt: skip
    """Decode some blocks of a tensor from one row of the bucket, or the sum of these blocks over all rows."""
    start, line = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK), tl.program_id(1).to(tl.int64)
    at = line * numel + start
    if (at % 16 == 0) & (start + BLOCKS * BLOCK <= numel):
        _decode_blocks(bucket, out, row, offset, scales, numel, rank, start, line, _by_16(at), True, ROWS,
                       SUM, AVERAGE, CODEC, BLOCK, LINE, BLOCKS)  # fmt: skip
    else:
        _decode_blocks(bucket, out, row, offset, scales, numel, rank, start, line, at, False, ROWS,
                       SUM, AVERAGE, CODEC, BLOCK, LINE, BLOCKS)  # fmt: skip


@triton.jit
def _encode(to, source, kept, at, start, numel, scales, WHOLE: tl.constexpr, KIND: tl.constexpr,
            FEEDBACK: tl.constexpr, CODEC: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
            BLOCKS: tl.constexpr):  # fmt: skip
    """Encode a program's blocks. ``WHOLE``: all its elements exist, and all accesses begin at multiples of 16 bytes."""
    lanes = _lanes(BLOCK, LINE, BLOCKS)
    there = _there(start, numel, WHOLE, BLOCK, LINE, BLOCKS)
    value = tl.load(_pointer(source, KIND, WHOLE) + at + lanes, mask=there, other=0.0).to(tl.float32)
    if FEEDBACK:
        residual = _pointer(kept, tl.float32, WHOLE) + at + lanes
        value = tl.load(residual, mask=there, other=0.0) + value
    if CODEC == _BFLOAT16:
        held = value.to(tl.bfloat16)
        tl.store(to.to(tl.pointer_type(tl.bfloat16)) + _by_16(start) + lanes, held, mask=there)
        sent = held.to(tl.float32)
    else:
        # the bits of positive floats, read as integers, have the floats' order, and those of NaN are the largest
        largest = tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
        scale = tl.math.div_rn(largest, 127.0 if CODEC == _INT8 else 448.0)
        scale = tl.where(scale < _SMALLEST, 0.0, scale)
        scale = tl.where(scale == float("inf"), float("nan"), scale)
        number = start // BLOCK + tl.arange(0, BLOCKS)
        field = (to + scales).to(tl.pointer_type(tl.float32))
        tl.store(field + number, scale, mask=number * BLOCK < numel)
        inverse = tl.where(scale == 0.0, 0.0, tl.math.div_rn(1.0, scale))[:, None]
        scale = scale[:, None]
        scaled = tl.where(scale == scale, value * inverse, 0.0)
        if CODEC == _INT8:
            whole = (scaled + _NEAREST) - _NEAREST
            held = whole.to(tl.int8)
            sent = whole * scale
        else:
            held = _to_float8(scaled)
            sent = _from_float8(held) * (scale * 256.0)
        tl.store(to.to(tl.pointer_type(tl.int8)) + _by_16(start) + lanes, held, mask=there)
    if FEEDBACK:
        lost = value - sent
        tl.store(residual, tl.where(tl.abs(lost) < float("inf"), lost, 0.0), mask=there)


@triton.jit
def _decode_blocks(bucket, out, row, offset, scales, numel, rank, start, line, at, WHOLE: tl.constexpr,
                   ROWS: tl.constexpr, SUM: tl.constexpr, AVERAGE: tl.constexpr, CODEC: tl.constexpr,
                   BLOCK: tl.constexpr, LINE: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    there = _there(start, numel, WHOLE, BLOCK, LINE, BLOCKS)
    if SUM:
        line = (line + rank + ROWS - 1) % ROWS
    value = _decoded(bucket + _by_16(line * row + offset), scales, start, numel, there, CODEC, BLOCK, LINE, BLOCKS)
    if SUM:
        for _ in range(1, ROWS):
            line = (line + ROWS - 1) % ROWS
            begin = bucket + _by_16(line * row + offset)
            value += _decoded(begin, scales, start, numel, there, CODEC, BLOCK, LINE, BLOCKS)
        if AVERAGE:
            value = tl.math.div_rn(value, ROWS * 1.0)
    tl.store(out + at + _lanes(BLOCK, LINE, BLOCKS), value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _decoded(begin, scales, start, numel, there, CODEC: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
             BLOCKS: tl.constexpr):  # fmt: skip
    """Decode elements from ``start`` on of the tensor at address ``begin``, to float32: ``[BLOCKS, LINE]``."""
    places = _by_16(start) + _lanes(BLOCK, LINE, BLOCKS)
    if CODEC == _BFLOAT16:
        value = tl.load(begin.to(tl.pointer_type(tl.bfloat16)) + places, mask=there, other=0.0).to(tl.float32)
    else:
        number = start // BLOCK + tl.arange(0, BLOCKS)
        field = (begin + scales).to(tl.pointer_type(tl.float32))
        scale = tl.load(field + number, mask=number * BLOCK < numel, other=0.0)[:, None]
        held = tl.load(begin.to(tl.pointer_type(tl.int8)) + places, mask=there, other=0)
        value = held.to(tl.float32) * scale if CODEC == _INT8 else _from_float8(held) * (scale * 256.0)
    return value


# ---- numbers ---------------------------------------------------------------------------------------------------------
@triton.jit
def _to_float8(value):
    """The nearest ``float8_e4m3fn`` (halves to the even one), as bits in int8; ``value`` is at most 448 in size.

    It is computed with integers, because not all GPUs have the dtype: the exponent becomes smaller by 120, and 20 bits
    of the mantissa are rounded away. Below 2**-6 the dtype has the multiples of 2**-9, to which adding 2**14 rounds.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) & 0xFFFF
    return (tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _from_float8(held):
    """8-bit floating-point numbers divided by 256, in float32. Their bits, shifted up by seven, are that in float16."""
    wide = held.to(tl.int16)
    bits = ((wide & 0x7F) << 7) | (wide & -0x8000)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


# ---- places ----------------------------------------------------------------------------------------------------------
@triton.jit
def _lanes(BLOCK: tl.constexpr, LINE: tl.constexpr, BLOCKS: tl.constexpr):
    """The offsets of a program's elements from its first element, ``[BLOCKS, LINE]``."""
    return tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, LINE)[None, :]


@triton.jit
def _there(start, numel, WHOLE: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BLOCKS: tl.constexpr):
    """Which of these elements exist in the tensor, and belong to the block of their line."""
    there = tl.full([BLOCKS, LINE], 1, tl.int1)
    if LINE != BLOCK:
        there = there & (tl.arange(0, LINE)[None, :] < BLOCK)
    if not WHOLE:
        there = there & (start + _lanes(BLOCK, LINE, BLOCKS) < numel)
    return there


@triton.jit
def _pointer(address, KIND: tl.constexpr, WHOLE: tl.constexpr):
    pointer = address.to(tl.pointer_type(KIND))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _by_16(number):
    """``number``, which is a multiple of 16, in a form from which the compiler knows that."""
    return number // 16 * 16
