"""Add reduced gradients to ``.grad`` of sharded parameters and run their hooks, as AccumulateGrad does for leaves."""

# Why: docs/design/gradients.md, "A gradient becomes .grad without a copy"

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compiled_fsdp.compat.autograd import is_cached_tensor, local_of, no_modes, post_accumulate_grad_hooks, use_count
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs
from compiled_fsdp.runtime.accumulation import add_to_partial
from compiled_fsdp.runtime.offloaded_grads import OffloadedGrads
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


def accumulate_grad(
    parameter: ShardedParameter, unit: Unit, grad: Tensor, owned: bool = False, *, offloaded: OffloadedGrads
) -> None:
    """Add a reduced gradient to ``.grad`` of a parameter of ``unit``.

    Args:
        grad: the shard's gradient, of the padded shard's shape.
        owned: whether ``.grad`` may keep ``grad``'s memory. Otherwise ``grad`` is copied, because a compiled backward
            may reuse its memory.
        offloaded: copies the gradient to the host if the shard is there. ``.grad`` is complete after its ``finish``.
    """
    unit.after_backward(parameter)
    partial = parameter.grads.partial_reduce_output
    if partial is not None and parameter.group.replicas == 1 and partial.shape == grad.shape:
        grad, owned = add_to_partial(parameter, grad), True
    if torch.is_grad_enabled():  # create_graph=True; else no context, which takes half as long as the rest of the call
        with torch.no_grad():
            add_to_grad(parameter, grad, owned, offloaded)
    else:
        add_to_grad(parameter, grad, owned, offloaded)


def add_to_grad(parameter: ShardedParameter, grad: Tensor, owned: bool, offloaded: OffloadedGrads) -> None:
    """Add to ``.grad`` without the rest of ``accumulate_grad``.

    For a unit that is sharded and a parameter without a pending gradient, with grad mode off.
    """
    param, rows = parameter.param, grad
    if parameter.rows != grad.shape[parameter.dim]:
        rows = grad.narrow(parameter.dim, 0, parameter.rows)
    if rows.device != parameter.shard.device:
        offloaded.accumulate(parameter, rows)
    elif param.grad is None:
        parameter.set_grad(rows if owned else rows.clone(memory_format=torch.contiguous_format))
    else:
        local_of(param.grad).add_(rows)


def refuse_hooks_in_inner_backward(units: Sequence[Unit]) -> None:
    """Raise RuntimeError if a backward inside of compiled autograd's would run a parameter's hooks too early.

    The inner backward would reduce the pending gradients at its end, although compiled autograd's graph may still bring
    more gradients to the same parameters. Without hooks that is right, because ``.grad`` is a sum in any order.
    """
    if not compiled_autograd_runs():
        return
    for parameter in (parameter for unit in units if unit.reduces for parameter in unit.parameters):
        if parameter.grads.unsharded_accumulated_grad is not None and post_accumulate_grad_hooks(parameter.param):
            raise RuntimeError(
                f"compiled_fsdp: {parameter.name!r} has a pending gradient from earlier microbatches, and its hooks "
                "(register_post_accumulate_grad_hook) would run twice, because under compiled_autograd() the backward "
                "of a reentrant checkpoint ends before the backward around it. Use checkpoint(..., "
                "use_reentrant=False), or run the backward without compiled_autograd()."
            )


_hooks_running = 0


def hooks_run() -> bool:
    """Whether a user's gradient hook is running. Parameters are sharded in it, although a backward is running."""
    return _hooks_running > 0


@contextlib.contextmanager
def _while_hooks_run() -> Iterator[None]:
    global _hooks_running
    _hooks_running += 1
    try:
        yield
    finally:
        _hooks_running -= 1


def run_hooks(parameter: ShardedParameter, prefetcher: AllGatherPrefetcher, offloaded: OffloadedGrads) -> None:
    """Run the post-accumulate-grad hooks of a parameter whose ``.grad`` is complete."""
    param = parameter.param
    hooks = post_accumulate_grad_hooks(param)
    if not hooks:
        return
    prefetcher.drop([param])  # a hook may update the parameter
    offloaded.finish()
    with _while_hooks_run():
        for hook in hooks:
            hook(param)


def run_post_backward_hooks(
    parameters: Sequence[ShardedParameter], prefetcher: AllGatherPrefetcher, offloaded: OffloadedGrads
) -> None:
    """Call the post-backward hooks of these parameters' units, each hook once with all of its parameters."""
    hooks_of = {parameter: list(unit_of(parameter).post_backward_hooks.values()) for parameter in parameters}
    for hook in dict.fromkeys(hook for hooks in hooks_of.values() for hook in hooks):
        params = [parameter.param for parameter, hooks in hooks_of.items() if hook in hooks]
        prefetcher.drop(params)  # the hook may update them
        offloaded.finish()
        with _while_hooks_run():
            hook(params)


# ---- whether a gradient may become ``.grad`` without a copy ----------------------------------------------------------
# As with AccumulateGrad it may if nothing else holds the tensor. The number of references that a hook then sees depends
# on autograd's engine and on Python, so it is measured once.
@functools.cache
def references_of_sole_owner() -> tuple[int, int]:
    """The numbers of C++ and Python references that a hook sees to a gradient which nothing else holds."""
    found: list[tuple[int, int]] = []

    def look(grads: tuple[Tensor, ...]) -> tuple[None]:
        found.append((use_count(grads[0]), sys.getrefcount(grads[0])))
        return (None,)

    with no_modes(), torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros((), requires_grad=True, device="cpu").expand(2)
        assert leaf.grad_fn is not None
        leaf.grad_fn.register_prehook(look)
        torch.autograd.backward((leaf * 2).sum())
    return found[0]


def may_keep(grads: tuple[Tensor, ...]) -> bool:
    """Whether a hook's first gradient may become ``.grad`` without a copy.

    False if CUDA graphs will write to its memory again, or if ``create_graph=True`` differentiates it once more.
    """
    in_cpp, in_python = references_of_sole_owner()
    if use_count(grads[0]) > in_cpp or sys.getrefcount(grads[0]) > in_python:
        return False
    grad = grads[0]
    return grad.is_contiguous() and not grad.requires_grad and not (grad.is_cuda and is_cached_tensor(grad))
