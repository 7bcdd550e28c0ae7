"""The backward of the ops."""

# Why: docs/design.md, note N7

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiled_fsdp.buckets.reduction import PIECE, GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.compat.autograd import declare_gradient_dtype, is_wrapper
from compiled_fsdp.compat.compiled_autograd import in_compiled_autograd
from compiled_fsdp.compat.profiling import is_traced
from compiled_fsdp.ops import impl  # noqa: F401  registers them
from compiled_fsdp.ops.schema import accumulate, lib, reduce_grad, share, zero_grad
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.followed import BoundPlan
from compiled_fsdp.runtime.pieces import as_plain


def refuse_sparse(grad: Tensor) -> None:
    """Raise NotImplementedError for a sparse gradient."""
    if grad.is_sparse:
        raise NotImplementedError(
            "compiled_fsdp: the gradient of a sharded parameter is sparse, as nn.Embedding(sparse=True) makes it, and "
            "cannot be reduced; use sparse=False, or leave the parameter out with fully_shard(ignored_params=...)."
        )


def _note_read(ctx: Any, full: Tensor, gate: Tensor | None, param_id: Tensor, spec_text: str, read: int) -> None:
    """Keep for the backward of a read what ``grad_for_gate`` needs; the full parameter is not kept."""
    ctx.param_id, ctx.spec_text, ctx.read = param_id, spec_text, read
    ctx.dtype = None if gate is None else gate.dtype
    ctx.full_like = tuple(full.shape), full.dtype, full.device
    _declare_gradient(ctx, full.dtype, ReadSpec.parse(spec_text).reduce)


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
    sync, reduced, any_dtype = _reduction_of(ctx.spec_text)
    if sync == GradSync.NONE.value:
        return accumulate(grad, param_id, ctx.read)
    spec_text = _for_dtype(ctx.spec_text, grad.dtype) if any_dtype else ctx.spec_text
    dtype = getattr(torch, reduced) if sync == GradSync.SHARDS_ONLY.value else ctx.dtype
    return reduce_grad(grad, param_id, spec_text, dtype, ctx.read)


# Dynamo, which traces backwards in compiled autograd's graphs, takes what these return for constants.
@torch.compiler.assume_constant_result
def _reduction_of(spec_text: str) -> tuple[str, str, bool]:
    """How far a read's gradient is reduced, in which dtype, and whether in a wider one if it comes in that."""
    reduction = ReadSpec.parse(spec_text).reduction
    return reduction.sync.value, reduction.dtype, reduction.any_dtype


@torch.compiler.assume_constant_result
def _for_dtype(spec_text: str, dtype: torch.dtype) -> str:
    """The same read, of which the gradient comes in ``dtype``."""
    spec = ReadSpec.parse(spec_text)
    return str(replace(spec, reduce=str(spec.reduction.of(dtype))))


def _declare_gradient(ctx: Any, computed: torch.dtype, reduce_text: str) -> None:
    """In the forward of a read: say in which dtype the gradient of the full parameter comes, as FSDP2 does.

    It is the dtype that is reduced. Where that is wider than ``computed``, the gradient comes as it is: a custom
    function may compute the gradient of a bfloat16 parameter in float32, and others need no cast of their own.
    """
    if reduce_text.startswith(PIECE):
        return
    spec = ReduceSpec.parse(reduce_text)
    reduced = getattr(torch, spec.dtype)
    wider = reduced.is_floating_point and computed.is_floating_point and reduced.itemsize > computed.itemsize
    if spec.any_dtype or reduced != computed:
        declare_gradient_dtype(ctx, None if spec.any_dtype or wider else reduced)


# ---- unshard, attach -------------------------------------------------------------------------------------------------
def _save_unshard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, gate, param_id, spec_text, _, _, read = inputs
    # the id is not saved for backward: activation checkpointing counts saved tensors, and a parameter that is gathered
    # once in forward may be gathered twice in the recomputation
    _note_read(ctx, output, shard if gate is None else gate, param_id, spec_text, read)


def _reduce_for_unshard(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, grad_for_gate(ctx, grad), None, None, None, None, None


class Attach(torch.autograd.Function):
    """A full parameter, with the gate as what its gradient goes to; without a copy.

    ``collect``: takes the gradient in eager code, and gives what the gate gets; None: ``grad_for_gate`` does.
    """

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, gate: Tensor | None, param_id: Tensor, spec_text: str, read: int = -1,
        collect: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        _note_read(ctx, full, gate, param_id, spec_text, read)
        ctx.hands_to_block = collect
        # of a fake tensor the op would make one with memory of its own, as it does while a graph is traced
        return full.detach() if is_wrapper(full) or is_traced([full]) else share(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        with_graph = in_compiled_autograd() or torch.is_grad_enabled()  # the latter with create_graph=True
        if ctx.hands_to_block is None or with_graph:
            return None, grad_for_gate(ctx, grad), None, None, None, None
        return None, ctx.hands_to_block(ctx, grad), None, None, None, None


@torch.compiler.allow_in_graph
def attach(full: Tensor, gate: Tensor | None, param_id: Tensor, spec: str, read: int = -1) -> Tensor:
    """``Attach`` in graphs; arguments as ``reduce_grad``'s."""
    return full if gate is None else Attach.apply(full, gate, param_id, spec, read)


class FollowsInBackward(torch.autograd.Function):
    """Outputs of a forward, whose backward takes part in the gathers of the plan that the forward followed.

    ``anchor`` is a leaf: with it the outputs require a gradient, as they do on the ranks whose plan it is.
    """

    @staticmethod
    def forward(ctx: Any, bound: BoundPlan, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.bound = bound
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if not in_compiled_autograd():  # whose graph takes part in a plan of its own
            RUNTIME.follower.backwards.run_whole(ctx.bound)
        return None, None, *(None for _ in grads)


def follow_in_backward(outputs: Sequence[Any], bound: BoundPlan) -> list[Any]:
    """A graph's ``outputs``, as ``FollowsInBackward`` has them; unless one requires a gradient already."""
    places = [n for n, output in enumerate(outputs) if isinstance(output, Tensor) and output.is_floating_point()]
    found = list(outputs)
    if places and not any(found[place].requires_grad for place in places):
        anchor = torch.zeros((), requires_grad=True)
        given = FollowsInBackward.apply(bound, anchor, *(found[place] for place in places))
        for place, output in zip(places, given, strict=True):
            found[place] = output
    return found


# ---- use, reduce_grad ------------------------------------------------------------------------------------------------
def zero_grads(fulls: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """A gradient of zeros for each full parameter; ``grad``: the output's, None if compiled autograd found none."""
    # with the output's gradient: what follows from kept parameters alone would be cut into the forward graph
    return [zero_grad(full, full if grad is None else grad) for full in fulls]


def _save_fulls(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


def _zeros_for_fulls(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
    return grad, zero_grads(ctx.saved_tensors, grad)


def _no_double_backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: a gradient of a parameter's gradient was asked for (create_graph=True through a sharded "
        "parameter). The reduction across ranks is not differentiable; take the penalty on gradients of activations or "
        "inputs instead, with torch.autograd.grad(loss, inputs, create_graph=True)."
    )


torch.library.register_autograd("compiled_fsdp::unshard", _reduce_for_unshard, setup_context=_save_unshard, lib=lib)
torch.library.register_autograd("compiled_fsdp::use", _zeros_for_fulls, setup_context=_save_fulls, lib=lib)
torch.library.register_autograd("compiled_fsdp::reduce_grad", _no_double_backward, lib=lib)
