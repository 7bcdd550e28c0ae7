"""Shapes and dtypes of what the ops return: they run while a graph is traced, with tensors that have no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.comm.reduction import Reduction


def unshard(
    shard: Tensor,
    gate: Any,
    slot: Any,
    size: Any,
    world: int,
    mesh: int,
    dim: int,
    block: int,
    position: int,
    keep: bool,
    dtype: torch.dtype,
    reduction: str,
    again: int = 0,
    read: int = -1,
    device: Any = None,
) -> Tensor:
    """The full parameter, ``size``, of ``dtype``."""
    return shard.new_empty(size, dtype=dtype, device=device)


def reduce_grad(
    grad: Tensor,
    slot: Any,
    shard_size: Any,
    world: int,
    mesh: int,
    dim: int,
    dtype: torch.dtype,
    reduction: str,
    read: int = -1,
    device: Any = None,
) -> Tensor:
    """The shard's reduced gradient, ``shard_size``, of ``dtype``."""
    return grad.new_empty(shard_size, dtype=dtype, device=device)


def launch_gather(
    shards: Any, slot: Any, world: int, mesh: int, dtype: torch.dtype, reads: Any, device: Any = None
) -> Tensor:
    """A flat bucket, ``[world * the shards' elements]``, of ``dtype``."""
    return shards[0].new_empty([world * sum(shard.numel() for shard in shards)], dtype=dtype, device=device)


def launch_gathers(
    shards: Any, slot: Any, world: int, mesh: int, dtype: torch.dtype, reads: Any, device: Any = None
) -> list[Tensor]:
    """A tensor for each shard, ``[world * its elements]``, of ``dtype``."""
    return [shard.new_empty([world * shard.numel()], dtype=dtype, device=device) for shard in shards]


def launch_reduce(grads: Any, slots: Any, numels: Any, *rest: Any, **named: Any) -> Tensor:
    """A flat bucket, ``[sum of numels]``, times ``world`` before an all-to-all's pieces are added; of the reduction's dtype."""
    return launch_reduces(grads[:1], slots, [sum(numels)], *rest, **named)[0]


def launch_reduces(
    grads: Any,
    slots: Any,
    numels: Any,
    dims: Any,
    world: int,
    mesh: int,
    reduction: str,
    reads: Any,
    exchange: bool = False,
) -> list[Tensor]:
    """A tensor for each gradient, ``[numel]``, as in ``launch_reduce``."""
    dtype, parts = getattr(torch, Reduction.parse(reduction).dtype), world if exchange else 1
    return [g.new_empty([numel * parts], dtype=dtype) for g, numel in zip(grads, numels, strict=True)]


def unpack_reduce(
    bucket: Tensor,
    offset: int,
    shard_size: Any,
    dtype: torch.dtype,
    reduction: str,
    parts: int = 1,
    mesh: int = 0,
    device: Any = None,
) -> Tensor:
    """One shard's reduced gradient, ``shard_size``, of ``dtype``."""
    return bucket.new_empty(shard_size, dtype=dtype, device=device)
