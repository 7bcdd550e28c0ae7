"""The semantic ops: what a read of a sharded parameter is, and what becomes of its gradient.

``unshard`` turns a parameter's shard into the full parameter; its backward is ``reduce_grad``, which turns the full gradient
into the averaged gradient of the shard and hands it to the parameter's gate (``runtime/gate.py``). Both run as they are, in
plain eager and under any backend. Our backend groups them into buckets (``launch_gather``, ``launch_reduce``, which return
before the collective is done; ``launch_gathers`` and ``launch_reduces`` for several tensors that are not copied into one; the
``unpack`` ops that cut a bucket into parameters) and lowers all of them in the end to
``_c10d_functional`` ops: ``compiled_fsdp/comm/collectives.py`` is that lowering, and also the implementation that runs when nothing lowers them.
Only ``take_gather`` and ``leave_reduce`` stay: buckets that go beyond one graph of a broken forward or its backward
(``runtime/prefetcher.py``, ``runtime/reducer.py``).

Arguments of ``unshard`` that are the same on every rank and for equal layers:

    shard     the padded shard: ceil(size[dim] / world) along dim on every rank, zeros where the rows have run out
    gate      None if frozen; else what the gradient flows to: of the shard's shape, or a scalar where it waits
    slot      int64 scalar on CPU: which parameter this is, at run time (``slots.py``)
    size      the full parameter's shape
    world     the number of shards
    mesh      a label of the process groups, numbered by use
    dim       the sharded dimension
    block     how many parameters the repeated block has that this parameter belongs to
    position  the parameter's place in that block
    keep      whether the full parameter stays from forward to backward
    dtype     of the full parameter, in which it is gathered
    reduction what becomes of its gradient, as text (``compiled_fsdp/comm/reduction.py``)
    again     the number of ranks that gather it in backward, where that is a part of ``world`` (``reshard_after_forward=8``)
    read      the read's index in the compiled region, given by our backend; -1 outside of it
    device    where it is gathered, if the shard is elsewhere (offloaded)

``read_full`` is the read of a parameter that is full already (``unshard()``): the same backward, nothing to gather.
``use`` is its first argument, and gives ``zero_grad`` to parameters that were perhaps not used (``unused.py``); both take the
parameter, so that every rank gathers it in forward and in backward, whether it computes with it or not. ``retain`` is a full
parameter that stays when the graph is over, ``reshard`` this rank's piece of one for a smaller group. A gradient that is not reduced goes into ``accumulate``, which adds it to what
waits on its parameter; ``add_waiting`` adds that to the next bucket that is reduced (``runtime/accumulation.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor

from compiled_fsdp.comm import collectives
from compiled_fsdp.comm.kernels import ops as kernel_ops  # noqa: F401  registers them
from compiled_fsdp.comm.reduction import ALL, NONE, SCATTER, Reduction
from compiled_fsdp.compat import never_a_frame_of_its_own, never_compiled
from compiled_fsdp.ops import fake as fakes
from compiled_fsdp.runtime.accumulation import add_waiting
from compiled_fsdp.runtime.prefetcher import BOUNDARY
from compiled_fsdp.runtime.reducer import PUBLISHING
from compiled_fsdp.state import registry

_lib = torch.library.Library("compiled_fsdp", "DEF")
# what they do depends on what happened outside of the graph
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define(
    "unshard(Tensor shard, Tensor? gate, Tensor slot, int[] size, int world, int mesh, int dim, int block, "
    "int position, bool keep, ScalarType dtype, str reduction, int again=0, int read=-1, Device? device=None) -> Tensor"
)
_lib.define(
    "read_full(Tensor full, Tensor? gate, Tensor slot, int[] shard_size, int world, int mesh, int dim, int block, "
    "int position, ScalarType dtype, str reduction, int read=-1, Device? device=None) -> Tensor"
)
_lib.define(
    "reduce_grad(Tensor grad, Tensor slot, int[] shard_size, int world, int mesh, int dim, ScalarType dtype, str reduction, "
    "int read=-1, Device? device=None) -> Tensor"
)
_lib.define("use(Tensor output, Tensor[] fulls) -> Tensor")
_lib.define("zero_grad(Tensor full, Tensor grad) -> Tensor")
_lib.define("retain(Tensor full) -> Tensor")
_lib.define("reshard(Tensor full, int world, int mesh, int dim) -> Tensor")
# the tag keeps two equal gradients of one parameter from being taken for one
_lib.define("accumulate(Tensor grad, Tensor slot) -> Tensor", tags=(*_UNSAFE, torch.Tag.nondeterministic_seeded))
_lib.define("add_waiting(Tensor(a!) bucket, Tensor[] slots, int[] numels, bool scattered) -> ()", tags=_UNSAFE)
_lib.define(
    "launch_gather(Tensor[] shards, Tensor slot, int world, int mesh, ScalarType dtype, int[] reads, Device? device=None) -> Tensor"
)
_lib.define(
    "launch_gathers(Tensor[] shards, Tensor slot, int world, int mesh, ScalarType dtype, int[] reads, Device? device=None) -> Tensor[]"
)
_REDUCE = (
    "(Tensor[] grads, Tensor[] slots, int[] numels, int[] dims, int world, int mesh, str reduction, int[] reads, "
    "bool exchange=False) -> "
)
_lib.define(f"launch_reduce{_REDUCE} Tensor")
_lib.define(f"launch_reduces{_REDUCE} Tensor[]")
_lib.define(
    "launch_all_reduce(Tensor bucket, Tensor[] slots, int[] numels, int mesh, str reduction, int parts=1) -> Tensor"
)
_lib.define(
    "take_gather(Tensor[] shards, Tensor[] slots, int world, int mesh, ScalarType dtype, int[] reads, bool first, bool last, "
    "bool recheck) -> Tensor",
    tags=_UNSAFE,
)
_lib.define(
    "leave_reduce(Tensor[] grads, Tensor[] slots, int[] numels, int world, int mesh, ScalarType dtype, str reduction, int[] reads, "
    "bool exchange=False) -> Tensor",
    tags=_UNSAFE,
)
_lib.define(
    "publish(int slot, Tensor grad, str kind, int read=-1, bool last=False, bool end=False) -> Tensor", tags=_UNSAFE
)
_lib.define("gather_full(Tensor[] shards, Tensor[] slots, int[] sizes, int world, ScalarType dtype) -> Tensor[]")
_lib.define("share(Tensor full) -> Tensor")
_lib.define("unpack_gather(Tensor bucket, int offset, int[] size, int world, int dim=0) -> Tensor")
_lib.define(
    "unpack_reduce(Tensor bucket, int offset, int[] shard_size, ScalarType dtype, str reduction, int parts=1, int mesh=0, "
    "Device? device=None) -> Tensor"
)

unshard = torch.ops.compiled_fsdp.unshard.default
read_full = torch.ops.compiled_fsdp.read_full.default
reduce_grad = torch.ops.compiled_fsdp.reduce_grad.default
use = torch.ops.compiled_fsdp.use.default
zero_grad = torch.ops.compiled_fsdp.zero_grad.default
retain = torch.ops.compiled_fsdp.retain.default
accumulate = torch.ops.compiled_fsdp.accumulate.default
publish = torch.ops.compiled_fsdp.publish.default
gather_full = torch.ops.compiled_fsdp.gather_full.default
share = torch.ops.compiled_fsdp.share.default


# ---- what the ops do, with real tensors ------------------------------------------------------------------------------
def _unshard(shard: Tensor, gate: Tensor | None, slot: Tensor, size: Sequence[int], world: int, mesh: int, dim: int, block: int,
             position: int, keep: bool, dtype: torch.dtype, reduction: str, again: int = 0, read: int = -1,
             device: torch.device | None = None) -> Tensor:  # fmt: skip
    if world == 1:
        return collectives.to_gather(shard, dtype, device).clone().view(size)
    bucket = collectives.launch_gather([shard], world, registry.parameter_of(slot).group.name, dtype, device)
    bucket = collectives.wait(bucket)
    return _share(collectives.unpack_gather(bucket, 0, size, world, dim))


def _share(full: Tensor) -> Tensor:
    """Another tensor over the same memory. No view: a module could not write to it (Embedding's max_norm)."""
    shared = full.new_empty(0)
    return shared.set_(full.untyped_storage(), full.storage_offset(), full.shape, full.stride())  # type: ignore[call-overload]


def _reduce_grad(grad: Tensor, slot: Tensor, shard_size: Sequence[int], world: int, mesh: int, dim: int, dtype: torch.dtype,
                 reduction: str, read: int = -1, device: torch.device | None = None) -> Tensor:  # fmt: skip
    how, group, numel = Reduction.parse(reduction), registry.parameter_of(slot).group, math.prod(shard_size)
    if group.ranks_in_all == 1:
        return _own(collectives.reduce_alone(grad, numel, dim, shard_size, dtype, how, [slot], device), grad)
    bucket = collectives.wait(collectives.launch_reduce([grad], [numel], [dim], world, group.reduce_name, how, [slot]))
    if group.replicas > 1 and how.sync == ALL:
        bucket = collectives.wait(collectives.launch_all_reduce(bucket, group.across, how, [slot], [numel]))
    return collectives.unpack_reduce(bucket, 0, shard_size, dtype, how, device=device)


def _own(result: Tensor, given: Tensor) -> Tensor:
    """An op's result must not be its input."""
    return result.clone() if result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() else result


def _launch_gather(shards: Sequence[Tensor], slot: Tensor, world: int, mesh: int, dtype: torch.dtype, reads: Sequence[int],
                   device: torch.device | None = None) -> Tensor:  # fmt: skip
    return collectives.launch_gather(shards, world, registry.parameter_of(slot).group.name, dtype, device)


def _launch_gathers(shards: Sequence[Tensor], slot: Tensor, world: int, mesh: int, dtype: torch.dtype, reads: Sequence[int],
                    device: torch.device | None = None) -> list[Tensor]:  # fmt: skip
    return collectives.launch_gathers(shards, world, registry.parameter_of(slot).group.name, dtype, device)


def _launch_reduce(grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], dims: Sequence[int], world: int,
                   mesh: int, reduction: str, reads: Sequence[int], exchange: bool = False) -> Tensor:  # fmt: skip
    group = registry.parameter_of(numbers[0]).group.reduce_name
    return collectives.launch_reduce(grads, numels, dims, world, group, Reduction.parse(reduction), numbers, exchange)


