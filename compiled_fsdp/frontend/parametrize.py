"""The changed class and ``_parameters`` of a module, through which ``self.weight`` reads a sharded parameter.

A unit's module becomes an ``FSDPModule``, and a module that owns parameters gets a property for each of them. There is
one class for each (original class, parameter names, unit or not), so equal layers share a class and with it their
compiled graphs. The class knows nothing about layout, mesh or policy: its properties look them up from the instance.
"""

# Why: docs/design/reads.md, "A property reads the parameter"

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compiled_fsdp.compat.dynamo import break_graph, skip_as_frame
from compiled_fsdp.compat.modules import forwards_in_trace
from compiled_fsdp.frontend.called_alone import called_alone_error
from compiled_fsdp.frontend.copies import copy_of, deepcopy_of, no_pickle
from compiled_fsdp.frontend.forward_hooks import ForwardHooks
from compiled_fsdp.frontend.fsdp_module import FSDPModule
from compiled_fsdp.frontend.read import ParameterReads, read_attribute, stored
from compiled_fsdp.frontend.refresh import check, follow_grad_dtype, refresh, replace
from compiled_fsdp.frontend.traced_reads import (
    APART,
    CALLED_ALONE,
    KEEPS,
    NOTHING_THERE,
    REGATHERS,
    TRAINS,
    way_to_read,
)
from compiled_fsdp.frontend.unshard import reshard_owned
from compiled_fsdp.ops import schema
from compiled_fsdp.state.parameter import GATE, ID, OTHER, READ, SHARD, TEXT, ShardedParameter
from compiled_fsdp.state.unit import Unit

_classes: dict[tuple[type, tuple[str, ...], bool], type] = {}


def change_class(module: nn.Module, reads: dict[str, ShardedParameter], unit: Unit, hooks: ForwardHooks | None) -> None:
    """Change ``module``'s class so that its sharded parameters are read through properties.

    Args:
        module: owns parameters of the unit, or is one of the unit's own modules.
        reads: the unit's parameters in ``module``, by attribute name.
        unit: their unit.
        hooks: the unit's hooks if ``module`` is one of the unit's own modules, which becomes an FSDPModule; else None.
    """
    original = getattr(type(module), "_fsdp_original", type(module))
    is_unit = hooks is not None or isinstance(module, FSDPModule)
    if hooks is not None:
        module.__dict__["_fsdp_unit"], module.__dict__["_fsdp_hooks"] = unit, hooks
    known = module.__dict__.setdefault("_fsdp_reads", {})
    known.update(reads)
    module.__dict__.update({READ.format(name): parameter for name, parameter in reads.items()})
    parameters = module._parameters
    if known:
        if not isinstance(parameters, ParameterReads):
            parameters = module.__dict__["_parameters"] = ParameterReads(parameters)
        parameters.known = known
        parameters.units.update(dict.fromkeys(reads, unit))
        for name, parameter in reads.items():
            parameters.note(name)
            parameter.show()
        parameters.owned_elsewhere = {name for name, parameter in known.items() if parameter.owner[0] is not module}
    # Without own parameters it keeps a plain dictionary, because with another type Dynamo traces all of
    # ``Module.__getattr__`` for each submodule. Parameters that are None get properties for the same reason.
    names = dict.fromkeys([*known, *(name for name in parameters if stored(module, name) is None)])
    key = original, tuple(names), is_unit
    if key not in _classes:
        _classes[key] = _make_class(*key)
    object.__setattr__(module, "__class__", _classes[key])  # the module's own ``__setattr__`` may refuse


