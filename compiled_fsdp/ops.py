"""The semantic ops: what a read of a sharded parameter is, and what becomes of its gradient.

``unshard`` turns a parameter's shard into the full parameter; its backward is ``reduce_grad``, which turns the full gradient
into the averaged gradient of the shard and hands it to the parameter's gate (``runtime/gate.py``). Both run as they are, in
plain eager and under any backend. Our backend groups them into buckets (``launch_gather``, ``launch_reduce``, which return
before the collective is done; ``launch_gathers`` and ``launch_reduces`` for several tensors that are not copied into one; the
``unpack`` ops that cut a bucket into parameters) and lowers all of them in the end to
``_c10d_functional`` ops: ``passes/expand.py`` is that lowering, and also the implementation that runs when nothing lowers them.
Only ``take_gather`` and ``leave_reduce`` stay: buckets that go beyond one graph of a broken forward or its backward
(``runtime/boundary.py``, ``runtime/publishing.py``).

Arguments of ``unshard`` that are the same on every rank and for equal layers:

    shard     the padded shard: ceil(rows / world) rows on every rank, zeros where the rows have run out
    gate      None if frozen; else what the gradient flows to, of the shard's shape
    slot      int64 scalar on CPU: which parameter this is, at run time (``slots.py``)
    size      the full parameter's shape
    world     the number of shards
    mesh      a label of the process group, numbered by use
    dim       the sharded dimension (0)
    block     how many parameters the repeated block has that this parameter belongs to
    position  the parameter's place in that block
    keep      whether the full parameter stays from forward to backward
    read      the read's index in the compiled region, given by our backend; -1 outside of it

``read_full`` is the read of a parameter that is full already (``unshard()``): the same backward, nothing to gather.
``use`` is its first argument, and gives ``zero_grad`` to parameters that were perhaps not used (``unused.py``); both take the
parameter, so that every rank gathers it in forward and in backward, whether it computes with it or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor

from compiled_fsdp import slots
from compiled_fsdp.compat import never_a_frame_of_its_own, never_compiled
from compiled_fsdp.passes import expand
from compiled_fsdp.runtime.boundary import BOUNDARY
from compiled_fsdp.runtime.publishing import PUBLISHING

_lib = torch.library.Library("compiled_fsdp", "DEF")
# what they do depends on what happened outside of the graph
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define(
    "unshard(Tensor shard, Tensor? gate, Tensor slot, int[] size, int world, int mesh, int dim, int block, "
    "int position, bool keep, int read=-1) -> Tensor"
)
_lib.define(
    "read_full(Tensor full, Tensor? gate, Tensor slot, int[] shard_size, int world, int mesh, int dim, int block, "
    "int position, int read=-1) -> Tensor"
)
_lib.define(
    "reduce_grad(Tensor grad, Tensor slot, int[] shard_size, int world, int mesh, int dim, int read=-1) -> Tensor"
)
_lib.define("use(Tensor output, Tensor[] fulls) -> Tensor")
_lib.define("zero_grad(Tensor full, Tensor grad) -> Tensor")
_lib.define("launch_gather(Tensor[] shards, Tensor slot, int world, int mesh, int[] reads) -> Tensor")
_lib.define(
    "launch_reduce(Tensor[] grads, Tensor slot, int[] numels, int world, int mesh, int[] reads, bool exchange=False) -> Tensor"
)
_lib.define("launch_gathers(Tensor[] shards, Tensor slot, int world, int mesh, int[] reads) -> Tensor[]")
_lib.define(
    "launch_reduces(Tensor[] grads, Tensor slot, int[] numels, int world, int mesh, int[] reads, bool exchange=False) -> Tensor[]"
)
_lib.define(
    "take_gather(Tensor[] shards, Tensor[] slots, int world, int mesh, int[] reads, bool first, bool last, bool recheck) -> Tensor",
    tags=_UNSAFE,
)
_lib.define(
    "leave_reduce(Tensor[] grads, Tensor[] slots, int[] numels, int world, int mesh, int[] reads, bool exchange=False) -> Tensor",
    tags=_UNSAFE,
)
_lib.define("publish(int slot, Tensor grad, int read=-1, bool last=False) -> Tensor", tags=_UNSAFE)
_lib.define("gather_full(Tensor[] shards, Tensor[] slots, int[] sizes, int world) -> Tensor[]")
_lib.define("share(Tensor full) -> Tensor")
_lib.define("unpack_gather(Tensor bucket, int offset, int[] size, int world) -> Tensor")
_lib.define("unpack_reduce(Tensor bucket, int offset, int[] shard_size, int parts=1, int mesh=0) -> Tensor")

unshard = torch.ops.compiled_fsdp.unshard.default
read_full = torch.ops.compiled_fsdp.read_full.default
reduce_grad = torch.ops.compiled_fsdp.reduce_grad.default
use = torch.ops.compiled_fsdp.use.default
zero_grad = torch.ops.compiled_fsdp.zero_grad.default
launch_gather = torch.ops.compiled_fsdp.launch_gather.default
launch_reduce = torch.ops.compiled_fsdp.launch_reduce.default
launch_gathers = torch.ops.compiled_fsdp.launch_gathers.default
launch_reduces = torch.ops.compiled_fsdp.launch_reduces.default
publish = torch.ops.compiled_fsdp.publish.default
gather_full = torch.ops.compiled_fsdp.gather_full.default
share = torch.ops.compiled_fsdp.share.default
unpack_gather = torch.ops.compiled_fsdp.unpack_gather.default
unpack_reduce = torch.ops.compiled_fsdp.unpack_reduce.default


# ---- what the ops do, with real tensors ------------------------------------------------------------------------------
def _unshard(
    shard: Tensor, gate: Tensor | None, slot: Tensor, size: Sequence[int], world: int, *_: Any, **__: Any
) -> Tensor:
    if world == 1:
        return shard.clone()
    bucket = expand.launch_gather([shard], world, slots.group_of(slot).group_name)
    bucket = expand.wait(bucket)
    return _share(expand.unpack_gather(bucket, 0, size, world))


def _share(full: Tensor) -> Tensor:
    """Another tensor over the same memory. No view: a module could not write to it (Embedding's max_norm)."""
    shared = full.new_empty(0)
    return shared.set_(full.untyped_storage(), full.storage_offset(), full.shape, full.stride())  # type: ignore[call-overload]


def _reduce_grad(grad: Tensor, slot: Tensor, shard_size: Sequence[int], world: int, *_: Any, **__: Any) -> Tensor:
    if world == 1:
        return grad.clone()
    bucket = expand.launch_reduce([grad], [math.prod(shard_size)], world, slots.group_of(slot).group_name)
    return expand.unpack_reduce(expand.wait(bucket), 0, shard_size)


def _launch_gather(shards: Sequence[Tensor], slot: Tensor, world: int, *_: Any) -> Tensor:
    return expand.launch_gather(shards, world, slots.group_of(slot).group_name)


def _launch_reduce(grads: Sequence[Tensor], slot: Tensor, numels: Sequence[int], world: int, mesh: int, reads: Sequence[int],
                   exchange: bool = False) -> Tensor:  # fmt: skip
    return expand.launch_reduce(grads, numels, world, slots.group_of(slot).group_name, exchange)


def _launch_gathers(shards: Sequence[Tensor], slot: Tensor, world: int, *_: Any) -> list[Tensor]:
    return expand.launch_gathers(shards, world, slots.group_of(slot).group_name)


def _launch_reduces(grads: Sequence[Tensor], slot: Tensor, numels: Sequence[int], world: int, mesh: int, reads: Sequence[int],
                    exchange: bool = False) -> list[Tensor]:  # fmt: skip
    return expand.launch_reduces(grads, numels, world, slots.group_of(slot).group_name, exchange)


def _take_gather(shards: Sequence[Tensor], numbers: Sequence[Tensor], world: int, mesh: int, reads: Sequence[int],
                 first: bool, last: bool, recheck: bool) -> Tensor:  # fmt: skip
    PUBLISHING.close_failed()
    return BOUNDARY.take(shards, numbers, world, first=first, last=last, recheck=recheck)


def _publish(slot: int, grad: Tensor, read: int = -1, last: bool = False) -> Tensor:
    PUBLISHING.publish(slot, grad, last=last)
    return grad.new_zeros(())


def _gather_full(shards: Sequence[Tensor], numbers: Sequence[Tensor], sizes: Sequence[int], world: int) -> list[Tensor]:
    if world == 1:
        return [shard.clone() for shard in shards]
    PUBLISHING.close_failed()
    bucket = expand.wait(BOUNDARY.take(shards, numbers, world))
    fulls, offset = [], 0
    for shard, size in zip(shards, _sizes(shards, sizes), strict=True):
        full = expand.unpack_gather(bucket, offset, size, world)
        if len(shards) > 1 and full.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr():
            full = full.clone(memory_format=torch.contiguous_format)  # a row a rank: each is known by its own memory
        fulls.append(full)
        offset += shard.numel()
    return fulls


def _sizes(shards: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The full sizes of several shards, one behind the other in ``sizes``."""
    out, at = [], 0
    for shard in shards:
        out.append(sizes[at : at + shard.dim()])
        at += shard.dim()
    return out


def _leave_reduce(grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], world: int, mesh: int,
                  reads: Sequence[int], exchange: bool = False) -> Tensor:  # fmt: skip
    return PUBLISHING.leave(grads, numbers, numels, exchange)


# ---- shapes ----------------------------------------------------------------------------------------------------------
def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # or where Dynamo skips the caller it compiles what an op consists of, once for every shape
    _lib.impl(name, never_compiled(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_fsdp::{name}", fake, lib=_lib)


_register("unshard", _unshard, lambda shard, gate, slot, size, *_, **__: shard.new_empty(size))
# a copy: an op's result must not be its input. Our backend takes the input itself
_register("read_full", lambda full, *_, **__: full.clone(), lambda full, *_, **__: torch.empty_like(full))
_register("use", lambda output, fulls: output.clone(), lambda output, fulls: torch.empty_like(output))
_register("zero_grad", lambda full, grad: torch.zeros_like(full), lambda full, grad: torch.empty_like(full))
_register("reduce_grad", _reduce_grad, lambda grad, slot, shard_size, *_, **__: grad.new_empty(shard_size))
_register(
    "launch_gather",
    _launch_gather,
    lambda shards, slot, world, *_: shards[0].new_empty([world * sum(shard.numel() for shard in shards)]),
)
_register(
    "launch_reduce",
    _launch_reduce,
    lambda grads, slot, numels, world, mesh, reads, exchange=False: grads[0].new_empty(
        [sum(numels) * (world if exchange else 1)]
    ),
)
_register(
    "launch_gathers",
    _launch_gathers,
    lambda shards, slot, world, *_: [shard.new_empty([world * shard.numel()]) for shard in shards],
)
_register(
    "launch_reduces",
    _launch_reduces,
    lambda grads, slot, numels, world, mesh, reads, exchange=False: [
        grad.new_empty([numel * (world if exchange else 1)]) for grad, numel in zip(grads, numels, strict=True)
    ],
)
_register(
    "take_gather",
    _take_gather,
    lambda shards, slots, world, *_: shards[0].new_empty([world * sum(shard.numel() for shard in shards)]),
)
_register(
    "gather_full",
    _gather_full,
    lambda shards, slots, sizes, world: [
        s.new_empty(size) for s, size in zip(shards, _sizes(shards, sizes), strict=True)
    ],
)
_register("share", _share, torch.empty_like)
_register("publish", _publish, lambda slot, grad, read=-1, last=False: grad.new_empty(()))
_register("leave_reduce", _leave_reduce, lambda grads, *_: grads[0].new_empty(()))
_register(
    "unpack_gather",
    lambda *args: expand.unpack_gather(*args).clone(),
    lambda bucket, offset, size, world: bucket.new_empty(size),
)
_register(
    "unpack_reduce",
    lambda bucket, offset, shard_size, parts=1, mesh=0: expand.unpack_reduce(bucket, offset, shard_size, parts).clone(),
    lambda bucket, offset, shard_size, parts=1, mesh=0: bucket.new_empty(shard_size),
)


# Selective checkpointing counts ops, and a recomputation may gather what a forward had from another place
torch.utils.checkpoint.SAC_IGNORED_OPS.update((unshard, gather_full, share))


# ---- autograd --------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, slot, _, world, mesh, dim, _, _, _, read = inputs
    # not saved for backward: activation checkpointing counts saved tensors, and a parameter that is gathered once in
    # forward may be gathered twice in the recomputation
    ctx.slot = slot
    ctx.reduce = (list(shard.shape), world, mesh, dim, read)


def refuse_sparse(grad: Tensor) -> None:
    """Raise NotImplementedError for a sparse gradient."""
    if grad.is_sparse:
        raise NotImplementedError(
            "compiled_fsdp: the gradient of a sharded parameter is sparse, as nn.Embedding(sparse=True) makes it, and cannot be reduced; use "
            "sparse=False, or leave the parameter out with fully_shard(ignored_params=...)."
        )


def _reduce_for_gate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_sparse(grad)
    return None, reduce_grad(grad, ctx.slot, *ctx.reduce), *[None] * 9


def _save_full(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, slot, shard_size, world, mesh, dim, _, _, read = inputs
    ctx.slot = slot
    ctx.reduce = (list(shard_size), world, mesh, dim, read)


def _reduce_full_for_gate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, reduce_grad(grad, ctx.slot, *ctx.reduce), *[None] * 8


class ReadFull(torch.autograd.Function):
    """``read_full`` in eager code, without a copy: any number of forwards share the one full tensor."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor | None, slot: Tensor, shard_size: Sequence[int], world: int, mesh: int,
                dim: int, *_: int) -> Tensor:  # fmt: skip
        ctx.slot = slot
        ctx.reduce = (list(shard_size), world, mesh, dim, -1)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, reduce_grad(grad, ctx.slot, *ctx.reduce), *[None] * 7


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


for _function in (refuse_sparse, _reduce_for_gate, _reduce_full_for_gate, _zeros_for_fulls, ReadFull.backward):
    never_a_frame_of_its_own(_function)
torch.library.register_autograd("compiled_fsdp::unshard", _reduce_for_gate, setup_context=_save, lib=_lib)
torch.library.register_autograd("compiled_fsdp::read_full", _reduce_full_for_gate, setup_context=_save_full, lib=_lib)
torch.library.register_autograd("compiled_fsdp::use", _zeros_for_fulls, setup_context=_save_fulls, lib=_lib)
torch.library.register_autograd("compiled_fsdp::reduce_grad", _no_double_backward, lib=_lib)
