"""Shapes and dtypes of what the ops return: they run while a graph is traced, with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.codec import nbytes
from compiled_fsdp.buckets.encode import fake_encode
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.ops.schema import ReduceArgs, UnshardArgs


def unshard(*args: Any) -> Tensor:
    """The full parameter, ``size``, of ``dtype``."""
    given = UnshardArgs(*args)
    return given.shard.new_empty(given.size, dtype=given.dtype, device=given.device)


def reduce_grad(grad: Tensor, param_id: Any, *args: Any) -> Tensor:
    """The shard's reduced gradient, ``shard_size``, of ``dtype``."""
    given = ReduceArgs(*args)
    return grad.new_empty(given.shard_size, dtype=given.dtype)


def follow_unshard(
    shard: Tensor, param_id: Any, size: Any, dtype: torch.dtype, kind: str, device: Any = None
) -> Tensor:
    """The full parameter, ``size``, of ``dtype``."""
    return shard.new_empty(size, dtype=dtype, device=device)


def follow_reduce(grad: Tensor, param_id: Any, dtype: torch.dtype, spec_text: str) -> Tensor:
    """``[]``, of ``dtype``."""
    return grad.new_empty((), dtype=dtype)


def like_first(first: Tensor, *_: Any) -> Tensor:
    """As the first argument."""
    return torch.empty_like(first)


def accumulate_grad(param_id: int, grad: Tensor, *_: Any) -> Tensor:
    """What stands for an effect outside of the graph: ``[]``, of the gradient's dtype."""
    return grad.new_empty(())


def accumulate(grad: Tensor, param_id: Any) -> Tensor:
    """``[]``, of float32, as the gate of what waits."""
    return grad.new_empty((), dtype=torch.float32)


def reshard(full: Tensor, world: int, group_id: int, dim: int) -> Tensor:
    """A padded shard of ``full`` for ``world`` ranks."""
    return full.new_empty(collectives.shard_size(full.shape, world, dim))


def gather_full(shards: Any, param_ids: Any, sizes: Any, world: int, dtype: torch.dtype) -> list[Tensor]:
    """The full parameters; ``sizes`` has their shapes one after the other."""
    fulls, at = [], 0
    for shard in shards:
        fulls.append(shard.new_empty(sizes[at : at + shard.dim()], dtype=dtype))
        at += shard.dim()
    return fulls


def launch_gather(
    shards: Any, param_id: Any, world: int, group_id: int, dtype: torch.dtype, reads: Any, device: Any = None,
    by_kernel: bool = False, codec: str = "",
) -> Tensor:  # fmt: skip
    """A flat bucket of ``row`` elements of ``dtype`` a rank, in the dtype that sends them; with a codec of bytes."""
    row = collectives.offsets([shard.numel() for shard in shards], by_kernel, codec)[-1]
    sent = torch.uint8 if codec else transport.wire_dtype(dtype)
    scale = 1 if codec else dtype.itemsize // sent.itemsize
    return shards[0].new_empty([world * row * scale], dtype=sent, device=device)


def launch_gathers(
    shards: Any, param_id: Any, world: int, group_id: int, dtype: torch.dtype, reads: Any, device: Any = None,
    by_kernel: bool = False, codec: str = "",
) -> list[Tensor]:  # fmt: skip
    """A tensor for each shard, as ``launch_gather``."""
    return [launch_gather([shard], param_id, world, group_id, dtype, reads, device, codec=codec) for shard in shards]


def all_gather_prefetched(
    shards: Any, param_ids: Any, world: int, group_id: int, dtype: torch.dtype, reads: Any, first: bool, last: bool,
    recheck: bool, device: Any = None, codec: str = "",
) -> Tensor:  # fmt: skip
    """A flat bucket, as ``launch_gather``."""
    return launch_gather(shards, None, world, group_id, dtype, reads, device, codec=codec)


def all_gathers_prefetched(
    shards: Any, param_ids: Any, world: int, group_id: int, dtype: torch.dtype, reads: Any, first: bool, last: bool,
    recheck: bool, device: Any = None, codec: str = "",
) -> list[Tensor]:  # fmt: skip
    """A tensor for each shard, as ``launch_gathers``."""
    return launch_gathers(shards, None, world, group_id, dtype, reads, device, codec=codec)


