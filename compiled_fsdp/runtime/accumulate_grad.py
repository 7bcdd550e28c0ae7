"""What AccumulateGrad does for a leaf, for a sharded parameter: add to ``.grad``, and run the hooks."""

# Why: docs/design.md, note N13

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_fsdp.compat import (
    dtensor_like,
    is_cached_tensor,
    local_of,
    no_modes,
    post_accumulate_grad_hooks,
    skip_as_frame,
    use_count,
)
from compiled_fsdp.runtime.offloaded_grads import OffloadedGrads
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


@skip_as_frame
def accumulate_grad(
    parameter: ShardedParameter, unit: Unit, grad: Tensor, owned: bool = False, *, offloaded: OffloadedGrads
) -> None:
    """Add the shard's reduced gradient (of the padded shape) to ``.grad`` of a parameter of ``unit``.

    ``grad`` is copied unless its memory is ``owned``: a compiled backward may use its own again. Where the shard is on
    another device, it is on its way with those that are ``offloaded``.
    """
    unit.after_backward(parameter)
    if torch.is_grad_enabled():  # create_graph; entering a context takes as long as half of the rest
        with torch.no_grad():
            _add(parameter, grad, owned, offloaded)
    else:
        _add(parameter, grad, owned, offloaded)


@skip_as_frame
def _add(parameter: ShardedParameter, grad: Tensor, owned: bool, offloaded: OffloadedGrads) -> None:
    param, rows = parameter.param, grad
    if parameter.rows != grad.shape[parameter.dim]:
        rows = grad.narrow(parameter.dim, 0, parameter.rows)
    if rows.device != parameter.shard.device:
        offloaded.accumulate(parameter, rows)
    elif param.grad is None:
        param.grad = dtensor_like(param, rows if owned else rows.clone(memory_format=torch.contiguous_format))
    else:
        local_of(param.grad).add_(rows)


@skip_as_frame
def run_hooks(parameter: ShardedParameter, prefetcher: AllGatherPrefetcher, offloaded: OffloadedGrads) -> None:
    """Run the post-accumulate-grad hooks: all of ``.grad`` is there."""
    param = parameter.param
    hooks = post_accumulate_grad_hooks(param)
    if not hooks:
        return
    prefetcher.drop([param])  # a hook may update it
    offloaded.finish()
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
        hook(params)


# ---- whether a gradient may become ``.grad`` as it is ----------------------------------------------------------------
# It may if nothing else holds the tensor, as AccumulateGrad asks before it copies. How many references there are,
# inside of a hook, to a tensor that nothing else holds depends on the engine and on Python, so it is counted once.
Counts = tuple[int, int]


def references(grads: tuple[Tensor, ...]) -> Counts:
    """References to a hook's first gradient, in C++ and in Python."""
    return use_count(grads[0]), sys.getrefcount(grads[0])


@functools.cache
def references_of_sole_owner() -> Counts:
    """``references`` in a hook for a gradient that is nobody else's."""
    found: list[Counts] = []

    def look(grads: tuple[Tensor, ...]) -> tuple[None]:
        found.append(references(grads))
        return (None,)

    with no_modes(), torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros((), requires_grad=True, device="cpu").expand(2)
        assert leaf.grad_fn is not None
        leaf.grad_fn.register_prehook(look)
        torch.autograd.backward((leaf * 2).sum())
    return found[0]


def may_keep(held: Counts, grad: Tensor) -> bool:
    """Whether ``grad``, of which a hook counted references, may be kept without a copy.

    Not what CUDA graphs write again, nor what ``create_graph`` differentiates once more.
    """
    in_cpp, in_python = references_of_sole_owner()
    if held[0] > in_cpp or held[1] > in_python:
        return False
    return grad.is_contiguous() and not grad.requires_grad and not is_cached_tensor(grad)
