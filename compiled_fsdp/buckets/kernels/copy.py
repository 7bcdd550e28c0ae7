"""The Triton kernel that copies blocks of tensors into a bucket or out of it, and casts and divides them on the way.

A program copies one block of one rank's shard of one tensor; a line of the table (``layout.py``) describes the block.
If the block begins at a multiple of 16 elements on both sides, the program copies 16 bytes at a time, and the rest at
the block's end by elements. Otherwise it copies all of the block by elements, still in order. If a shard consists of
several runs (``layout.py``), the runs have to be multiples of 16 elements, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_fsdp.buckets.kernels.layout import ALIGNED, COLUMNS, KINDS, Segments, addresses, current_stream

_WIDTH = tl.constexpr(len(COLUMNS))
_ALIGNED = tl.constexpr(ALIGNED)
_TRITON = dict(zip(KINDS, (tl.float32, tl.bfloat16, tl.float16), strict=True))


def pack(
    tensors: Sequence[Tensor], bucket: Tensor, segments: Segments, divide: float = 1.0, block: int | None = None
) -> None:
    """Copy ``tensors``, contiguous and of dtypes in ``KINDS``, into ``bucket``, ``[world * row]``.

    Each is cast to the bucket's dtype, and then divided. Zeros fill the space up to the next tensor.
    """
    kinds = tuple([KINDS.index(tensor.dtype) for tensor in tensors])
    same = len(set(kinds)) == 1
    stream = current_stream(bucket)
    pointers = addresses(tuple([tensor.data_ptr() for tensor in tensors]), bucket.device, stream)
    kind = _TRITON[tensors[0].dtype] if same else None
    _launch(bucket, bucket, pointers, segments, kinds[:1] if same else kinds, divide, block, stream, kind)


def unpack(bucket: Tensor, flat: Tensor, segments: Segments, divide: float = 1.0, block: int | None = None) -> None:
    """Copy the tensors of ``bucket`` into ``flat``, to ``segments.places``.

    Each is divided, and then cast to the dtype of ``flat``.
    """
    _launch(bucket, flat, bucket, segments, None, divide, block, current_stream(bucket), _TRITON[flat.dtype])


def warps(block: int) -> int:
    """Warps of a program: 16 elements for each thread of a large block, 8 of a smaller one."""
    return {4096: 8, 1024: 4}.get(block, 1)


def _launch(bucket: Tensor, flat: Tensor, pointers: Tensor, segments: Segments, kinds: tuple[int, ...] | None,
            divide: float, block: int | None, stream: int, kind: tl.dtype | None) -> None:  # fmt: skip
    """Launch the kernel.

    ``kinds``: to pack, the numbers of the tensors' dtypes, or one number if they share a dtype; None to unpack.
    """
    block = block or segments.block
    table = segments.table(kinds, block, bucket.device, stream)
    if not table.numel():
        return
    with torch.cuda.device_of(bucket):
        copy_blocks[(table.shape[0], segments.world)](
            bucket, flat, pointers, table, segments.row, divide, PACK=kinds is not None, KIND=kind,
            DIVIDE=divide != 1, STRIDED=segments.strided, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip


@triton.jit
def copy_blocks(bucket, flat, pointers, table, row, divide, PACK: tl.constexpr, KIND: tl.constexpr,
                DIVIDE: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy one block of one tensor's shard.

    ``KIND`` is the tensors' dtype; None: each tensor has its own dtype, whose number is in the table.
    """
    rank = tl.program_id(1).to(tl.int64)
    line = table + tl.program_id(0) * _WIDTH
    at, start, numel, inner = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    limit, last, kind = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6)
    at += rank * row
    room = tl.minimum(numel, limit - rank * numel) - start
    room = tl.minimum(tl.maximum(room, 0), BLOCK).to(tl.int32)
    # a packed tensor is followed by zeros up to the next tensor
    count = tl.minimum((_whole(numel + _ALIGNED - 1) if PACK else numel) - start, BLOCK).to(tl.int32)
    place = rank * inner if STRIDED else rank * numel
    address = at
    if PACK:
        address = tl.load(pointers + last)
    else:
        place += last
    aligned = (at % _ALIGNED == 0) & (address % 16 == 0)
    if STRIDED:
        # a tensor whose shards consist of runs is split evenly, so no element is missing at the end
        aligned = aligned & (inner % _ALIGNED == 0) & (room % _ALIGNED == 0)
    else:
        aligned = aligned & ((place + start) % _ALIGNED == 0)
    if not aligned:
        _by_elements(bucket, flat, address, at, place, start, inner, count, room, divide, kind,
                     PACK, KIND, DIVIDE, STRIDED, BLOCK)  # fmt: skip
    else:
        # divided and multiplied, so that the compiler sees a multiple; a hint would reach the other branch, too
        at, address = _whole(at), address // 16 * 16
        if STRIDED:
            _pieces_by_vectors(bucket, flat, address, at, _whole(place), _whole(start), _whole(inner), count, room,
                               divide, kind, PACK, KIND, DIVIDE, BLOCK)  # fmt: skip
        else:
            _by_vectors(bucket, flat, address, at, _whole(place + start), count, room, divide, kind,
                        PACK, KIND, DIVIDE, BLOCK)  # fmt: skip


