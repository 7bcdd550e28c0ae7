"""Implementations of the ops for real tensors."""

# Why: docs/design/reads.md, "One op for a read, one op for a reduction"

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor

from compiled_fsdp.base import watch
from compiled_fsdp.buckets import collectives, encode
from compiled_fsdp.buckets.codec import sent_nbytes
from compiled_fsdp.buckets.kernels import ops as kernel_ops  # noqa: F401  registers them
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec
from compiled_fsdp.compat.autograd import outside_of_autocast
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.ops import schema
from compiled_fsdp.ops.fake import FAKES
from compiled_fsdp.ranks import failures
from compiled_fsdp.ranks.same_models import check_same_model
from compiled_fsdp.runtime.accumulation import add_accumulated, residuals_of
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.in_flight import GatherInFlight, spec_of
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state.registry import parameter_of, parameters_of


def clone_if_aliased(result: Tensor, given: Tensor) -> Tensor:
    """Return ``result``, or a copy if it shares memory with ``given``, because an op must not return its input."""
    return result.clone() if result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() else result


def _group_of(param_id: Tensor) -> ShardGroup:
    return parameter_of(param_id).group


def _announce(kind: str, param_id: Tensor, size: int) -> None:
    """Tell the watcher that a collective of one parameter, of ``size`` bytes, is launched next."""
    if (watcher := watch.current()) is not None:
        watcher.expect(kind, [[parameter_of(param_id)]], [size])


# ---- reads and their gradients ---------------------------------------------------------------------------------------
def _unshard(shard: Tensor, gate: Tensor | None, param_id: Tensor, spec_text: str, *_: Any) -> Tensor:
    spec = ReadSpec.parse(spec_text)
    if spec.world == 1:
        return collectives.to_compute(shard, spec.dtype, spec.device).clone().view(spec.size)
    _announce("gather", param_id, spec.world * sent_nbytes(spec.codec, shard.numel(), spec.dtype))
    return _share(collectives.unshard(shard, spec, _group_of(param_id).group_names, failures.wait))


def _share(full: Tensor) -> Tensor:
    """Return another tensor over the same memory.

    It is not a view, because a module could not write to a view. For example, ``nn.Embedding(max_norm=...)`` writes to
    its weight.
    """
    shared, memory = full.new_empty(0), full.untyped_storage()
    return shared.set_(memory, full.storage_offset(), full.shape, full.stride())  # type: ignore[call-overload]


def _reduce_grad(grad: Tensor, param_id: Tensor, spec_text: str, dtype: torch.dtype, read: int = -1) -> Tensor:
    spec, group = ReadSpec.parse(spec_text), _group_of(param_id)
    if spec.world != group.size:  # a part of the ranks reduces it
        group = group.part_of(spec.world)
    if group.ranks_in_all == 1:
        return clone_if_aliased(collectives.reduce_alone(grad, [param_id], spec, dtype), grad)
    codec, numel, reduced = spec.reduction.codec, math.prod(spec.shard_size), getattr(torch, spec.reduction.dtype)
    sent = {"reduce": group.size * sent_nbytes(codec, numel, reduced), "all_reduce": sent_nbytes("", numel, reduced)}
    return collectives.reduce_grad(
        grad, [param_id], spec, dtype, group.group_names, failures.wait,
        lambda kind: _announce(kind, param_id, sent[kind]),
    )  # fmt: skip


def _gather_full(shards: Sequence[Tensor], param_ids: Sequence[Tensor], specs: Sequence[str]) -> list[Tensor]:
    parameters = parameters_of(param_ids)
    if parameters[0].world == 1:
        fulls = GatherInFlight(parameters).fulls()
        return [clone_if_aliased(full, parameter.shard) for full, parameter in zip(fulls, parameters, strict=True)]
    check_same_model(parameters[0])
    RUNTIME.reducer.close_failed()
    spec = replace(spec_of(parameters), edge=(True, True))
    (bucket,) = RUNTIME.prefetcher.get_or_launch(parameters, shards, spec)
    fulls = GatherInFlight(parameters, spec, [bucket]).fulls()
    if len(fulls) == 1:
        return fulls
    # A parameter with one row on each rank is a view of the bucket. It is copied, because saved tensors are matched to
    # parameters by their memory.
    aliased = [full.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr() for full in fulls]
    contiguous = torch.contiguous_format
    return [f.clone(memory_format=contiguous) if a else f for f, a in zip(fulls, aliased, strict=True)]


# ---- code that follows a plan ----------------------------------------------------------------------------------------
def _follow_unshard(shard: Tensor, param_id: Tensor, spec_text: str, kind: str) -> Tensor:
    parameter = parameter_of(param_id)
    RUNTIME.reducer.close_failed()
    if parameter.world == 1:
        RUNTIME.follower.note_full_by_block(parameter, [parameter], kind)
        return clone_if_aliased(GatherInFlight([parameter]).fulls()[0], parameter.shard)
    # a copy, because the graph may reuse the memory, and another graph of this forward may ask for the same parameter
    return RUNTIME.follower.full_by_block(parameter, kind).clone()


