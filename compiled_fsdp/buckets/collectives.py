"""Each bucket op as tensor operations and launches (``transport.py``), as its spec says (``spec.py``).

``lower.py`` records these calls into the graph. A bucket op that no pass lowers runs the same calls.

A flat bucket of gathers is one tensor, rank by rank: ``[world * elements of all its shards]``. A flat bucket of
reductions is packed the same way, so that each rank's part of every gradient is contiguous. If compiled_fsdp's kernels
pack the bucket, every shard begins at a multiple of 16 elements. A bucket of one parameter is that parameter's padded
tensor, so it needs no copy into or out of a bucket. A coalesced bucket is a list of such tensors. On GPUs one grouped
call sends them; on the CPU one collective follows the other, because gloo cannot group them.

A reduction may be an all-to-all, because gloo's reduce-scatter is an all-reduce inside and moves twice the bytes. Each
rank then receives one addend for its shard from every rank, and sums or averages the addends after the wait.

With replicas (HSDP) a bucket is reduced twice: a reduce-scatter over the ranks that shard the parameters, then an
all-reduce of the result over the replicas. If there is one shard only (``replicate``), there is the all-reduce alone.
With a working copy in each node (``ReduceSpec.within``) both reductions are reduce-scatters: in the node, then across.
Casts are part of packing and unpacking.

With a codec (``codec.py``) a bucket consists of bytes: packing encodes, unpacking decodes, offsets count bytes, and a
reduction is an all-to-all.

Process groups support few dtypes. A bucket of another dtype is sent as real numbers or as bytes (``wire_dtype``), but
offsets in it still count elements of the tensors' dtype.
"""

# Why: docs/design/communication.md, "Gloo reduces by all-to-all"
# Why: docs/design/graphs-and-passes.md, "Lowering records the eager functions"
# Why: docs/design/communication.md, "CPU gathers write into a given tensor"
# Why: docs/design/communication.md, "A codec is an op on a whole bucket"

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_fsdp.buckets import encode, transport  # noqa: F401  encode registers its ops
from compiled_fsdp.buckets.codec import byte_offsets
from compiled_fsdp.buckets.copies import add_in_ring_order
from compiled_fsdp.buckets.effects import add_accumulated, encode_with_feedback
from compiled_fsdp.buckets.kernels.layout import inner_of, places
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import LIBRARY, SINGLE, TORCH, TRITON, BucketSpec, Kind, ReadSpec, shard_size
from compiled_fsdp.buckets.transport import TRANSPORTS, GroupNames, off_wire, on_wire

ours = torch.ops.compiled_fsdp


def offsets(spec: BucketSpec) -> tuple[int, ...]:
    """The offset of each tensor in each rank's part of a bucket, in elements; with a codec in bytes.

    A flat bucket has one offset more at the end: the size of a rank's part.
    """
    if spec.coalesced:
        return (0,) * len(spec.numels)
    if spec.codec:
        return byte_offsets(spec.codec, spec.numels)
    return places(spec.numels) if spec.has_gaps else tuple(itertools.accumulate(spec.numels, initial=0))


