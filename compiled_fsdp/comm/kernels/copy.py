"""The kernel: blocks of a bucket's tensors, copied into the bucket or out of it, cast and divided on the way.

A program copies one block of one rank's shard of one tensor; the tables (``layout.py``) say which. Where a block begins
and ends at multiples of 16 elements on both sides, 16 bytes are copied at a time, else single elements, still in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_fsdp.comm.kernels.layout import BLOCK, COLUMNS, KINDS, Segments, addresses, tables

WARPS = 8
_WIDTH = tl.constexpr(len(COLUMNS))
_TRITON = dict(zip(KINDS, (tl.float32, tl.bfloat16, tl.float16), strict=True))


def pack(
    tensors: Sequence[Tensor], bucket: Tensor, segments: Segments, divide: float = 1.0, block: int = BLOCK
) -> None:
    """Copy ``tensors``, contiguous and of any of ``KINDS``, into ``bucket``: ``[world * row]``.

    Each is cast to the bucket's dtype, and then divided.
    """
    kinds = tuple(KINDS.index(tensor.dtype) for tensor in tensors)
    stream = _stream(bucket)
    pointers = addresses(tuple(tensor.data_ptr() for tensor in tensors), bucket.device, stream)
    kind = _TRITON[tensors[0].dtype] if len(set(kinds)) == 1 else None
    _launch(bucket, bucket, pointers, segments, kinds, divide, block, stream, PACK=True, KIND=kind)


def unpack(bucket: Tensor, flat: Tensor, segments: Segments, divide: float = 1.0, block: int = BLOCK) -> None:
    """Copy the tensors of ``bucket`` into ``flat``, to ``segments.places``.

    They are divided, and then cast to the dtype of ``flat``.
    """
    kind, stream = _TRITON[flat.dtype], _stream(bucket)
    _launch(bucket, flat, bucket, segments, segments.places[:-1], divide, block, stream, PACK=False, KIND=kind)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _launch(bucket: Tensor, flat: Tensor, pointers: Tensor, segments: Segments, last: tuple[int, ...], divide: float,
            block: int, stream: int, **constants: object) -> None:  # fmt: skip
    table, tiles = tables(segments, last, block, bucket.device, stream)
    if not tiles.numel():
        return
    with torch.cuda.device_of(bucket):
        copy_blocks[(tiles.numel(), segments.world)](
            bucket, flat, pointers, table, tiles, segments.row, divide,
            DIVIDE=divide != 1, STRIDED=segments.strided, BLOCK=block, num_warps=WARPS, **constants,
        )  # fmt: skip


@triton.jit
def copy_blocks(bucket, flat, pointers, table, tiles, row, divide, PACK: tl.constexpr, KIND: tl.constexpr,
                DIVIDE: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy one block of one tensor's shard.

    ``KIND`` is the tensors' dtype; None: each has its own, whose number is in the table.
    """
    tile = tl.program_id(0)
    rank = tl.program_id(1).to(tl.int64)
    segment = tl.load(tiles + tile)
    line = table + segment * _WIDTH
    offset, numel, inner = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    limit, first, last = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
    start = (tile - first) * BLOCK
    at = rank * row + offset + start
    lanes = tl.arange(0, BLOCK)
    count = numel - start
    # of what is split evenly, as all that is strided is, nothing is missing at the end
    room = tl.minimum(count, limit - rank * numel - start)
    if STRIDED:
        place = rank * inner
        spread = (start + lanes) // inner * inner * (tl.num_programs(1) - 1) + start + lanes
    else:
        place = rank * numel + start
        spread = lanes
    if not PACK:
        place += last
    aligned = (at % 16 == 0) & (place % 16 == 0) & (count % 16 == 0) & (room % 16 == 0)
    if PACK:
        address = tl.load(pointers + segment)
        aligned = aligned & (address % 16 == 0)
    else:
        address = at
    if aligned:
        # what is divided and multiplied the compiler knows to be a multiple; a hint would reach the other branch, too
        at, place, address = at // 16 * 16, place // 16 * 16, address // 16 * 16
        inside, filled = lanes < count // 16 * 16, lanes < room // 16 * 16
        if PACK:
            value = _read(address, place + spread, filled, last, KIND, bucket.dtype.element_ty, True)
            tl.store(bucket + at + lanes, _divided(value, divide, DIVIDE), mask=inside)
        else:
            value = _divided(tl.load(bucket + at + lanes, mask=inside, other=0.0), divide, DIVIDE)
            tl.store(flat + place + spread, value.to(KIND), mask=inside)
    else:
        inside, filled = lanes < count, lanes < room
        if PACK:
            value = _read(address, place + spread, filled, last, KIND, bucket.dtype.element_ty, False)
            tl.store(bucket + at + lanes, _divided(value, divide, DIVIDE), mask=inside)
        else:
            value = _divided(tl.load(bucket + at + lanes, mask=inside, other=0.0), divide, DIVIDE)
            tl.store(flat + place + spread, value.to(KIND), mask=inside)


@triton.jit
def _read(address, places, filled, kind, KIND: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of a tensor, zeros where it has none, cast.

    ``kind`` is the number of its dtype where ``KIND`` is None.
    """
    if KIND is not None:
        value = _load(address, places, filled, KIND, ALIGNED).to(TO)
    elif kind == 0:
        value = _load(address, places, filled, tl.float32, ALIGNED).to(TO)
    elif kind == 1:
        value = _load(address, places, filled, tl.bfloat16, ALIGNED).to(TO)
    else:
        value = _load(address, places, filled, tl.float16, ALIGNED).to(TO)
    return value


@triton.jit
def _load(address, places, filled, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    tensor = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        tensor = tl.multiple_of(tensor, 16)
    return tl.load(tensor + places, mask=filled, other=0.0)


@triton.jit
def _divided(value, divide, DIVIDE: tl.constexpr):
    if DIVIDE:
        value = tl.math.div_rn(value.to(tl.float32), divide).to(value.dtype)
    return value