class _Unheard:
    """The first base of a class while it is made, so that no ``__init_subclass__`` of the user's bases is called."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _make_class(original: type, names: tuple[str, ...], is_unit: bool) -> type:
    bases = (FSDPModule, original) if is_unit else (original,)
    namespace: dict[str, Any] = {name: _property(name) for name in names}
    namespace |= {
        "_fsdp_original": original,
        "_fsdp_way_to_read": _fsdp_way_to_read,
        "_fsdp_called_alone_error": _fsdp_called_alone_error,
        "__new__": _new,
        "_apply": _apply,
        "requires_grad_": _requires_grad,
        "register_parameter": _register_parameter,
        "__deepcopy__": deepcopy_of,
        "__copy__": copy_of,
        "__reduce_ex__": no_pickle,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    # No code of the user's classes runs, because an ``__init_subclass__`` or a metaclass may want keywords, keep a
    # registry of names, or refuse. ``ABCMeta`` runs, because an abstract class needs a cache for ``isinstance()``.
    kind: Any = type(original)
    make = abc.ABCMeta.__new__ if issubclass(kind, abc.ABCMeta) else type.__new__
    # the original's name: policies and quantizers match classes by name
    made: Any = make(kind, original.__name__, (_Unheard, *bases), namespace)
    type.__setattr__(made, "__bases__", bases)
    return made


def _property(name: str) -> property:
    other = OTHER.format(name)
    shard_of, gate_of, id_of, text_of = (attribute.format(name) for attribute in (SHARD, GATE, ID, TEXT))

    @skip_as_frame
    def read(module: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # only in traced code; code that Dynamo itself runs must not gather
            way = module._fsdp_way_to_read(name)
            if way >= 0:  # first, because Dynamo takes longer for each step of this function
                gate = getattr(module, gate_of) if way & TRAINS else None
                shard = getattr(module, shard_of) if way & APART else gate
                param_id, text = getattr(module, id_of), getattr(module, text_of)
                return schema.read(shard, gate, param_id, text, bool(way & KEEPS), way // REGATHERS)
            if way == NOTHING_THERE:
                return None
            if way == CALLED_ALONE:
                break_graph(module._fsdp_called_alone_error(name))
        parameters = module.__dict__.get("_parameters", ())  # it is missing before Module.__init__
        # this comes first, because a look at the dictionary itself makes Dynamo guard on every property of the DTensor
        if isinstance(parameters, ParameterReads) and name in parameters.sharded:
            if torch.compiler.is_dynamo_compiling():
                return parameters[name]
            return read_attribute(module, parameters, name)
        if name in parameters:
            return parameters[name]
        if other in module.__dict__:
            return getattr(module, other)
        if name in module.__dict__:  # old-style weight_norm leaves it there
            return module.__dict__[name]
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")

    # Called for a value that is no parameter, under the name of a parameter that is None or was deleted. The value gets
    # another name, because torch 2.11's Dynamo would call this property again for an attribute of the same name.
    @skip_as_frame
    def write(module: Any, value: Any) -> None:
        module.__dict__[other] = value

    @skip_as_frame
    def delete(module: Any) -> None:
        if other not in module.__dict__:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        del module.__dict__[other]

    return property(read, write, delete)


@torch.compiler.assume_constant_result
def _fsdp_way_to_read(module: Any, name: str) -> int:  # its own name is how Dynamo finds it
    return way_to_read(module, name)


@torch.compiler.assume_constant_result
def _fsdp_called_alone_error(module: Any, name: str) -> str:
    return called_alone_error(module._fsdp_reads[name], forwards_in_trace())


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # a slice of a sharded nn.Sequential is made as type(self)(...): a new and unsharded container
    return cls._fsdp_original(*args, **kwargs)


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    # .to(), .cuda(), .to_empty() and the like replace the tensors of parameters
    reshard_owned(self)
    grads = {}
    for parameter in self._fsdp_reads.values():
        follow_grad_dtype(parameter)
        if parameter.grad_dtype_set is not None and parameter.param.grad is not None:
            # set aside, because its dtype is not the parameter's, and ``fn`` would cast it like the parameter
            grads[parameter], parameter.param.grad = parameter.param.grad, None
    try:
        self._fsdp_original._apply(self, fn, recurse)
        for parameter in self._fsdp_reads.values():
            refresh(parameter)
    finally:
        for parameter, grad in grads.items():
            parameter.param.grad = grad.to(parameter.param.device)
    return self


def _requires_grad(self: Any, requires_grad: bool = True) -> Any:
    # after unshard() modules give full tensors, but the DTensors are the parameters that train
    for module in self.modules():
        if "_fsdp_reads" in module.__dict__:
            reshard_owned(module)
    return self._fsdp_original.requires_grad_(self, requires_grad)


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    # called for an assignment, and by load_state_dict(assign=True)
    if name in self._fsdp_reads and param is not None:
        check(self._fsdp_reads[name], param)
    self._fsdp_original.register_parameter(self, name, param)
    if name in self._fsdp_reads and param is not None:
        replace(self._fsdp_reads[name], param)
