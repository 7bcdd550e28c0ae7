"""Each bucket op in terms of tensor operations and functional collectives.

``lower.py`` records these calls into the graph; they are also what runs where nothing lowers a bucket op.

A flat bucket of gathers is one tensor, rank by rank: ``[world * sum of the shards' numbers of elements]``. One of
reductions is packed the same way, so that each rank's piece of every gradient is contiguous. With one parameter in it a
bucket is that parameter's padded tensor, and neither packing nor unpacking copies. A coalesced bucket is a list of such
tensors: one grouped call on GPUs; on the CPU, where gloo groups nothing, collectives one behind the other.

An exchanged reduction is an all-to-all that leaves each rank with everyone's piece of its shard, which ``unpack_reduce``
averages: gloo's reduce-scatter is an all-reduce inside and moves twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

c10d = torch.ops._c10d_functional


def pad_rows(grad: Tensor, rows: int) -> Tensor:
    """``[n, ...]`` to ``[rows, ...]``, zeros at the end; ``grad`` itself where nothing is missing."""
    missing = rows - grad.shape[0]
    if missing == 0:
        return grad
    return F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, missing])


MOST_ADDED = 16
"""Ranks whose pieces are added one by one; with more, graphs would be mostly additions."""


def launch_gather(shards: Sequence[Tensor], world: int, group: str) -> Tensor:
    """Start gathering padded shards as one flat bucket; to be waited for."""
    flat = [shard.reshape(-1) for shard in shards]
    packed = flat[0] if len(flat) == 1 else torch.cat(flat)
    if packed.device.type == "cpu":
        # gloo: two functional gathers in flight, which run through its coalesced gather, corrupted the heap now and then
        out = packed.new_empty(world * packed.numel())
        return c10d.all_gather_into_tensor_out.default(packed, world, group, out=out)
    return c10d.all_gather_into_tensor.default(packed, world, group)


def wait(bucket: Tensor) -> Tensor:
    """The launched bucket, once its collective is done."""
    return c10d.wait_tensor.default(bucket)


def unpack_gather(bucket: Tensor, offset: int, size: Sequence[int], world: int) -> Tensor:
    """The full parameter of shape ``size`` whose shards begin at element ``offset`` of each rank's part of ``bucket``."""
    rest = list(size[1:])
    rows = -(-size[0] // world)
    numel = rows * math.prod(rest)
    ranks = bucket.view(world, -1)
    piece = ranks if ranks.shape[1] == numel else ranks[:, offset : offset + numel]
    full = piece.reshape(world * rows, *rest)
    return full if size[0] == world * rows else full[: size[0]]


def launch_gathers(shards: Sequence[Tensor], world: int, group: str) -> list[Tensor]:
    """Start gathering padded shards as one coalesced bucket; each result is to be waited for."""
    if shards[0].device.type == "cpu":
        return [launch_gather([shard], world, group) for shard in shards]
    return c10d.all_gather_into_tensor_coalesced.default([shard.reshape(-1) for shard in shards], world, group)


def launch_reduces(
    grads: Sequence[Tensor], numels: Sequence[int], world: int, group: str, exchange: bool = False
) -> list[Tensor]:
    """Start averaging full gradients as one coalesced bucket; each result is to be waited for."""
    if grads[0].device.type == "cpu" or exchange:
        return [
            launch_reduce([grad], [numel], world, group, exchange) for grad, numel in zip(grads, numels, strict=True)
        ]
    packed = [
        pad_rows(grad, world * numel // math.prod(grad.shape[1:])).reshape(-1)
        for grad, numel in zip(grads, numels, strict=True)
    ]
    return c10d.reduce_scatter_tensor_coalesced.default(packed, "avg", world, group)


def launch_reduce(
    grads: Sequence[Tensor], numels: Sequence[int], world: int, group: str, exchange: bool = False
) -> Tensor:
    """Start averaging full gradients as one flat bucket; ``numels`` are their padded shards' numbers of elements."""
    ranks = []
    for grad, numel in zip(grads, numels, strict=True):
        rows = world * numel // math.prod(grad.shape[1:])
        ranks.append(pad_rows(grad, rows).reshape(world, -1))
    packed = ranks[0] if len(ranks) == 1 else torch.cat(ranks, 1)
    if exchange:
        piece = packed.numel() // world
        return c10d.all_to_all_single.default(packed.reshape(-1), [piece] * world, [piece] * world, group)
    return c10d.reduce_scatter_tensor.default(packed.reshape(-1), "avg", world, group)


def unpack_reduce(bucket: Tensor, offset: int, shard_size: Sequence[int], parts: int = 1, rank: int = 0) -> Tensor:
    """The averaged gradient of one padded shard, which begins at element ``offset`` of ``bucket``; of each of its ``parts``
    equal parts, one a rank, where an all-to-all left them to be averaged here. ``rank`` is this one's.

    They are added in the order of gloo's ring, from the rank before this one downwards, so that nearly all sums are bit for bit
    those of its reduce-scatter.
    """
    numel = math.prod(shard_size)
    if parts == 1:
        return bucket[offset : offset + numel].view(shard_size)
    pieces = bucket.view(parts, -1)[:, offset : offset + numel]
    if parts > MOST_ADDED:
        return pieces.mean(0).view(shard_size)
    total = pieces[(rank - 1) % parts]
    for behind in range(2, parts + 1):
        total = total + pieces[(rank - behind) % parts]
    return (total / parts).view(shard_size)
