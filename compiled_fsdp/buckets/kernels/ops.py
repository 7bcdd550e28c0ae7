"""Ops that pack and unpack a bucket in one launch: on CUDA by the kernel, elsewhere by torch's own operations.

    pack_shards    padded shards, each cast           ->  [row], at ``layout.places``
    unpack_fulls   a gathered bucket [world * row]    ->  full, padded parameters, flat, at ``layout.places``
    pack_grads     full gradients, cast and divided   ->  [world * row], each rank's padded shards as in ``pack_shards``
    unpack_shards  a reduced bucket [row], divided    ->  gradients of shards, cast, flat, at ``layout.places``

``numels`` are the elements of the padded shards, ``inners`` those of the shards' runs (``layout.py``). Each op
allocates one tensor. Tensors that are not contiguous are copied before they are packed.
"""

# Why: docs/design/graphs-and-passes.md, "One Triton kernel copies a whole bucket"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.kernels import layout

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# unsafe because the ops make tables of addresses while they run
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define("pack_shards(Tensor[] shards, ScalarType dtype) -> Tensor", tags=_UNSAFE)
_lib.define("unpack_fulls(Tensor bucket, int[] offsets, int[] numels, int[] inners, int world) -> Tensor", tags=_UNSAFE)
_lib.define(
    "pack_grads(Tensor[] grads, int[] numels, int[] inners, int world, ScalarType dtype, float divide) -> Tensor",
    tags=_UNSAFE,
)
_lib.define(
    "unpack_shards(Tensor bucket, int[] offsets, int[] numels, ScalarType dtype, float divide) -> Tensor", tags=_UNSAFE
)


def _pack_shards(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([_padded(shard.reshape(-1).to(dtype)) for shard in shards])


def _padded(rows: Tensor) -> Tensor:
    """``[.., n]``, padded with zeros up to the place of the next tensor."""
    return torch.nn.functional.pad(rows, [0, layout.aligned(rows.shape[-1]) - rows.shape[-1]])


def _unpack_fulls(
    bucket: Tensor, offsets: Sequence[int], numels: Sequence[int], inners: Sequence[int], world: int
) -> Tensor:
    segments = layout.shards_of(bucket.numel(), tuple(offsets), tuple(numels), tuple(inners), world)
    flat, ranks = bucket.new_empty(segments.places[-1]), bucket.view(world, -1)
    for place, offset, numel, inner in zip(segments.places, offsets, numels, inners, strict=False):
        pieces = ranks[:, offset : offset + numel].unflatten(1, (-1, inner)) if numel else ranks[:, :0]
        flat[place : place + world * numel] = pieces.transpose(0, 1).reshape(-1)
    return flat


def _pack_grads(
    grads: Sequence[Tensor], numels: Sequence[int], inners: Sequence[int], world: int, dtype: torch.dtype, divide: float
) -> Tensor:
    rows = []
    for grad, numel, inner in zip(grads, numels, inners, strict=True):
        flat = torch.nn.functional.pad(grad.reshape(-1).to(dtype), [0, world * numel - grad.numel()])
        rows.append(_padded(flat.view(-1, world, max(inner, 1)).transpose(0, 1).reshape(world, -1)))
    bucket = torch.cat(rows, 1).reshape(-1)
    return bucket if divide == 1 else bucket / divide


def _unpack_shards(
    bucket: Tensor, offsets: Sequence[int], numels: Sequence[int], dtype: torch.dtype, divide: float
) -> Tensor:
    places = layout.places(numels)
    flat = bucket.new_empty(places[-1], dtype=dtype)
    for place, offset, numel in zip(places, offsets, numels, strict=False):
        piece = bucket[offset : offset + numel]
        flat[place : place + numel] = piece if divide == 1 else piece / divide
    return flat


# ---- by the kernel ---------------------------------------------------------------------------------------------------
def _pack_shards_by_kernel(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    from compiled_fsdp.buckets.kernels import copy  # imports Triton, which not every platform has

    segments = layout.packed(tuple([shard.numel() for shard in shards]))
    bucket = shards[0].new_empty(segments.row, dtype=dtype)
    copy.pack([shard.contiguous() for shard in shards], bucket, segments)
    return bucket


def _unpack_fulls_by_kernel(
    bucket: Tensor, offsets: Sequence[int], numels: Sequence[int], inners: Sequence[int], world: int
) -> Tensor:
    from compiled_fsdp.buckets.kernels import copy

    segments = layout.shards_of(bucket.numel(), tuple(offsets), tuple(numels), tuple(inners), world)
    flat = bucket.new_empty(segments.places[-1])
    copy.unpack(bucket, flat, segments)
    return flat


def _pack_grads_by_kernel(
    grads: Sequence[Tensor], numels: Sequence[int], inners: Sequence[int], world: int, dtype: torch.dtype, divide: float
) -> Tensor:
    from compiled_fsdp.buckets.kernels import copy

    segments = layout.packed(tuple(numels), tuple(inners), tuple([grad.numel() for grad in grads]), world)
    bucket = grads[0].new_empty(world * segments.row, dtype=dtype)
    copy.pack([grad.contiguous() for grad in grads], bucket, segments, divide)
    return bucket


def _unpack_shards_by_kernel(
    bucket: Tensor, offsets: Sequence[int], numels: Sequence[int], dtype: torch.dtype, divide: float
) -> Tensor:
    from compiled_fsdp.buckets.kernels import copy

    segments = layout.shards_of(bucket.numel(), tuple(offsets), tuple(numels), tuple(numels), 1)
    flat = bucket.new_empty(segments.places[-1], dtype=dtype)
    copy.unpack(bucket, flat, segments, divide)
    return flat


# ---- shapes ----------------------------------------------------------------------------------------------------------
def _register(
    name: str, run: Callable[..., Tensor], by_kernel: Callable[..., Tensor], fake: Callable[..., Any]
) -> None:
    _lib.impl(name, run, "CPU")
    _lib.impl(name, by_kernel, "CUDA")
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


_register(
    "pack_shards",
    _pack_shards,
    _pack_shards_by_kernel,
    lambda shards, dtype: shards[0].new_empty(layout.places([shard.numel() for shard in shards])[-1], dtype=dtype),
)
_register(
    "unpack_fulls",
    _unpack_fulls,
    _unpack_fulls_by_kernel,
    lambda bucket, offsets, numels, inners, world: bucket.new_empty(layout.places([world * n for n in numels])[-1]),
)
_register(
    "pack_grads",
    _pack_grads,
    _pack_grads_by_kernel,
    lambda grads, numels, inners, world, dtype, divide: grads[0].new_empty(
        world * layout.places(numels)[-1], dtype=dtype
    ),
)
_register(
    "unpack_shards",
    _unpack_shards,
    _unpack_shards_by_kernel,
    lambda bucket, offsets, numels, dtype, divide: bucket.new_empty(layout.places(numels)[-1], dtype=dtype),
)
