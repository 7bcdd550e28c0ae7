"""The backward of the ops."""

# Why: docs/design/gradients.md, "Gates bring gradients to .grad"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives
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
    """Store in ``ctx`` the values that ``grad_for_gate`` reads in backward; the full parameter is not kept."""
    ctx.param_id, ctx.spec_text, ctx.read = param_id, spec_text, read
    ctx.dtype = None if gate is None else gate.dtype
    ctx.full_like = tuple(full.shape), full.dtype, full.device
    _declare_gradient(ctx, full.dtype, ReadSpec.parse(spec_text).reduce)


def grad_for_gate(ctx: Any, grad: Tensor | None) -> Tensor:
    """Reduce a full gradient, or add it to the pending gradients, and return the gradient for the parameter's gate.

    The gate gets the reduced gradient of the shard, or a zero of shape ``[]`` if the gradient is pending
    (``GradSync.NONE``).

    If ``grad`` is None, it counts as zeros. Autograd's engine makes such zeros by itself, but compiled autograd does
    not: for example, if a backward of the user returns None.
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
    if (parts := _parts_of(spec_text)) is not None:
        spec_text, grad = parts[0], collectives.by_parts(grad, *parts[1:])
    dtype = getattr(torch, reduced) if sync == GradSync.SHARDS_ONLY.value else ctx.dtype
    return reduce_grad(grad, param_id, spec_text, dtype, ctx.read)


# Dynamo traces backwards in compiled autograd's graphs. It treats the results of these functions as constants.
@torch.compiler.assume_constant_result
def _reduction_of(spec_text: str) -> tuple[str, str, bool]:
    """The ``GradSync`` of a read's gradient, its reduction dtype, and whether a wider gradient keeps its own dtype."""
    reduction = ReadSpec.parse(spec_text).reduction
    return reduction.sync.value, reduction.dtype, reduction.any_dtype


@torch.compiler.assume_constant_result
def _parts_of(spec_text: str) -> tuple[str, int, int, int] | None:
    """For a gradient that a part of the ranks reduces: the spec of that, and the arguments of ``by_parts``; or None."""
    spec = ReadSpec.parse(spec_text)
    within = spec.reduction.within
    return None if within is None else (str(spec.reduced_within), spec.world, within[0], spec.dim)


@torch.compiler.assume_constant_result
def _for_dtype(spec_text: str, dtype: torch.dtype) -> str:
    """Return the spec of the same read for a gradient of ``dtype``, which may widen the reduction dtype."""
    spec = ReadSpec.parse(spec_text)
    return str(replace(spec, reduce=str(spec.reduction.of(dtype))))


def _declare_gradient(ctx: Any, computed: torch.dtype, reduce_text: str) -> None:
    """Declare, in the forward of a read, the dtype in which autograd delivers the full gradient, as FSDP2 does.

    That is the reduction dtype. If it is wider than ``computed``, the full parameter's dtype, autograd delivers the
    gradient uncast. For example, a custom function may compute the gradient of a bfloat16 parameter in float32. A
    bfloat16 gradient is cast later, when its bucket is packed.
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
    # the id is an attribute and not a saved tensor, because activation checkpointing counts saved tensors: a parameter
    # that is gathered once in forward may be gathered twice in the recomputation
    _note_read(ctx, output, shard if gate is None else gate, param_id, spec_text, read)


def _reduce_for_unshard(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, grad_for_gate(ctx, grad), None, None, None, None, None


class Attach(torch.autograd.Function):
    """Return the full parameter, without a copy, so that its gradient flows to the gate.

    ``collect(ctx, grad)`` takes the full gradient in eager code and returns the gradient for the gate. If it is None,
    ``grad_for_gate`` does that.
    """

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, gate: Tensor | None, param_id: Tensor, spec_text: str, read: int = -1,
        collect: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        _note_read(ctx, full, gate, param_id, spec_text, read)
        ctx.hands_to_block = collect
        # while a graph is traced, ``share`` would return a tensor with its own memory, as it does for fake tensors
        return full.detach() if is_wrapper(full) or is_traced([full]) else share(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        with_graph = in_compiled_autograd() or torch.is_grad_enabled()  # grad is enabled with create_graph=True
        if ctx.hands_to_block is None or with_graph:
            return None, grad_for_gate(ctx, grad), None, None, None, None
        return None, ctx.hands_to_block(ctx, grad), None, None, None, None


@torch.compiler.allow_in_graph
def attach(full: Tensor, gate: Tensor | None, param_id: Tensor, spec: str, read: int = -1) -> Tensor:
    """Call ``Attach`` in a graph; without a gate ``full`` is returned as it is. Arguments are those of ``unshard``."""
    return full if gate is None else Attach.apply(full, gate, param_id, spec, read)


class FollowsInBackward(torch.autograd.Function):
    """Return a forward's outputs; their backward takes part in the gathers of the plan that the forward followed.

    ``anchor`` is a leaf that requires a gradient, so that the outputs require one, too, as on the ranks that compiled
    the plan. For example, a layer is frozen, and its input requires a gradient on the other ranks only. Their backward
    gathers the layer again, so this rank has to take part.
    """

    @staticmethod
    def forward(ctx: Any, bound: BoundPlan, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.bound = bound
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if not in_compiled_autograd():  # compiled autograd's graph follows its own plan
            RUNTIME.follower.backwards.run_whole(ctx.bound)
        return None, None, *(None for _ in grads)


def follow_in_backward(outputs: Sequence[Any], bound: BoundPlan) -> list[Any]:
    """Pass a graph's ``outputs`` through ``FollowsInBackward``, unless one of them requires a gradient already."""
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
    """Make a zero gradient for each full parameter; ``grad``: the output's, None if compiled autograd found none."""
    # the output's gradient is an argument, because the partitioner moves an op of kept parameters alone into forward
    return [zero_grad(full, full if grad is None else grad) for full in fulls]


def _save_fulls(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


def _zeros_for_fulls(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
    return grad, zero_grads(ctx.saved_tensors, grad)


def _no_double_backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise NotImplementedError(
        "compiled_fsdp: the gradient of a sharded parameter's gradient is needed (create_graph=True), but the "
        "reduction across ranks is not differentiable. Compute the penalty from gradients of activations or inputs "
        "instead, with torch.autograd.grad(loss, inputs, create_graph=True)."
    )


torch.library.register_autograd("compiled_fsdp::unshard", _reduce_for_unshard, setup_context=_save_unshard, lib=lib)
torch.library.register_autograd("compiled_fsdp::use", _zeros_for_fulls, setup_context=_save_fulls, lib=lib)
torch.library.register_autograd("compiled_fsdp::reduce_grad", _no_double_backward, lib=lib)
