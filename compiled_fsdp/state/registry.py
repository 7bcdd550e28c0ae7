"""Which parameter a tensor in a graph stands for, at run time.

Compiled graphs are shared by equal layers, so nothing in their text may name a parameter. Each sharded parameter therefore
has a slot: a number, carried into the graph by a scalar tensor that is an input of every call.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from compiled_fsdp.state.parameter import ShardedParameter

_next = itertools.count()
# Weak: a model that is deleted takes its parameters along.
_parameters: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()


def new_slot(parameter: ShardedParameter) -> tuple[int, torch.Tensor]:
    """Number ``parameter``; returns the number and the int64 CPU scalar that carries it into graphs."""
    number = next(_next)
    _parameters[number] = parameter
    return number, torch.tensor(number, device="cpu")


def parameter_of(slot: int | torch.Tensor) -> ShardedParameter:
    """The sharded parameter behind a slot. Raises RuntimeError if its model has been deleted."""
    parameter = _parameters.get(int(slot))
    if parameter is None:
        raise RuntimeError(
            f"compiled_fsdp: slot {int(slot)} belongs to a parameter whose model has been deleted, but a graph still reads it; "
            "keep the sharded model alive as long as its compiled form or a pending backward."
        )
    return parameter


def find(slot: int) -> ShardedParameter | None:
    """The sharded parameter behind a slot, None if its model has been deleted."""
    return _parameters.get(slot)


def names() -> list[str]:
    """The names of all sharded parameters of living models."""
    return [parameter.name for parameter in list(_parameters.values())]


def group_of(slot: torch.Tensor) -> ProcessGroup:
    """The process group that shards the parameter behind ``slot``."""
    return parameter_of(slot).group.process_group