@triton.jit
def _by_elements(bucket, flat, address, at, place, start, inner, count, room, divide, kind, PACK: tl.constexpr,
                 KIND: tl.constexpr, DIVIDE: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    places = place + (_spread(start, lanes, inner, tl.num_programs(1), BLOCK) if STRIDED else start + lanes)
    _copy(bucket, flat, address, at + lanes, places, lanes < count, lanes < room, divide, kind,
          PACK, KIND, DIVIDE, False)  # fmt: skip


@triton.jit
def _by_vectors(bucket, flat, address, at, place, count, room, divide, kind, PACK: tl.constexpr, KIND: tl.constexpr,
                DIVIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    whole = _whole(room)
    inside = lanes < whole
    if PACK:  # write zeros, too, behind the vector that is not full
        inside = inside | ((lanes >= _whole(room + _ALIGNED - 1)) & (lanes < _whole(count)))
    _copy(bucket, flat, address, at + lanes, place + lanes, inside, lanes < whole, divide, kind,
          PACK, KIND, DIVIDE, True)  # fmt: skip
    if whole < room:
        left = whole + tl.arange(0, _ALIGNED)
        filled = left < room
        _copy(bucket, flat, address, at + left, place + left, left < count if PACK else filled, filled, divide, kind,
              PACK, KIND, DIVIDE, False)  # fmt: skip


@triton.jit
def _pieces_by_vectors(bucket, flat, address, at, place, start, inner, count, room, divide, kind, PACK: tl.constexpr,
                       KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy a block of a shard that consists of runs.

    A vector's place is computed once for its elements, which are in the second dimension.
    """
    lanes = tl.arange(0, BLOCK // _ALIGNED) * _ALIGNED
    within = tl.arange(0, _ALIGNED)[None, :]
    places = place + _spread(start, lanes, inner, tl.num_programs(1), BLOCK)
    _copy(bucket, flat, address, at + lanes[:, None] + within, places[:, None] + within, (lanes < count)[:, None],
          (lanes < room)[:, None], divide, kind, PACK, KIND, DIVIDE, True)  # fmt: skip


@triton.jit
def _copy(bucket, flat, address, at, places, inside, filled, divide, kind, PACK: tl.constexpr, KIND: tl.constexpr,
          DIVIDE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Copy elements from ``places`` in a tensor to ``at`` in the bucket, or back.

    Only the elements that are ``inside`` are written. Those that are not ``filled`` are packed as zeros.
    """
    if PACK:
        value = _read(address, places, filled, kind, KIND, bucket.dtype.element_ty, ALIGNED)
        tl.store(bucket + at, _divided(value, divide, DIVIDE), mask=inside)
    else:
        value = _divided(tl.load(bucket + at, mask=inside, other=0.0), divide, DIVIDE)
        tl.store(flat + places, value.to(KIND), mask=inside)


@triton.jit
def _spread(start, lanes, inner, world, BLOCK: tl.constexpr):
    """The places of elements ``start + lanes`` of a shard of runs of ``inner`` elements, from its first element."""
    piece = start // inner
    left = tl.minimum((piece + 1) * inner - start, BLOCK).to(tl.int32)  # elements left in the block's first run
    later = tl.where(lanes < left, 0, 1 + (lanes - left) // tl.minimum(inner, BLOCK).to(tl.int32))
    return start + lanes + (piece + later) * inner * (world - 1)


@triton.jit
def _whole(elements):
    return elements // _ALIGNED * _ALIGNED


@triton.jit
def _read(address, places, filled, kind, KIND: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of a tensor, cast to ``TO``; zeros if they are not ``filled``.

    ``kind`` is the number of the tensor's dtype if ``KIND`` is None.
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
