"""Each bucket op in terms of tensor operations and functional collectives.

``lower.py`` records these calls into the graph; they are also what runs where nothing lowers a bucket op.

A bucket of gathers is one flat tensor, rank by rank: ``[world * sum of the shards' numbers of elements]``. A bucket of
reductions is packed the same way, so that each rank's piece of every gradient is contiguous. With one parameter in it a
bucket is that parameter's padded tensor, and neither packing nor unpacking copies.
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


def launch_reduce(grads: Sequence[Tensor], numels: Sequence[int], world: int, group: str) -> Tensor:
    """Start averaging full gradients as one flat bucket; ``numels`` are their padded shards' numbers of elements."""
    ranks = []
    for grad, numel in zip(grads, numels, strict=True):
        rows = world * numel // math.prod(grad.shape[1:])
        ranks.append(pad_rows(grad, rows).reshape(world, -1))
    packed = ranks[0] if len(ranks) == 1 else torch.cat(ranks, 1)
    return c10d.reduce_scatter_tensor.default(packed.reshape(-1), "avg", world, group)


def unpack_reduce(bucket: Tensor, offset: int, shard_size: Sequence[int]) -> Tensor:
    """The averaged gradient of one padded shard, which begins at element ``offset`` of ``bucket``."""
    return bucket[offset : offset + math.prod(shard_size)].view(shard_size)