def _launch_reduces(grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], dims: Sequence[int], world: int,
                    mesh: int, reduction: str, reads: Sequence[int], exchange: bool = False) -> list[Tensor]:  # fmt: skip
    group = registry.parameter_of(numbers[0]).group.reduce_name
    return collectives.launch_reduces(grads, numels, dims, world, group, Reduction.parse(reduction), numbers, exchange)


def _launch_all_reduce(bucket: Tensor, numbers: Sequence[Tensor], numels: Sequence[int], mesh: int, reduction: str,
                       parts: int = 1) -> Tensor:  # fmt: skip
    group = registry.parameter_of(numbers[0]).group
    return collectives.launch_all_reduce(
        bucket, group.across, Reduction.parse(reduction), numbers, numels, parts, group.rank
    )


def _take_gather(shards: Sequence[Tensor], numbers: Sequence[Tensor], world: int, mesh: int, dtype: torch.dtype,
                 reads: Sequence[int], first: bool, last: bool, recheck: bool) -> Tensor:  # fmt: skip
    PUBLISHING.close_failed()
    return BOUNDARY.take(shards, numbers, first=first, last=last, recheck=recheck)


def _accumulate(grad: Tensor, slot: Tensor) -> Tensor:
    PUBLISHING.accumulate(grad, registry.parameter_of(slot))
    return grad.new_zeros((), dtype=torch.float32)


