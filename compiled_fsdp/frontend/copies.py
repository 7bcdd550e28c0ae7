"""``copy.deepcopy``, ``copy.copy`` and ``pickle`` of modules that own sharded parameters.

A module inside of a unit can be copied, as with FSDP2: the copy has the original class and parameters of its own, and
belongs to no unit. A unit can be neither copied nor pickled.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NoReturn, cast

import torch
from torch import nn

from compiled_fsdp.compat.autograd import dtensor_like, is_wrapper, local_of
from compiled_fsdp.frontend.read import stored
from compiled_fsdp.state.parameter import GATE, ID, OTHER, READ, SHARD, TEXT, ShardedParameter


def deepcopy_of(module: Any, memo: dict[Any, Any]) -> nn.Module:
    """Copy ``module`` without sharding: the copy has the class that ``module`` had before ``fully_shard``.

    Its parameters are copies of the tensors that ``module``'s attributes give now: DTensors with shards of their own,
    or full tensors, for example after ``unshard()``. They have no gradients.

    Raises:
        RuntimeError: ``module`` is a unit, or its class was changed after ``fully_shard``.
    """
    _check(module, "deep-copied", "copy the model before fully_shard, or save and load its state_dict()")
    for name, parameter in module._fsdp_reads.items():
        if stored(module, name) is parameter.param:
            _copy(parameter, getattr(module, name), memo)
    if id(module) in memo:  # copied already, because an attribute of a parameter refers to it
        return cast(nn.Module, memo[id(module)])
    original = module._fsdp_original
    plain = object.__new__(original)
    plain.__dict__.update(_attributes_without_sharding(module))
    memo.setdefault(id(memo), []).append(plain)  # kept alive as long as its id is in ``memo``
    if hasattr(original, "__deepcopy__"):
        made = original.__deepcopy__(plain, memo)
    else:
        # as ``copy.deepcopy(plain)``, but in ``memo`` as the copy of ``module``, because modules inside may refer to it
        made = cast(Any, copy)._reconstruct(module, memo, *plain.__reduce_ex__(4))
    memo[id(module)] = made
    return made


def copy_of(module: Any) -> nn.Module:
    """Make a shallow copy: another module with the same parameters, which a forward of the unit gathers for both.

    Raises:
        RuntimeError: as ``deepcopy_of``.
    """
    _check(module, "copied", "copy the model before fully_shard")
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name, parameter in module._fsdp_reads.items():
        # the copy is one more place of the parameter, which gets its changes
        parameter.places = [place for place in parameter.places if place[0]() is not None]
        parameter.places.append((weakref.ref(made), name))
    return made


def no_pickle(self: nn.Module, protocol: Any) -> NoReturn:
    """Raise RuntimeError, which says how to save the module instead."""
    raise RuntimeError(
        f"compiled_fsdp: a sharded {type(self).__name__} cannot be pickled; save its state_dict() with "
        "torch.distributed.checkpoint."
    )


def _check(module: Any, how: str, instead: str) -> None:
    if "_fsdp_unit" in module.__dict__:
        raise RuntimeError(f"compiled_fsdp: a sharded {type(module).__name__} cannot be {how}; {instead}.")
    if "_fsdp_original" not in vars(type(module)):
        raise RuntimeError(
            f"compiled_fsdp: a sharded {type(module).__name__} cannot be {how}, because its class was changed after "
            f"fully_shard, as torch.nn.utils.parametrize.register_parametrization does; {instead}."
        )


def _copy(parameter: ShardedParameter, read: torch.Tensor, memo: dict[Any, Any]) -> None:
    param = parameter.param
    if id(param) in memo:
        return
    with torch.no_grad():
        if read is param:
            local = local_of(param)
            own: torch.Tensor = dtensor_like(param, copy.deepcopy(local, memo) if is_wrapper(local) else local.clone())
        else:
            own = read.detach().clone()
    made = memo[id(param)] = nn.Parameter(own, requires_grad=param.requires_grad)
    # ``memo`` has ``made`` before its attributes are copied, because one of them may refer to the module
    made.__dict__.update(copy.deepcopy({k: v for k, v in vars(param).items() if not k.startswith("_dynamo")}, memo))


# The entries that ``fully_shard`` adds to a module's ``__dict__``, without those that it adds for each parameter.
_ADDED = ("_fsdp_reads", "_fsdp_hook_ids", "_fsdp_use_orig_params")
_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _attributes_without_sharding(module: Any) -> dict[str, Any]:
    attributes = dict(vars(module))
    for name in module._fsdp_reads:
        for added in (SHARD, GATE, ID, TEXT, READ):
            attributes.pop(added.format(name), None)
        if (other := OTHER.format(name)) in attributes:  # the user's own value under the parameter's name
            attributes[name] = attributes.pop(other)
    for name in _ADDED:
        attributes.pop(name, None)
    attributes["_parameters"] = dict(dict.items(module._parameters))
    for name in _HOOKS:
        hooks = attributes[name]
        if ours := module._fsdp_hook_ids.intersection(hooks):
            attributes[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
    return attributes