def _follow_reduce(grad: Tensor, param_id: Tensor, dtype: torch.dtype, reduce: str) -> Tensor:
    parameter, spec = parameter_of(param_id), ReduceSpec.parse(reduce)
    # a copy, because the graph may reuse the memory before the bucket is sent
    if compiled_autograd_runs():
        RUNTIME.reducer.follow_in_graph(grad.clone(), parameter, spec)
    else:
        RUNTIME.reducer.collect(grad.clone(), parameter, spec, None)
    return grad.new_zeros((), dtype=dtype)


# ---- pending and complete gradients ----------------------------------------------------------------------------------
def _accumulate(grad: Tensor, param_id: Tensor, read: int = -1, follows: bool = False) -> Tensor:
    RUNTIME.reducer.accumulate_unreduced(grad, parameter_of(param_id), follows=follows)
    return grad.new_zeros((), dtype=torch.float32)


def _add_accumulated(bucket: Tensor, param_ids: Sequence[Tensor], numels: Sequence[int], partial: bool) -> None:
    add_accumulated(parameters_of(param_ids), bucket, numels, partial)


def _encode_with_feedback(tensors: Sequence[Tensor], param_ids: Sequence[Tensor], rows: int, codec: str) -> Tensor:
    return encode.encode(tensors, rows, codec, residuals_of(parameters_of(param_ids), tensors, rows))


def _accumulate_grad(param_id: int, grad: Tensor, sync: str, read: int = -1, last: bool = False) -> Tensor:
    RUNTIME.reducer.gradient_in_graph(param_id, grad, GradSync(sync), last=last)
    return grad.new_zeros(())


def _end_backward(grad: Tensor) -> Tensor:
    RUNTIME.reducer.end_of_graph()
    return torch.zeros_like(grad)


# ---- buckets ---------------------------------------------------------------------------------------------------------
def _launch(tensors: Sequence[Tensor], param_ids: Sequence[Tensor], spec_text: str) -> list[Tensor]:
    spec = BucketSpec.parse(spec_text)
    if spec.edge is None:
        return collectives.launch(tensors, param_ids, spec, _group_of(param_ids[0]).group_names)
    if (watcher := watch.current()) is not None:
        watcher.reads(parameters_of(param_ids))
    if not spec.kind.supplies:
        return [RUNTIME.reducer.defer(tensors, param_ids, spec)]
    RUNTIME.reducer.close_failed()
    return RUNTIME.prefetcher.get_or_launch(parameters_of(param_ids), tensors, spec)


def _unpack_gather(bucket: Tensor, offset: int, spec_text: str) -> Tensor:
    return collectives.unpack_gather(bucket, offset, ReadSpec.parse(spec_text)).clone()


def _unpack_reduce(bucket: Tensor, offset: int, spec_text: str, dtype: torch.dtype, num_pieces: int = 1) -> Tensor:
    spec = ReadSpec.parse(spec_text)
    rank = 0  # the order matters only for more than two addends, and then the lowered graph adds them
    shard = collectives.unpack_reduce(bucket, offset, spec.reduced_size, dtype, spec.reduction, num_pieces, rank)
    return clone_if_aliased(shard, bucket)


def _retain(full: Tensor, spec_text: str = "") -> Tensor:
    return _only_lowered() if spec_text else full.clone()  # torch's own backends use the memory of ``full`` again


def _only_lowered(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: reshard_after_forward=<int> and set_reshard_after_backward(<int>) need the pass 'lower' of the "
        "backend 'compiled_fsdp'. Do not switch the pass off, and compile with this backend; or give a bool."
    )


_IMPLS: dict[str, Callable[..., Any]] = {
    "unshard": _unshard,
    "follow_unshard": _follow_unshard,
    "follow_reduce": _follow_reduce,
    "reduce_grad": _reduce_grad,
    "use": lambda output, fulls: output.clone(),
    "zero_grad": lambda full, grad: torch.zeros_like(full),
    "retain": _retain,
    "retained": _share,
    "share": _share,
    "reshard": _only_lowered,
    "gather_full": _gather_full,
    "accumulate": _accumulate,
    "add_accumulated": _add_accumulated,
    "accumulate_grad": _accumulate_grad,
    "end_backward": _end_backward,
    "launch": _launch,
    "unpack_gather": _unpack_gather,
    "encode_with_feedback": _encode_with_feedback,
    "unpack_reduce": _unpack_reduce,
}
for _name, _run in _IMPLS.items():
    # ``never_compiled``, because Dynamo would compile the implementation, once for every shape, if it skips the caller
    schema.lib.impl(_name, never_compiled(outside_of_autocast(_run)), "CompositeExplicitAutograd")
    if _name in FAKES:  # the fake implementations of the other ops are registered where those ops are defined
        torch.library.register_fake(f"compiled_fsdp::{_name}", FAKES[_name], lib=schema.lib)


def _read(*given: Any) -> Tensor:
    return schema.unshard(*schema.unshard_args(lambda ids, position: ids.narrow(0, position, 1), *given))


schema.lib.impl("read", _read, "CompositeImplicitAutograd")

# Selective checkpointing counts ops, but a recomputation may gather a parameter that the forward had in full already
torch.utils.checkpoint.SAC_IGNORED_OPS.update((schema.unshard, schema.gather_full, schema.share))