def _add_waiting(bucket: Tensor, numbers: Sequence[Tensor], numels: Sequence[int], scattered: bool) -> None:
    add_waiting([registry.parameter_of(slot) for slot in numbers], bucket, numels, scattered)


def _publish(slot: int, grad: Tensor, kind: str, read: int = -1, last: bool = False, end: bool = False) -> Tensor:
    PUBLISHING.publish(slot, grad, kind, last=last, end=end)
    return grad.new_zeros(())


def _gather_full(shards: Sequence[Tensor], numbers: Sequence[Tensor], sizes: Sequence[int], world: int,
                 dtype: torch.dtype) -> list[Tensor]:  # fmt: skip
    parameters = [registry.parameter_of(slot) for slot in numbers]
    if world == 1:
        return [_own(p.sent().view(p.size), p.shard) for p in parameters]
    PUBLISHING.close_failed()
    bucket = collectives.wait(BOUNDARY.take(shards, numbers))
    fulls, offset = [], 0
    for parameter in parameters:
        full = collectives.unpack_gather(bucket, offset, parameter.size, world, parameter.dim)
        if len(shards) > 1 and full.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr():
            full = full.clone(memory_format=torch.contiguous_format)  # a row a rank: each is known by its own memory
        fulls.append(full)
        offset += parameter.shard.numel()
    return fulls