# ---- gathers ---------------------------------------------------------------------------------------------------------
def to_compute(shard: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """A shard, cast to the compute dtype and moved to the compute device."""
    if device is not None and shard.device != device:
        shard = shard.to(device, non_blocking=True)
    return shard.to(dtype or shard.dtype)


def to_gather(
    shard: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None, codec: str = ""
) -> Tensor:
    """A shard as a collective sends it, in one dimension: in the compute dtype, on the compute device.

    With a codec: bytes, encoded from the shard in its own dtype.
    """
    if codec:
        return ours.encode.default([to_compute(shard, None, device)], 1, codec)
    return on_wire(to_compute(shard, dtype, device).reshape(-1))


def pack_shards(shards: Sequence[Tensor], spec: BucketSpec) -> list[Tensor]:
    """Pack padded shards: one flat tensor, or a tensor for each shard of a coalesced bucket; with a codec bytes."""
    if spec.coalesced:
        if spec.copier == TRITON:
            return cast_together(shards, spec.dtype)
        return [to_gather(shard, spec.dtype, spec.device, spec.codec) for shard in shards]
    if spec.codec:
        return [ours.encode.default([to_compute(shard, None, spec.device) for shard in shards], 1, spec.codec)]
    if spec.copier == TRITON:
        return [ours.pack_shards.default(shards, spec.dtype)]
    return [_cat([to_gather(shard, spec.dtype, spec.device) for shard in shards], 0, spec)]


def _cat(tensors: list[Tensor], dim: int, spec: BucketSpec) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return ours.cat_bucket.default(tensors, dim) if spec.copier == LIBRARY else torch.cat(tensors, dim)


def cast_together(shards: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Shards in ``dtype``, in one dimension. One kernel casts all shards of another dtype, into views of one tensor."""
    others = [shard for shard in shards if shard.dtype != dtype]
    numels = [shard.numel() for shard in others]
    packed = ours.pack_shards.default(others, dtype)
    pieces = iter([packed.narrow(0, place, numel) for place, numel in zip(places(numels), numels, strict=False)])
    return [shard.reshape(-1) if shard.dtype == dtype else next(pieces) for shard in shards]


def unpack_gather(bucket: Tensor, offset: int, spec: ReadSpec) -> Tensor:
    """The full parameter from a gathered bucket, contiguous.

    If the bucket holds several parameters, the result is a copy, so that it does not keep their memory alive.

    Args:
        bucket: the gathered bucket, ``[world * a rank's part]``.
        offset: where the shard begins in each rank's part: an element, with a codec a byte.
        spec: the parameter's shape, dtype and codec.
    """
    padded, size, world, dim = spec.shard_size, spec.size, spec.world, spec.dim
    numel = math.prod(padded)
    if spec.codec:
        bucket, offset = ours.decode.default(bucket, offset, numel, world, spec.codec, spec.dtype), 0
    ranks = off_wire(bucket, spec.dtype).view(world, -1)
    alone = ranks.shape[1] == numel
    piece = ranks if alone else ranks.narrow(1, offset, numel)
    if dim > 0:  # split evenly, so without padding
        full = piece.reshape(world, *padded).movedim(0, dim).reshape(size)
    else:
        full = piece.reshape(world * padded[0], *padded[1:])
        full = full if size[0] == world * padded[0] else full.narrow(0, 0, size[0])
    if not alone and (world == 1 or padded[dim] == 1):  # a view of the bucket: ``reshape`` had nothing to copy
        return full.clone(memory_format=torch.contiguous_format)
    return full.contiguous()  # as the op's fake says; with one element per rank it may be a strided view


def full_at(flat: Tensor, place: int, size: Sequence[int], world: int, dim: int = 0) -> Tensor:
    """The full parameter of shape ``size`` at element ``place`` of the result of ``unpack_fulls``; a view."""
    padded = [world * n if i == dim else n for i, n in enumerate(shard_size(size, world, dim))]
    return flat.narrow(0, place, math.prod(padded)).view(padded).narrow(0, 0, size[0])


def reshard(full: Tensor, world: int, rank: int, dim: int) -> Tensor:
    """The padded shard of rank ``rank`` of a full parameter, in a group of ``world`` ranks; a copy."""
    rows = shard_size(full.shape, world, dim)[dim]
    start = min(rank * rows, full.shape[dim])
    piece = full.narrow(dim, start, min(rows, full.shape[dim] - start))
    missing = rows - piece.shape[dim]
    if missing == 0:
        return piece.clone(memory_format=torch.contiguous_format)
    return F.pad(piece, [0, 0] * (full.dim() - 1 - dim) + [0, missing])


# ---- reductions ------------------------------------------------------------------------------------------------------
def pad_rows(grad: Tensor, rows: int) -> Tensor:
    """Pad ``[n, ...]`` to ``[rows, ...]`` with zeros at the end; returns ``grad`` itself if it has ``rows`` rows."""
    missing = rows - grad.shape[0]
    if missing == 0:
        return grad
    return F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, missing])


def by_rank(grad: Tensor, numel: int, world: int, dim: int = 0) -> Tensor:
    """A full gradient as ``[world, numel]``: one row for each rank, with its padded shard of ``numel`` elements."""
    if dim > 0:
        return grad.unflatten(dim, (world, -1)).movedim(dim, 0).reshape(world, -1)
    return pad_rows(grad, world * numel // math.prod(grad.shape[1:])).reshape(world, -1)


def by_parts(grad: Tensor, world: int, ranks: int, dim: int) -> Tensor:
    """A full gradient as ``[world, *shard]``: its padded shards, if ``ranks`` neighbours out of ``world`` reduce first.

    Their rank i gets the shards of ranks i, ranks + i, ... for a second reduction: 0, 2, 1, 3 if 2 of 4 ranks reduce.
    """
    shard = shard_size(grad.shape, world, dim)[dim]
    grad = grad if dim > 0 else pad_rows(grad, world * shard)
    return grad.unflatten(dim, (world // ranks, ranks, shard)).movedim((dim + 1, dim), (0, 1)).flatten(0, 1)


def pack_grads(grads: Sequence[Tensor], spec: BucketSpec, param_ids: Sequence[Tensor]) -> list[Tensor]:
    """Pack full gradients: one flat tensor, or a tensor for each gradient of a coalesced bucket.

    If the spec says so, the parameters' pending gradients (of earlier backwards) are added.
    """
    if not spec.coalesced:
        return [_pack_flat(grads, spec, param_ids)]
    sent: list[Tensor | None] = [None] * len(grads)
    if spec.copier == TRITON:
        sent = copy_together(grads, spec.numels, spec.dims, spec.world, spec.reduction)
    each = []
    for i, packed in enumerate(sent):
        if packed is None:
            alone = replace(spec, copier=TORCH, numels=spec.numels[i : i + 1], dims=spec.dims[i : i + 1])
            packed = _pack_flat(grads[i : i + 1], alone, param_ids[i : i + 1])
        each.append(packed)
    return each


def _pack_flat(grads: Sequence[Tensor], spec: BucketSpec, param_ids: Sequence[Tensor]) -> Tensor:
    if spec.codec:
        return _encode(grads, spec, param_ids)
    reduction, world = spec.reduction, spec.world
    dtype = added = getattr(torch, reduction.dtype)
    if spec.copier == TRITON:
        shards = [shard_size(grad.shape, world, dim) for grad, dim in zip(grads, spec.dims, strict=True)]
        inners = list(map(inner_of, shards, spec.dims))
        return ours.pack_grads.default(grads, spec.numels, inners, world, dtype, float(reduction.before))
    if reduction.adds_accumulated:  # like FSDP2, add gradients of a wider dtype in that dtype, and round the sum
        added = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), dtype)
    ranks = [by_rank(grad.to(added), n, world, dim) for grad, n, dim in zip(grads, spec.numels, spec.dims, strict=True)]
    packed = _cat(ranks, 1, spec)
    if reduction.adds_accumulated:
        if len(ranks) == 1:  # ``packed`` may be the gradient itself, which must not change
            packed = packed.clone()
        add_accumulated(packed, param_ids, spec.numels, False)
        packed = packed.to(dtype)
    return (packed if reduction.before == 1 else packed / reduction.before).reshape(-1)


def _encode(grads: Sequence[Tensor], spec: BucketSpec, param_ids: Sequence[Tensor]) -> Tensor:
    """Encode gradients to bytes, with the pending gradients and the residuals of earlier buckets, if any, added."""
    reduction, world, numels = spec.reduction, spec.world, spec.numels
    if reduction.adds_accumulated or reduction.before != 1:
        packed = _pack_flat(grads, replace(spec, codec="", copier=TORCH), param_ids).view(world, -1)
        ranks = list(packed.split(list(numels), 1))
    else:
        ranks = [by_rank(grad, n, world, dim) for grad, n, dim in zip(grads, numels, spec.dims, strict=True)]
    if reduction.error_feedback:
        return encode_with_feedback(ranks, param_ids, world, spec.codec)
    return ours.encode.default(ranks, world, spec.codec)


def copy_together(
    grads: Sequence[Tensor], numels: Sequence[int], dims: Sequence[int], world: int, spec: ReduceSpec
) -> list[Tensor | None]:
    """Copy gradients into one tensor with one kernel, and return them as views of it.

    An entry is None for a gradient that needs no copy, is not contiguous, or is not sharded on its first dimension. If
    only one gradient needs a copy, all entries are None.
    """
    dtype = getattr(torch, spec.dtype)
    copied = [
        i
        for i, (grad, numel, dim) in enumerate(zip(grads, numels, dims, strict=True))
        if dim == 0
        and grad.is_contiguous()
        and (grad.dtype != dtype or grad.numel() != world * numel or spec.before != 1)
    ]
    sent: list[Tensor | None] = [None] * len(grads)
    if len(copied) > 1:  # a single copy is fused into the kernel that computes the gradient
        full = [world * numels[i] for i in copied]
        packed = ours.pack_grads.default([grads[i] for i in copied], full, full, 1, dtype, float(spec.before))
        for i, place, numel in zip(copied, places(full), full, strict=False):
            sent[i] = packed.narrow(0, place, numel)
    return sent


def add_pieces(bucket: Tensor, num_pieces: int, rank: int, spec: ReduceSpec) -> Tensor:
    """Add up a bucket that an all-to-all has left as ``num_pieces`` equal addends, one from each rank.

    The order is that of ``copies.add_in_ring_order``. With one addend the bucket is reduced already.
    """
    if num_pieces == 1:
        return bucket
    return add_in_ring_order(bucket.view(num_pieces, -1), rank, average=spec.divide is None)


def _decoded(bucket: Tensor, numels: Sequence[int], num_pieces: int, rank: int, spec: ReduceSpec) -> Tensor:
    """Decode and add up the addends of shards of ``numels`` elements; returns one tensor of the spec's dtype."""
    dtype, average, sums = getattr(torch, spec.dtype), spec.divide is None, []
    for place, numel in zip(byte_offsets(spec.codec, numels), numels, strict=False):
        sums.append(ours.decode_sum.default(bucket, place, numel, num_pieces, rank, average, spec.codec, dtype))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def pack_again(bucket: Tensor, spec: BucketSpec, param_ids: Sequence[Tensor], rank: int) -> Tensor:
    """Pack a bucket for its second reduction, after the wait for the first one."""
    reduction, parts = spec.reduction, spec.world if spec.reduction.within else 1
    numels = tuple([parts * numel for numel in spec.numels])
    if spec.codec:
        piece = _decoded(bucket, numels, spec.pieces, rank, reduction)
    else:
        piece = add_pieces(off_wire(bucket, getattr(torch, reduction.dtype)), spec.pieces, rank, reduction)
    if reduction.adds_accumulated:
        piece = piece.clone() if spec.pieces == 1 and not spec.codec else piece  # do not write to ``bucket``
        add_accumulated(piece, param_ids, numels, True)
    if parts == 1 or len(numels) == 1:
        return piece
    return _cat([part.view(parts, -1) for part in piece.split(numels)], 1, spec).reshape(-1)


def unpack_reduce(
    bucket: Tensor, offset: int, size: Sequence[int], dtype: torch.dtype, spec: ReduceSpec, num_pieces: int = 1,
    rank: int = 0,
) -> Tensor:  # fmt: skip
    """The reduced gradient of one padded shard, of shape ``size`` and dtype ``dtype``.

    Args:
        bucket: the received bucket: ``num_pieces`` addends of each gradient (see ``add_pieces``).
        offset: where the gradient begins in each addend: an element; if the addends are encoded, a byte.
        spec: how the bucket is reduced.
        rank: this rank's number in the group, which decides the order of the addends.
    """
    numel = math.prod(size)
    if spec.codec and bucket.dtype is torch.uint8:  # else decoded before the second reduction
        average, codec = spec.divide is None, spec.codec
        piece = ours.decode_sum.default(bucket, offset, numel, num_pieces, rank, average, codec, torch.float32)
    elif num_pieces > 1:
        pieces = off_wire(bucket, getattr(torch, spec.dtype)).view(num_pieces, -1)
        piece = add_in_ring_order(pieces.narrow(1, offset, numel), rank, average=spec.divide is None)
    else:
        piece = off_wire(bucket, getattr(torch, spec.dtype)).narrow(0, offset, numel)
    if spec.after != 1 and spec.sync is not GradSync.SHARDS_ONLY:  # else divided after the second reduction
        piece = piece / spec.after
    return piece.to(dtype).view(size)


def shard_at(flat: Tensor, place: int, size: Sequence[int]) -> Tensor:
    """The gradient of a padded shard of shape ``size`` at element ``place`` of ``unpack_shards``' result; a view."""
    return flat.narrow(0, place, math.prod(size)).view(size)


def reduce_alone(grad: Tensor, param_ids: Sequence[Tensor], spec: ReadSpec, dtype: torch.dtype) -> Tensor:
    """Reduce a gradient in a group of one rank: cast it, add the pending gradient, divide by the user's divisor."""
    bucket = _bucket_of_one(spec, "reduce_scatter")
    return unpack_reduce(_pack_flat([grad], bucket, param_ids), 0, spec.shard_size, dtype, spec.reduction)


# ---- launches --------------------------------------------------------------------------------------------------------
def launch(
    tensors: Sequence[Tensor], param_ids: Sequence[Tensor], spec: BucketSpec, groups: GroupNames
) -> list[Tensor]:
    """Start the collective of a bucket.

    Args:
        tensors: padded shards to gather, full gradients to reduce, or one reduced bucket to reduce again.
        param_ids: ids of the gradients' parameters, by which their pending gradients and residuals are found.
        spec: how the tensors are sent.
        groups: the process groups that send them.

    Returns: one flat tensor, or a tensor for each of a coalesced bucket. They are valid after a wait.
    """
    if spec.kind.supplies:
        sent = pack_shards(tensors, spec)
    elif TRANSPORTS[spec.transport].is_second:
        sent = [pack_again(tensors[0], spec, param_ids, groups.rank)]
    else:
        sent = pack_grads(tensors, spec, param_ids)
    return transport.launch(sent, spec, groups)


# ---- one tensor, from launch to result -------------------------------------------------------------------------------
Wait = Callable[[Tensor], Tensor]


def unshard(shard: Tensor, spec: ReadSpec, groups: GroupNames, wait: Wait = transport.wait) -> Tensor:
    """Gather one full parameter from its padded shards: launch, wait and unpack."""
    numels = (shard.numel(),)
    bucket = BucketSpec(
        Kind.GATHER, SINGLE, "all_gather", spec.world, numels, spec.group_id, dtype=spec.dtype, codec=spec.codec,
        device=spec.device,
    )  # fmt: skip
    (gathered,) = launch([shard], (), bucket, groups)
    return unpack_gather(wait(gathered), 0, spec)


def reduce_grad(
    grad: Tensor, param_ids: Sequence[Tensor], spec: ReadSpec, dtype: torch.dtype, groups: GroupNames,
    wait: Wait = transport.wait, announce: Callable[[str], object] = str,
) -> Tensor:  # fmt: skip
    """Reduce one full gradient as its spec says; returns this rank's part, of ``dtype`` (``ReadSpec.reduced_size``).

    ``announce`` is called before each launch, with "reduce" or "all_reduce".
    """
    reduction = spec.reduction
    again = groups.replicate is not None and reduction.sync is GradSync.ALL
    by = transport.reduces_by("reduce_scatter", spec.world, codec=reduction.codec, over_replicas=again)
    bucket = _bucket_of_one(spec, by)
    announce("all_reduce" if by == "all_reduce" else "reduce")
    (reduced,) = launch([grad], param_ids, bucket, groups)
    reduced, pieces = wait(reduced), spec.world if reduction.codec else 1
    if again and by != "all_reduce":
        announce("reduce" if reduction.within else "all_reduce")
        (reduced,) = launch([reduced], param_ids, transport.reduced_again(bucket, spec.parts, pieces), groups)
        reduced, pieces = wait(reduced), 1
    return unpack_reduce(reduced, 0, spec.reduced_size, dtype, reduction, pieces, groups.rank if pieces > 1 else 0)


def _bucket_of_one(spec: ReadSpec, by: str) -> BucketSpec:
    """The spec of a bucket that reduces the gradient of one parameter by the transport ``by``."""
    numels, codec = (math.prod(spec.shard_size),), spec.reduction.codec
    return BucketSpec(
        Kind.REDUCE, SINGLE, by, spec.world, numels, spec.group_id, (spec.dim,), reduce=spec.reduce, codec=codec
    )
