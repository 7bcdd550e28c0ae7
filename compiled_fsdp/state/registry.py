"""Which parameter, and which unit, a number in a graph stands for at run time.

Compiled graphs are shared by equal layers, so nothing in their text may name a parameter. Each sharded parameter
therefore has a ``param_id``, carried into the graph by a tensor that is an input of every call: the numbers of a block,
of which each read takes its own.
"""

# Why: docs/design.md, note N4; docs/design.md, note N46

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from compiled_fsdp.state.equal_hooks import share_hooks
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit

# Weak: a model that is deleted takes its parameters along.
_parameters: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()  # by their parameters' ids
_all_units: weakref.WeakSet[Unit] = weakref.WeakSet()  # those without parameters, too
_may_retain: weakref.WeakSet[Unit] = weakref.WeakSet()
_generation = 0


def register(unit: Unit) -> None:
    """Let ``unit`` and its parameters be found."""
    _all_units.add(unit)
    unit.code_version = str(_generation)
    for parameter in unit.parameters:
        share_hooks(parameter)
        _parameters[parameter.param_id] = parameter
        _units[parameter.param_id] = unit
        # an autograd graph saves this tensor, and so keeps what its gradients go to: the model may be deleted meanwhile
        vars(parameter.id_tensor)["unit"] = unit


def unregister(unit: Unit) -> None:
    """Undo ``register``."""
    _all_units.discard(unit)
    for parameter in unit.parameters:
        _parameters.pop(parameter.param_id, None)
        _units.pop(parameter.param_id, None)


def begin_generation(has_plan: Callable[[Unit], bool]) -> None:
    """Models that come now, or whose root has no agreed plan yet, do not share the compiled code of those before.

    Dynamo lets equal models share code without asking the backend. Where there are several codes for the same
    parameters, for example one with a graph break and one without, ranks might take different ones.
    """
    global _generation
    _generation += 1
    for unit in _all_units:
        if not has_plan(unit.root):
            unit.code_version = str(_generation)


def parameter_of(param_id: int | torch.Tensor) -> ShardedParameter:
    """The sharded parameter with this number.

    Raises:
        RuntimeError: its model has been deleted.
    """
    parameter = _parameters.get(int(param_id))
    if parameter is None:
        raise RuntimeError(
            f"compiled_fsdp: slot {int(param_id)} belongs to a parameter whose model has been deleted, but a graph "
            "still reads it; keep the sharded model alive as long as its compiled form or a pending backward."
        )
    return parameter


def parameters_of(param_ids: Sequence[int | torch.Tensor]) -> list[ShardedParameter]:
    """``parameter_of`` of each."""
    return [parameter_of(param_id) for param_id in param_ids]


def unit_of(parameter: ShardedParameter) -> Unit:
    """The unit that holds a parameter, whose model is alive."""
    return _units[parameter.param_id]


def parameters_by_param() -> dict[torch.Tensor, ShardedParameter]:
    """The sharded parameter of each DTensor that stands in a living model."""
    return {parameter.param: parameter for parameter in all_parameters()}


def find(param_id: int) -> ShardedParameter | None:
    """The sharded parameter with this number; None if its model has been deleted."""
    return _parameters.get(param_id)


def all_parameters() -> list[ShardedParameter]:
    """The sharded parameters of all living models."""
    return list(_parameters.values())


def any_unit_lives() -> bool:
    """Whether the process has a sharded model."""
    return len(_all_units) > 0


def running_units() -> list[Unit]:
    """The units whose forward is running."""
    return [unit for unit in _all_units if unit.depth > 0]


def may_retain(unit: Unit) -> None:
    """``unit`` may hold full parameters until a backward that reshards, from now on."""
    _may_retain.add(unit)


def retaining_units() -> list[Unit]:
    """Those of them that hold some now. Each step of an optimizer asks, and there may be one for each parameter."""
    return [unit for unit in _may_retain if unit.state is not ShardState.SHARDED or unit.eager.kept_by]


def unsharded_units() -> list[Unit]:
    """The units that ``unshard()`` has gathered, and that are still unsharded."""
    return [unit for unit in _all_units if unit.state is ShardState.UNSHARDED]