def _sizes(shards: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The full sizes of several shards, one behind the other in ``sizes``."""
    out, at = [], 0
    for shard in shards:
        out.append(sizes[at : at + shard.dim()])
        at += shard.dim()
    return out


def _leave_reduce(grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], world: int, mesh: int,
                  dtype: torch.dtype, reduction: str, reads: Sequence[int], exchange: bool = False) -> Tensor:  # fmt: skip
    return PUBLISHING.leave(grads, numbers, numels, dtype, Reduction.parse(reduction), exchange)


# ---- shapes ----------------------------------------------------------------------------------------------------------
def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # or where Dynamo skips the caller it compiles what an op consists of, once for every shape
    _lib.impl(name, never_compiled(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


def _only_lowered(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: the pass 'lower' is switched off, but reshard_after_forward=<int> needs it."
    )


def _unpack_reduce(bucket: Tensor, offset: int, shard_size: Sequence[int], dtype: torch.dtype, reduction: str, parts: int = 1,
                   mesh: int = 0, device: torch.device | None = None) -> Tensor:  # fmt: skip
    how = Reduction.parse(reduction)
    return _own(collectives.unpack_reduce(bucket, offset, shard_size, dtype, how, parts, device=device), bucket)


_register("unshard", _unshard, fakes.unshard)
# a copy: an op's result must not be its input. Our backend takes the input itself
_register("read_full", lambda full, *_, **__: full.clone(), lambda full, *_, **__: torch.empty_like(full))
_register("use", lambda output, fulls: output.clone(), lambda output, fulls: torch.empty_like(output))
_register("zero_grad", lambda full, grad: torch.zeros_like(full), lambda full, grad: torch.empty_like(full))
_register("retain", _share, torch.empty_like)
_register(
    "reshard",
    _only_lowered,
    lambda full, world, mesh, dim: full.new_empty(collectives.shard_size(full.shape, world, dim)),
)
_register("accumulate", _accumulate, lambda grad, slot: grad.new_empty((), dtype=torch.float32))
_register("add_waiting", _add_waiting, lambda bucket, slots, numels, scattered: None)
_register("reduce_grad", _reduce_grad, fakes.reduce_grad)
_register("launch_gather", _launch_gather, fakes.launch_gather)
_register("launch_reduce", _launch_reduce, fakes.launch_reduce)
_register("launch_gathers", _launch_gathers, fakes.launch_gathers)
_register("launch_reduces", _launch_reduces, fakes.launch_reduces)
_register(
    "launch_all_reduce",
    _launch_all_reduce,
    lambda bucket, slots, numels, mesh, reduction, parts=1: bucket.new_empty([bucket.numel() // parts]),
)
_register(
    "take_gather",
    _take_gather,
    lambda shards, slots, world, mesh, dtype, *_: shards[0].new_empty(
        [world * sum(shard.numel() for shard in shards)], dtype=dtype
    ),
)
_register(
    "gather_full",
    _gather_full,
    lambda shards, slots, sizes, world, dtype: [
        s.new_empty(size, dtype=dtype) for s, size in zip(shards, _sizes(shards, sizes), strict=True)
    ],
)
_register("share", _share, torch.empty_like)
_register("publish", _publish, lambda slot, grad, kind, read=-1, last=False, end=False: grad.new_empty(()))
_register(
    "leave_reduce",
    _leave_reduce,
    lambda grads, slots, numels, world, mesh, dtype, *_: grads[0].new_empty((), dtype=dtype),
)
_register(
    "unpack_gather",
    lambda *args: collectives.unpack_gather(*args).clone(),
    lambda bucket, offset, size, world, dim=0: bucket.new_empty(size),
)
_register("unpack_reduce", _unpack_reduce, fakes.unpack_reduce)


# Selective checkpointing counts ops, and a recomputation may gather what a forward had from another place
torch.utils.checkpoint.SAC_IGNORED_OPS.update((unshard, gather_full, share))


# ---- autograd --------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, slot, _, world, mesh, dim, _, _, _, _, reduction, _, read, device = inputs
    # not saved for backward: activation checkpointing counts saved tensors, and a parameter that is gathered once in
    # forward may be gathered twice in the recomputation
    ctx.slot = slot
    ctx.reduce = (list(shard.shape), world, mesh, dim, shard.dtype, reduction, read, device and shard.device)


def refuse_sparse(grad: Tensor) -> None:
    """Raise NotImplementedError for a sparse gradient."""
    if grad.is_sparse:
        raise NotImplementedError(
            "compiled_fsdp: the gradient of a sharded parameter is sparse, as nn.Embedding(sparse=True) makes it, and cannot be reduced; use "
            "sparse=False, or leave the parameter out with fully_shard(ignored_params=...)."
        )


def for_gate(grad: Tensor, slot: Tensor, reduce: tuple[Any, ...]) -> Tensor:
    """What a full gradient sends to its parameter's gate: the shard's reduced one, or a zero where it waits.

    ``reduce`` are the arguments of ``reduce_grad`` from ``shard_size`` on.
    """
    refuse_sparse(grad)
    shard_size, world, mesh, dim, dtype, reduction, read, device = reduce
    how = Reduction.parse(reduction)
    if how.sync == NONE:
        return accumulate(grad, slot)
    if how.sync == SCATTER:
        dtype, device = getattr(torch, how.dtype), None
    return reduce_grad(grad, slot, shard_size, world, mesh, dim, dtype, reduction, read, device)


def _reduce_for_gate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, for_gate(grad, ctx.slot, ctx.reduce), *[None] * 13


def _save_full(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, slot, shard_size, world, mesh, dim, _, _, dtype, reduction, read, device = inputs
    ctx.slot = slot
    ctx.reduce = (list(shard_size), world, mesh, dim, dtype, reduction, read, device)


def _reduce_full_for_gate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, for_gate(grad, ctx.slot, ctx.reduce), *[None] * 11


class ReadFull(torch.autograd.Function):
    """``read_full`` in eager code, without a copy: any number of forwards share the one full tensor."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor | None, slot: Tensor, shard_size: Sequence[int], world: int, mesh: int,
                dim: int, block: int, position: int, dtype: torch.dtype, reduction: str, read: int = -1,
                device: torch.device | None = None) -> Tensor:  # fmt: skip
        ctx.slot = slot
        ctx.reduce = (list(shard_size), world, mesh, dim, dtype, reduction, read, device)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, for_gate(grad, ctx.slot, ctx.reduce), *[None] * 11


def _save_fulls(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


def _zeros_for_fulls(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    # with the output's gradient: what follows from kept parameters alone would be cut into the forward graph
    return grad, [zero_grad(full, grad) for full in ctx.saved_tensors]


def _no_double_backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: a gradient of a parameter's gradient was asked for (create_graph=True through a sharded parameter). "
        "The reduction across ranks is not differentiable; take the penalty on gradients of activations or inputs instead, "
        "with torch.autograd.grad(loss, inputs, create_graph=True)."
    )


for _function in (
    refuse_sparse,
    for_gate,
    _reduce_for_gate,
    _reduce_full_for_gate,
    _zeros_for_fulls,
    ReadFull.backward,
):
    never_a_frame_of_its_own(_function)
torch.library.register_autograd("compiled_fsdp::unshard", _reduce_for_gate, setup_context=_save, lib=_lib)
torch.library.register_autograd("compiled_fsdp::read_full", _reduce_full_for_gate, setup_context=_save_full, lib=_lib)
torch.library.register_autograd("compiled_fsdp::use", _zeros_for_fulls, setup_context=_save_fulls, lib=_lib)
torch.library.register_autograd("compiled_fsdp::reduce_grad", _no_double_backward, lib=_lib)
