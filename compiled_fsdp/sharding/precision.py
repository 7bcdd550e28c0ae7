"""Mixed precision of a unit: FSDP2's MixedPrecisionPolicy, and the casts at its forward's boundaries.

Where ``reduce_dtype`` is None gradients are reduced in the parameter's ``grad_dtype``, which is its own dtype unless
somebody set it, as FSDP2 does from torch 2.15; before, FSDP2 took ``param_dtype``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from compiled_fsdp.compat.modules import apply_to_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def check_policy(policy: Any) -> None:
    """Raise ValueError for what is not a mixed-precision policy, or has dtypes that cannot be."""
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        if not hasattr(policy, name):
            raise ValueError(
                f"fully_shard: mp_policy must be a MixedPrecisionPolicy, but got {type(policy).__name__} without "
                f"{name}."
            )
        value = getattr(policy, name)
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise ValueError(
                f"fully_shard: mp_policy: {name} must be a floating-point torch.dtype or None, but is {value!r}."
            )


class Dtypes(NamedTuple):
    """The dtypes of one parameter and of its gradient."""

    # In which it is gathered.
    gathered: torch.dtype
    # In which unreduced gradients are added up, and reduced.
    reduced: torch.dtype
    # Of ``.grad``; None: that in which the gradient was reduced.
    grad: torch.dtype | None


class PolicyDtypes(NamedTuple):
    """What a policy says of one parameter; None: nothing."""

    # In which it is gathered.
    gathered: torch.dtype | None = None
    # In which its gradient is reduced.
    reduced: torch.dtype | None = None

    def of(self, original: torch.dtype, grad_dtype: tuple[torch.dtype | None] | None) -> Dtypes:
        """The dtypes of a parameter that is in ``original`` now; a policy is for floating-point numbers alone.

        Args:
            original: the parameter's own dtype.
            grad_dtype: what its ``grad_dtype`` was set to; None if it was not.
        """
        by_policy = self if original.is_floating_point else PolicyDtypes()
        gathered = by_policy.gathered or original
        of_grad = original if grad_dtype is None else grad_dtype[0]
        # ``grad_dtype=None`` takes gradients as they come: most in the dtype that is computed in
        return Dtypes(gathered, by_policy.reduced or of_grad or gathered, of_grad or by_policy.reduced)


def dtypes_of(name: str, param: nn.Parameter, policy: MixedPrecisionPolicy | None) -> PolicyDtypes:
    """In which dtype a parameter is gathered and computed with, and in which its gradient is reduced.

    Raises:
        ValueError: ``param_dtype_override_fn`` (torch 2.15) returned something else than None, ``param_dtype`` or the
            original.
    """
    if policy is None:
        return PolicyDtypes()
    original = param.dtype
    override = getattr(policy, "param_dtype_override_fn", None)
    chosen = override(param) if override is not None and original.is_floating_point else None
    if chosen is not None and chosen not in (policy.param_dtype, original):
        raise ValueError(
            f"fully_shard: mp_policy: param_dtype_override_fn must return None, param_dtype ({policy.param_dtype}) or "
            f"the parameter's own dtype ({original}), but for {name} it returned {chosen!r}."
        )
    return PolicyDtypes(chosen or policy.param_dtype, policy.reduce_dtype)


def casts_inputs(policy: MixedPrecisionPolicy | None) -> torch.dtype | None:
    """The dtype that floating-point inputs of a forward are cast to; None: they stay."""
    return policy.param_dtype if policy is not None and policy.cast_forward_inputs else None


def cast(dtype: torch.dtype | None, tree: Any) -> Any:
    """``tree`` (nested containers) with its floating-point tensors in ``dtype``; None leaves them."""
    return tree if dtype is None else apply_to_tensors(partial(_cast, dtype), tree)


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
