"""Shapes and dtypes of what the ops return: they run while a graph is traced, with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.codec import nbytes
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec, shard_size
from compiled_fsdp.buckets.transport import TRANSPORTS


def unshard(shard: Tensor, gate: Any, param_id: Any, spec_text: str, *_: Any) -> Tensor:
    """The full parameter, ``size``, of ``dtype``."""
    spec = ReadSpec.parse(spec_text)
    return shard.new_empty(spec.size, dtype=spec.dtype, device=spec.device)


def reduce_grad(grad: Tensor, param_id: Any, spec_text: str, dtype: torch.dtype, read: int = -1) -> Tensor:
    """The shard's reduced gradient, ``shard_size``, of ``dtype``."""
    return grad.new_empty(ReadSpec.parse(spec_text).shard_size, dtype=dtype)


def follow_unshard(
    shard: Tensor, param_id: Any, size: Any, dtype: torch.dtype, kind: str, device: Any = None
) -> Tensor:
    """The full parameter, ``size``, of ``dtype``."""
    return shard.new_empty(size, dtype=dtype, device=device)


def follow_reduce(grad: Tensor, param_id: Any, dtype: torch.dtype, reduce: str) -> Tensor:
    """``[]``, of ``dtype``."""
    return grad.new_empty((), dtype=dtype)


def like_first(first: Tensor, *_: Any) -> Tensor:
    """As the first argument."""
    return torch.empty_like(first)


def accumulate(grad: Tensor, param_id: Any) -> Tensor:
    """``[]``, of float32, as the gate of what waits."""
    return grad.new_empty((), dtype=torch.float32)


def reshard(full: Tensor, world: int, group_id: int, dim: int) -> Tensor:
    """A padded shard of ``full`` for ``world`` ranks."""
    return full.new_empty(shard_size(full.shape, world, dim))


def gather_full(shards: Any, param_ids: Any, sizes: Any, world: int, dtype: torch.dtype) -> list[Tensor]:
    """The full parameters; ``sizes`` has their shapes one after the other."""
    fulls, at = [], 0
    for shard in shards:
        fulls.append(shard.new_empty(sizes[at : at + shard.dim()], dtype=dtype))
        at += shard.dim()
    return fulls


def launch(tensors: Any, param_ids: Any, spec_text: str) -> list[Tensor]:
    """One flat bucket, or a tensor for each of ``tensors``, in the dtype that is sent: with a codec bytes.

    Of a gather that is what all ranks have sent, of a reduction one shard, or everyone's pieces of it. What goes on
    over replicas is one shard, decoded. A reduction that ends outside of the graph gives a zero, ``[]``.
    """
    spec = BucketSpec.parse(spec_text)
    like = tensors[0]
    if not spec.kind.supplies and spec.edge is not None:
        return [like.new_empty((), dtype=spec.dtype)]
    if spec.transport == "all_reduce":
        if spec.codec:
            return [like.new_empty([sum(spec.numels)], dtype=getattr(torch, spec.reduction.dtype))]
        return [like.new_empty([like.numel() // spec.pieces])]
    rows = spec.numels if spec.coalesced else (collectives.offsets(spec)[-1],)
    pieces = spec.world if spec.kind.supplies or TRANSPORTS[spec.transport].leaves_pieces else 1
    if spec.codec:
        sizes = [nbytes(spec.codec, row) for row in rows] if spec.coalesced else rows
        return [like.new_empty([pieces * size], dtype=torch.uint8, device=spec.device) for size in sizes]
    dtype = spec.dtype if spec.kind.supplies else getattr(torch, spec.reduction.dtype)
    sent = transport.wire_dtype(dtype) if spec.kind.supplies or dtype.is_complex else dtype
    scale = dtype.itemsize // sent.itemsize
    return [like.new_empty([pieces * row * scale], dtype=sent, device=spec.device) for row in rows]


def unpack_gather(
    bucket: Tensor, offset: int, size: Any, world: int, dim: int = 0, codec: str = "", dtype: Any = None
) -> Tensor:
    """The full parameter, ``size``; of ``dtype``, or of the bucket's."""
    return bucket.new_empty(size, dtype=dtype)


def unpack_reduce(
    bucket: Tensor,
    offset: int,
    shard_size: Any,
    dtype: torch.dtype,
    reduce: str,
    num_pieces: int = 1,
    group_id: int = 0,
) -> Tensor:
    """One shard's reduced gradient, ``shard_size``, of ``dtype``."""
    return bucket.new_empty(shard_size, dtype=dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "unshard": unshard,
    "follow_unshard": follow_unshard,
    "follow_reduce": follow_reduce,
    "reduce_grad": reduce_grad,
    "use": like_first,
    "zero_grad": like_first,
    "retain": like_first,
    "retained": torch.ops.aten.alias.default,
    "share": like_first,
    "reshard": reshard,
    "gather_full": gather_full,
    "accumulate": accumulate,
    "launch": launch,
    "unpack_gather": unpack_gather,
    "unpack_reduce": unpack_reduce,
}
"""By the op's name."""