def unpack_gather(
    bucket: Tensor, offset: int, size: Any, world: int, dim: int = 0, codec: str = "", dtype: Any = None
) -> Tensor:
    """The full parameter, ``size``; of ``dtype``, or of the bucket's."""
    return bucket.new_empty(size, dtype=dtype)


def launch_reduce(
    grads: Any, param_ids: Any, numels: Any, dims: Any, world: int, group_id: int, spec_text: str, reads: Any,
    use_all_to_all: bool = False, by_kernel: bool = False,
) -> Tensor:  # fmt: skip
    """A flat bucket of ``row`` elements of the spec's dtype; complex ones as real numbers, twice as many.

    For an all-to-all it is ``world`` times as large: its pieces are not added yet.
    """
    spec = ReduceSpec.parse(spec_text)
    row = collectives.offsets(numels, by_kernel, spec.codec)[-1]
    if spec.codec:
        return grads[0].new_empty([row * world], dtype=torch.uint8)
    return launch_reduces(grads[:1], param_ids, [row], dims, world, group_id, spec_text, reads, use_all_to_all)[0]


def launch_reduces(
    grads: Any, param_ids: Any, numels: Any, dims: Any, world: int, group_id: int, spec_text: str, reads: Any,
    use_all_to_all: bool = False, by_kernel: bool = False,
) -> list[Tensor]:  # fmt: skip
    """A tensor for each gradient, of ``numel`` elements, as in ``launch_reduce``."""
    pieces, spec = world if use_all_to_all else 1, ReduceSpec.parse(spec_text)
    if spec.codec:
        sizes = [world * nbytes(spec.codec, numel) for numel in numels]
        return [g.new_empty([size], dtype=torch.uint8) for g, size in zip(grads, sizes, strict=True)]
    dtype = getattr(torch, spec.dtype)
    if dtype.is_complex:
        dtype, pieces = dtype.to_real(), 2 * pieces
    return [g.new_empty([numel * pieces], dtype=dtype) for g, numel in zip(grads, numels, strict=True)]


def launch_all_reduce(
    bucket: Tensor, param_ids: Any, numels: Any, group_id: int, spec_text: str, num_pieces: int = 1
) -> Tensor:
    """The bucket, of whose ``num_pieces`` equal pieces the sum is left; decoded, if they are encoded."""
    spec = ReduceSpec.parse(spec_text)
    if spec.codec:
        return bucket.new_empty([sum(numels)], dtype=getattr(torch, spec.dtype))
    return bucket.new_empty([bucket.numel() // num_pieces])


def encode_with_feedback(tensors: Any, param_ids: Any, rows: int, codec: str) -> Tensor:
    """A bucket of bytes."""
    return fake_encode(tensors, rows, codec)


def reduce_scatter_deferred(
    grads: Any, param_ids: Any, numels: Any, world: int, group_id: int, dtype: torch.dtype, *_: Any
) -> Tensor:
    """``[]``, of ``dtype``."""
    return grads[0].new_empty((), dtype=dtype)


def unpack_reduce(
    bucket: Tensor,
    offset: int,
    shard_size: Any,
    dtype: torch.dtype,
    spec_text: str,
    num_pieces: int = 1,
    group_id: int = 0,
) -> Tensor:
    """One shard's reduced gradient, ``shard_size``, of ``dtype``."""
    return bucket.new_empty(shard_size, dtype=dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "unshard": unshard,
    "follow_unshard": follow_unshard,
    "follow_reduce": follow_reduce,
    "read_full": like_first,
    "reduce_grad": reduce_grad,
    "use": like_first,
    "zero_grad": like_first,
    "retain": like_first,
    "retained": torch.ops.aten.alias.default,
    "share": like_first,
    "reshard": reshard,
    "gather_full": gather_full,
    "accumulate": accumulate,
    "add_accumulated": lambda *_: None,
    "accumulate_grad": accumulate_grad,
    "end_backward": like_first,
    "encode_with_feedback": encode_with_feedback,
    "launch_gather": launch_gather,
    "launch_gathers": launch_gathers,
    "unpack_gather": unpack_gather,
    "all_gather_prefetched": all_gather_prefetched,
    "all_gathers_prefetched": all_gathers_prefetched,
    "launch_reduce": launch_reduce,
    "launch_reduces": launch_reduces,
    "launch_all_reduce": launch_all_reduce,
    "unpack_reduce": unpack_reduce,
    "reduce_scatter_deferred": reduce_scatter_deferred,
}
"""By the op's name."""
