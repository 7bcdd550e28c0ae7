"""The backward of the ops."""

# Why: docs/design.md, note N7

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiled_fsdp.buckets.reduction import PIECE, GradSync, ReduceSpec
from compiled_fsdp.compat import declare_gradient_dtype, is_wrapper, skip_as_frame
from compiled_fsdp.ops import impl  # noqa: F401  registers them
from compiled_fsdp.ops.schema import ReadFullArgs, ReduceArgs, UnshardArgs, accumulate, lib, reduce_grad, zero_grad
from compiled_fsdp.runtime.pieces import as_plain


@skip_as_frame
def refuse_sparse(grad: Tensor) -> None:
    """Raise NotImplementedError for a sparse gradient."""
    if grad.is_sparse:
        raise NotImplementedError(
            "compiled_fsdp: the gradient of a sharded parameter is sparse, as nn.Embedding(sparse=True) makes it, and "
            "cannot be reduced; use sparse=False, or leave the parameter out with fully_shard(ignored_params=...)."
        )


@skip_as_frame
def note_read(ctx: Any, full: Tensor, param_id: Tensor, reduce: ReduceArgs) -> None:
    """Keep for the backward of a read what ``grad_for_gate`` needs; ``full``: the full parameter, which is not kept."""
    ctx.param_id, ctx.reduce = param_id, reduce
    ctx.full_like = tuple(full.shape), full.dtype, full.device
    _declare_gradient(ctx, full.dtype, reduce.spec_text)


@skip_as_frame
def grad_for_gate(ctx: Any, grad: Tensor | None) -> Tensor:
    """What a full gradient sends to its parameter's gate: the shard's reduced one, or a zero where it waits.

    Without a gradient it is one of zeros, which autograd's engine makes by itself. Compiled autograd does not: there
    ``grad`` is None if, for example, a backward of the user's has returned None.
    """
    if grad is None:
        size, dtype, device = ctx.full_like
        grad = torch.zeros(size, dtype=dtype, device=device)
    refuse_sparse(grad)
    grad, param_id = as_plain(grad), ctx.param_id
    shard_size, world, group_id, dim, dtype, spec_text, read = ctx.reduce
    spec = ReduceSpec.parse(spec_text)
    if spec.sync is GradSync.NONE:
        return accumulate(grad, param_id)
    spec_text = str(spec.of(grad.dtype)) if spec.any_dtype else spec_text
    if spec.sync is GradSync.SHARDS_ONLY:
        dtype = getattr(torch, spec.dtype)
    return reduce_grad(grad, param_id, shard_size, world, group_id, dim, dtype, spec_text, read)


@skip_as_frame
def _declare_gradient(ctx: Any, computed: torch.dtype, spec_text: str) -> None:
    """In the forward of a read: say in which dtype the gradient of the full parameter comes, as FSDP2 does.

    It is the dtype that is reduced. Where that is wider than ``computed``, the gradient comes as it is: a custom
    function may compute the gradient of a bfloat16 parameter in float32, and others need no cast of their own.
    """
    if spec_text.startswith(PIECE):
        return
    spec = ReduceSpec.parse(spec_text)
    reduced = getattr(torch, spec.dtype)
    wider = reduced.is_floating_point and computed.is_floating_point and reduced.itemsize > computed.itemsize
    if spec.any_dtype or reduced != computed:
        declare_gradient_dtype(ctx, None if spec.any_dtype or wider else reduced)


def reduce_args_of_full(given: ReadFullArgs) -> ReduceArgs:
    """How the gradient of a read of a full parameter is reduced."""
    return ReduceArgs(
        list(given.shard_size), given.world, given.group_id, given.dim, given.dtype, given.spec_text, given.read,
    )  # fmt: skip


# ---- unshard, read_full ----------------------------------------------------------------------------------------------
def _save_unshard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = UnshardArgs(*inputs)
    shard, dtype = given.shard, (given.shard if given.gate is None else given.gate).dtype
    reduce = ReduceArgs(
        list(shard.shape), given.world, given.group_id, given.dim, dtype, given.spec_text, given.read,
    )  # fmt: skip
    # the id is not saved for backward: activation checkpointing counts saved tensors, and a parameter that is gathered
    # once in forward may be gathered twice in the recomputation
    note_read(ctx, output, given.param_id, reduce)


@skip_as_frame
def _reduce_for_unshard(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, grad_for_gate(ctx, grad), *[None] * (len(UnshardArgs._fields) - 2)


def _save_read_full(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = ReadFullArgs(*inputs)
    note_read(ctx, output, given.param_id, reduce_args_of_full(given))


@skip_as_frame
def _reduce_for_read_full(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, grad_for_gate(ctx, grad), *[None] * (len(ReadFullArgs._fields) - 2)


class ReadFull(torch.autograd.Function):
    """``read_full`` in eager code, without a copy: any number of forwards share the one full tensor."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor | None, args: ReadFullArgs) -> Tensor:
        note_read(ctx, full, args.param_id, reduce_args_of_full(args))
        return full.detach() if is_wrapper(full) else full.view_as(full)

    @staticmethod
    @skip_as_frame
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, grad_for_gate(ctx, grad), None


# ---- use, reduce_grad ------------------------------------------------------------------------------------------------
@skip_as_frame
def zero_grads(fulls: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """A gradient of zeros for each full parameter; ``grad``: the output's, None if compiled autograd found none."""
    # with the output's gradient: what follows from kept parameters alone would be cut into the forward graph
    return [zero_grad(full, full if grad is None else grad) for full in fulls]


def _save_fulls(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


@skip_as_frame
def _zeros_for_fulls(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
    return grad, zero_grads(ctx.saved_tensors, grad)


def _no_double_backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: a gradient of a parameter's gradient was asked for (create_graph=True through a sharded "
        "parameter). The reduction across ranks is not differentiable; take the penalty on gradients of activations or "
        "inputs instead, with torch.autograd.grad(loss, inputs, create_graph=True)."
    )


torch.library.register_autograd("compiled_fsdp::unshard", _reduce_for_unshard, setup_context=_save_unshard, lib=lib)
torch.library.register_autograd(
    "compiled_fsdp::read_full", _reduce_for_read_full, setup_context=_save_read_full, lib=lib
)
torch.library.register_autograd("compiled_fsdp::use", _zeros_for_fulls, setup_context=_save_fulls, lib=lib)
torch.library.register_autograd("compiled_fsdp::reduce_grad", _no_double_backward, lib=lib)
