"""An optimizer's step on this rank's shards, as plain tensors.

An optimizer that treats each element by itself gives the same numbers on shards. As DTensors they cost the host some
microseconds for each operation on each parameter, and ``foreach`` implementations are not chosen for them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import dtensor_like, local_of

BY_ELEMENT = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop")
}
"""The optimizers that treat each element of a parameter by itself. Subclasses may do something else."""


def treats_elements_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer gives the same numbers on parts of its parameters."""
    return type(optimizer) in BY_ELEMENT and not optimizer.defaults.get("differentiable")


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; anything else is returned as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def on_shards(optimizer: torch.optim.Optimizer) -> Iterator[dict[Tensor, Tensor]]:
    """Within this context the optimizer has plain tensors instead of DTensors: parameters, gradients and state.

    They share memory with the DTensors, which come back at the end, also after an error. State that a step creates
    becomes DTensors with their parameter's placements, as in a step on DTensors.

    Yields: the plain tensor of each parameter.
    """
    params = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    plain = {param: _plain(param) for group in params for param in group}
    plain_state: defaultdict[Tensor, Any] = defaultdict(dict)
    for param, tensor in plain.items():
        if param in state:
            plain_state[tensor] = {name: local(value) for name, value in state[param].items()}
    try:
        for group, given in zip(optimizer.param_groups, params, strict=True):
            group["params"] = [plain[param] for param in given]
        optimizer.state = plain_state
        yield plain
    finally:
        optimizer.state = state
        for group, given in zip(optimizer.param_groups, params, strict=True):
            group["params"] = given
        for param, tensor in plain.items():
            if tensor in plain_state:
                _take_back(param, tensor, state[param], plain_state[tensor])


def _plain(param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return param
    tensor, grad = local_of(param).detach(), local(param.grad)
    if grad is not None and grad.dtype != tensor.dtype:
        tensor.grad_dtype = grad.dtype
    tensor.grad = grad
    return tensor


def _take_back(param: Tensor, tensor: Tensor, state: dict[str, Any], new: dict[str, Any]) -> None:
    """Note a parameter's new state. Most optimizers have changed its tensors in place."""
    for name in state.keys() - new.keys():
        del state[name]
    for name, value in new.items():
        if name in state and local(state[name]) is value:
            continue
        state[name] = as_state(param, value)


def as_state(param: Tensor, value: Any) -> Any:
    """Return state of a parameter's shard as a step on DTensors has it: a tensor of the shard's shape as a DTensor."""
    is_sharded = isinstance(param, DTensor) and isinstance(value, Tensor) and value.ndim > 0
    return dtensor_like(param, value) if is_sharded and value.shape == local_of(param).shape else value
