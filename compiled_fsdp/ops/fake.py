"""Fake implementations of the ops: while a graph is traced they return tensors without memory, of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.codec import nbytes
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec, shard_size
from compiled_fsdp.buckets.transport import TRANSPORTS


def full(source: Tensor, _: Any, spec_text: str, *others: Any) -> Tensor:
    """The full parameter, of the spec's ``size`` and ``dtype``, from its shard or from a bucket."""
    spec = ReadSpec.parse(spec_text)
    return source.new_empty(spec.size, dtype=spec.dtype, device=spec.device)


def unshard(shard: Tensor, gate: Any, *others: Any) -> Tensor:
    """The full parameter."""
    return full(shard, *others)


def reduced(source: Tensor, _: Any, spec_text: str, dtype: torch.dtype, *others: Any) -> Tensor:
    """This rank's part of the reduced gradient, of ``dtype``, from the full gradient or from a bucket."""
    return source.new_empty(ReadSpec.parse(spec_text).reduced_size, dtype=dtype)


def follow_reduce(grad: Tensor, param_id: Any, dtype: torch.dtype, reduce: str) -> Tensor:
    """A scalar, ``[]``, of ``dtype``."""
    return grad.new_empty((), dtype=dtype)


def like_first(first: Tensor, *_: Any) -> Tensor:
    """A tensor like the first argument."""
    return torch.empty_like(first)


def accumulate(grad: Tensor, *_: Any) -> Tensor:
    """A scalar, ``[]``, of float32, like the gate of gradients that are not reduced."""
    return grad.new_empty((), dtype=torch.float32)


def reshard(full: Tensor, world: int, group_id: int, dim: int) -> Tensor:
    """A padded shard of ``full`` for ``world`` ranks."""
    return full.new_empty(shard_size(full.shape, world, dim))


def retain(full: Tensor, spec_text: str = "") -> Tensor:
    """The full parameter, or a part of it for the group of the spec."""
    return full.new_empty(ReadSpec.parse(spec_text).shard_size) if spec_text else torch.empty_like(full)


def gather_full(*given: Any) -> list[Tensor]:
    """The full parameters."""
    return [full(*of_one) for of_one in zip(*given, strict=True)]


def launch(tensors: Any, param_ids: Any, spec_text: str) -> list[Tensor]:
    """The received bucket: one flat tensor, or one for each of ``tensors`` if the bucket is coalesced.

    It has the dtype that is sent, bytes with a codec. A gather receives the shards of all ranks. A reduction receives
    one shard, or with an all-to-all each rank's part of the sum for that shard. A second reduction receives one shard,
    decoded, or these parts. A reduction that ends outside of the graph returns a zero, ``[]``.
    """
    spec = BucketSpec.parse(spec_text)
    like = tensors[0]
    if not spec.kind.supplies and spec.edge is not None:
        return [like.new_empty((), dtype=spec.dtype)]
    if spec.transport == "all_reduce_shards":
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


FAKES: dict[str, Callable[..., Any]] = {
    "unshard": unshard,
    "follow_unshard": full,
    "follow_reduce": follow_reduce,
    "reduce_grad": reduced,
    "use": like_first,
    "zero_grad": like_first,
    "retain": retain,
    "retained": torch.ops.aten.alias.default,
    "share": like_first,
    "reshard": reshard,
    "gather_full": gather_full,
    "accumulate": accumulate,
    "launch": launch,
    "unpack_gather": full,
    "unpack_reduce": reduced,
}
"""The fake implementations by the op's name."""
