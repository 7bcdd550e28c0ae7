"""An error that names the parameter if ``torch.autograd.grad`` gets a tensor of it that the loss does not use."""

from __future__ import annotations

from typing import Any

import torch

from compiled_fsdp.state.parameter import ShardedParameter, path_of
from compiled_fsdp.state.registry import find, parameters_by_param


def why_unused(tensor: Any) -> str | None:
    """Explain why a tensor of a parameter was "not used in the graph", as torch says; None for any other tensor."""
    if (parameter := parameters_by_param().get(tensor)) is not None:
        return _message(parameter, "It is the sharded DTensor, and a forward computes with full parameters.")
    if (parameter := _read_by(tensor)) is not None:
        return _message(parameter, "It was gathered for another use than that forward.")
    return None


def _read_by(tensor: Any) -> ShardedParameter | None:
    """The parameter that eager code has read as ``tensor``; None for any other tensor."""
    param_id = getattr(getattr(tensor, "grad_fn", None), "param_id", None)
    return find(int(param_id)) if isinstance(param_id, torch.Tensor) else None


def _message(parameter: ShardedParameter, why: str) -> str:
    module, _, attribute = parameter.name.rpartition(".")
    path = path_of(module)
    return (
        f"compiled_fsdp: torch.autograd.grad: the loss was not computed with the tensor that was given for "
        f"{parameter.name!r}. {why} Read {path}.{attribute} (not parameters()) after one uncompiled forward and before "
        "its backward, of a unit with reshard_after_forward=False, which is a root's default. In a compiled model, "
        f"make the module such a unit, by fully_shard({path}, reshard_after_forward=False) before the root, and keep "
        f"its forward out of the graph: {path}.forward = torch.compiler.disable({path}.forward)."
    )
