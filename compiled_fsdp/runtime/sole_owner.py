"""Whether a gradient that reaches a gate may become ``.grad`` as it is: what AccumulateGrad asks before it copies.

It may if nothing else holds the tensor. How many references there are inside of a hook to a tensor that nothing else holds is the
engine's affair, and Python's, so it is looked at once.
"""

from __future__ import annotations

import functools
import sys

import torch

from compiled_fsdp.compat import is_cached_tensor, no_modes, use_count

Counts = tuple[int, int]


def counts(grads: tuple[torch.Tensor, ...]) -> Counts:
    """References to a hook's first gradient, in C++ and in Python."""
    return use_count(grads[0]), sys.getrefcount(grads[0])


@functools.cache
def sole_owners() -> Counts:
    """``counts`` in a hook for a gradient that is nobody else's."""
    found: list[Counts] = []

    def look(grads: tuple[torch.Tensor, ...]) -> tuple[None]:
        found.append(counts(grads))
        return (None,)

    with no_modes(), torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros((), requires_grad=True, device="cpu").expand(2)
        assert leaf.grad_fn is not None
        leaf.grad_fn.register_prehook(look)
        torch.autograd.backward((leaf * 2).sum())
    return found[0]


def is_ours(held: Counts, grad: torch.Tensor) -> bool:
    """Whether ``grad``, of which a hook counted references, may be kept without a copy. Not what CUDA graphs write again, nor what
    ``create_graph`` differentiates once more."""
    if any(have > alone for have, alone in zip(held, sole_owners(), strict=True)):
        return False
    return grad.is_contiguous() and not grad.requires_grad and not is_cached_tensor(grad)
