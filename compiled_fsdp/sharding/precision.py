"""Mixed precision of a unit: FSDP2's MixedPrecisionPolicy, and the casts of its forward's inputs and outputs.

If ``reduce_dtype`` is None, gradients are reduced in the parameter's ``grad_dtype``, which is the parameter's own dtype
unless the user sets it. FSDP2 does the same from torch 2.15 on; with an earlier torch it takes ``param_dtype``.
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
    """Raise ValueError unless ``policy`` has the dtypes of a mixed-precision policy: floating-point ones, or None."""
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

    # The dtype in which it is gathered.
    gathered: torch.dtype
    # The dtype in which unreduced gradients are added up, and in which gradients are reduced.
    reduced: torch.dtype
    # The dtype of ``.grad``; None for the dtype in which the gradient was reduced.
    grad: torch.dtype | None


class PolicyDtypes(NamedTuple):
    """The dtypes that a policy sets for one parameter; None if it sets none."""

    # The dtype in which it is gathered.
    gathered: torch.dtype | None = None
    # The dtype in which its gradient is reduced.
    reduced: torch.dtype | None = None

    def of(self, original: torch.dtype, grad_dtype: tuple[torch.dtype | None] | None) -> Dtypes:
        """Resolve all dtypes of a parameter; a policy counts for floating-point parameters only.

        Args:
            original: the parameter's own dtype.
            grad_dtype: the ``grad_dtype`` that the user set, in a tuple; None if the user set none.
        """
        by_policy = self if original.is_floating_point else PolicyDtypes()
        gathered = by_policy.gathered or original
        of_grad = original if grad_dtype is None else grad_dtype[0]
        # ``grad_dtype=None`` leaves each gradient in its own dtype, usually the dtype of compute
        return Dtypes(gathered, by_policy.reduced or of_grad or gathered, of_grad or by_policy.reduced)


def dtypes_of(name: str, param: nn.Parameter, policy: MixedPrecisionPolicy | None) -> PolicyDtypes:
    """Return the dtypes that a policy sets for gathering a parameter and computing with it, and for its gradient.

    Raises:
        ValueError: ``param_dtype_override_fn`` (torch 2.15) returned something else than None, ``param_dtype`` or the
            parameter's own dtype.
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
    """The dtype that floating-point inputs of a forward are cast to; None if they are not cast."""
    return policy.param_dtype if policy is not None and policy.cast_forward_inputs else None


def cast(dtype: torch.dtype | None, tree: Any) -> Any:
    """Cast the floating-point tensors in ``tree`` (nested containers) to ``dtype``; None leaves them as they are."""
    return tree if dtype is None else apply_to_tensors(partial(_cast, dtype), tree)


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
