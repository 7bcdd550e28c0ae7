"""Follow a parameter whose DTensor was moved, cast, loaded with ``assign``, swapped or replaced."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import address_of, grad_dtype_set_on, local_of, set_local, storage_id
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.frontend.read import ParameterReads, stored
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.gate import give_gate
from compiled_fsdp.sharding.extension import is_wrapped
from compiled_fsdp.state.equal_hooks import share_hooks
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


def refresh_all(unit: Unit) -> None:
    """Follow changed DTensors of this unit and of the units inside, whose own hooks may be part of a compiled graph."""
    for each in (unit, *unit.inner_units):
        for parameter in each.parameters:
            if not parameter.is_current():
                each.reshard()
                refresh(parameter)


def check(parameter: ShardedParameter, current: Any) -> None:
    """Raise ValueError if ``current`` is not a DTensor with this parameter's shape, mesh and placement."""
    if not parameter.layout.fits(current):
        got = (
            f"a DTensor {tuple(current.shape)} {current.placements}"
            if isinstance(current, DTensor)
            else f"a {type(current).__name__}"
        )
        raise ValueError(
            f"compiled_fsdp: parameter {parameter.name!r} was replaced by {got}; after fully_shard it must stay a "
            f"DTensor of {parameter.layout} on the same mesh. Assign before fully_shard, or load the value with "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict."
        )


@never_compiled
def replace(parameter: ShardedParameter, param: nn.Parameter) -> None:
    """Follow an assignment of ``param`` to one of the parameter's places: a tied parameter gets it in all places."""
    for module, attribute in parameter.live_places():
        if stored(module, attribute) is not None:  # else the user has set it to None or deleted it there
            module._parameters[attribute] = param
    refresh(parameter)


@never_compiled  # a hook in eager code calls it, below a compiled call
def refresh(parameter: ShardedParameter) -> None:
    """Follow the DTensor that the modules hold now: fit shard, dtypes and gate to it.

    Raises:
        ValueError: as ``check``.
        RuntimeError: with CPU offloading, the DTensor is not on the CPU.
    """
    held = (stored(module, attribute) for module, attribute in parameter.live_places())
    current: Any = next((param for param in held if param is not None), None)
    if current is None:
        return
    check(parameter, current)
    is_new = current is not parameter.param
    parameter.param = cast(nn.Parameter, current)
    unit_of(parameter).forget_reads()
    for module, attribute in parameter.live_places():
        cast(ParameterReads, module._parameters).note(attribute)
    RUNTIME.prefetcher.drop([parameter.param])  # its values may have been loaded in place
    local = local_of(current)
    if parameter.offload is not None and local.device.type not in ("cpu", "meta"):
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). {parameter.name!r} is on {local.device}."
        )
    wrapped = parameter.wrapped or is_wrapped(local)
    moved = local is not parameter.local if wrapped else not _same_memory(local, parameter.valid_rows())
    if is_new or moved:
        _restore_grad_dtype(parameter)
    follow_grad_dtype(parameter)
    dtypes = parameter.policy_dtypes.of(local.dtype, parameter.grad_dtype_set)
    if not moved and dtypes == parameter.dtypes:
        return
    unit = unit_of(parameter)
    if dtypes != parameter.dtypes:
        # dtypes that the mixed-precision policy leaves open follow the parameter's
        parameter.dtypes = dtypes
        parameter.tell(dtype=dtypes.gathered)
        unit.apply_reductions()
    with torch.no_grad():
        if not moved:
            pass
        elif wrapped:
            parameter.hold_local()
            share_hooks(parameter)
        elif parameter.rows == parameter.shard.shape[parameter.dim] and local.is_contiguous():
            parameter.shard = local.detach()
        else:
            shard = local.new_zeros(parameter.shard.shape)
            shard.narrow(parameter.dim, 0, parameter.rows).copy_(local)
            parameter.shard = shard
            set_local(current, parameter.valid_rows())
    unit.regroup()
    give_gate(parameter, unit)


def follow_grad_dtype(parameter: ShardedParameter) -> None:
    """Take the ``grad_dtype`` that the user has set on the DTensor."""
    parameter.grad_dtype_set = grad_dtype_set_on(parameter.param)


def _restore_grad_dtype(parameter: ShardedParameter) -> None:
    """Set the former ``grad_dtype`` on a new DTensor that has none.

    For example, ``model.to(torch.float16)`` swaps tensors, and the new ones have no ``grad_dtype``.
    """
    if parameter.grad_dtype_set is not None and grad_dtype_set_on(parameter.param) is None:
        parameter.param.grad_dtype = parameter.grad_dtype_set[0]


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or b.is_meta or a.dtype != b.dtype or a.device != b.device:
        return a is b
    if a.numel() == 0:
        return storage_id(a) == storage_id(b)
    return address_of(a) == address_of(b) and a.stride() == b.stride()
