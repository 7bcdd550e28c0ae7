"""What AccumulateGrad does for a leaf, for a sharded parameter: add to ``.grad``, and run the hooks."""

# Why: docs/design.md, note N13

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
    """Add the shard's reduced gradient (of the padded shape) to ``.grad`` of a parameter of ``unit``.

    ``grad`` is copied unless its memory is ``owned``: a compiled backward may use its own again. Where the shard is on
    another device, it is on its way with those that are ``offloaded``.
    """
    unit.after_backward(parameter)
    if parameter.grads.partial_reduce_output is not None and parameter.group.replicas == 1:
        grad, owned = add_to_partial(parameter, grad), True
    if torch.is_grad_enabled():  # create_graph; entering a context takes as long as half of the rest
        with torch.no_grad():
            add_to_grad(parameter, grad, owned, offloaded)
    else:
        add_to_grad(parameter, grad, owned, offloaded)


def add_to_grad(parameter: ShardedParameter, grad: Tensor, owned: bool, offloaded: OffloadedGrads) -> None:
    """What ``accumulate_grad`` does where nothing is unsharded and nothing waits, with gradients off."""
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
    """Raise where what waits is reduced too early: at the end of a backward inside of compiled autograd's.

    Its graph has no end that is known here. Without hooks the order does not matter: gradients are added up.
    """
    if not compiled_autograd_runs():
        return
    for parameter in (parameter for unit in units if unit.reduces for parameter in unit.parameters):
        if parameter.grads.unsharded_accumulated_grad is not None and post_accumulate_grad_hooks(parameter.param):
            raise RuntimeError(
                f"compiled_fsdp: gradients of {parameter.name!r} wait from earlier microbatches, and its hooks "
                "(register_post_accumulate_grad_hook) would run twice: under compiled_autograd() a reentrant "
                "checkpoint's backward ends before the one around it. Use checkpoint(..., use_reentrant=False), or run "
                "the backward without compiled_autograd()."
            )


_hooks_running = 0


def hooks_run() -> bool:
    """Whether a user's hook runs now, to which parameters are sharded."""
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
    """Run the post-accumulate-grad hooks: all of ``.grad`` is there."""
    param = parameter.param
    hooks = post_accumulate_grad_hooks(param)
    if not hooks:
        return
    prefetcher.drop([param])  # a hook may update it
    offloaded.finish()
    with _while_hooks_run():
        for hook in hooks:
            hook(param)


def run_post_backward_hooks(
    parameters: Sequence[ShardedParameter], prefetcher: AllGatherPrefetcher, offloaded: OffloadedGrads
) -> None:
    """Call the grouped hooks of these parameters' units, each once with all of its parameters."""
    hooks_of = {parameter: list(unit_of(parameter).post_backward_hooks.values()) for parameter in parameters}
    for hook in dict.fromkeys(hook for hooks in hooks_of.values() for hook in hooks):
        params = [parameter.param for parameter, hooks in hooks_of.items() if hook in hooks]
        prefetcher.drop(params)  # it may update them
        offloaded.finish()
        with _while_hooks_run():
            hook(params)


# ---- whether a gradient may become ``.grad`` as it is ----------------------------------------------------------------
# It may if nothing else holds the tensor, as AccumulateGrad asks before it copies. How many references there are,
# inside of a hook, to a tensor that nothing else holds depends on the engine and on Python, so it is counted once.
@functools.cache
def references_of_sole_owner() -> tuple[int, int]:
    """References in C++ and in Python, in a hook, to a gradient that is nobody else's."""
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
    """Whether a hook's first gradient may be kept without a copy.

    Not what CUDA graphs write again, nor what ``create_graph`` differentiates once more.
    """
    in_cpp, in_python = references_of_sole_owner()
    if use_count(grads[0]) > in_cpp or sys.getrefcount(grads[0]) > in_python:
        return False
    grad = grads[0]
    return grad.is_contiguous() and not grad.requires_grad and not (grad.is_cuda and is_cached_tensor(grad))
