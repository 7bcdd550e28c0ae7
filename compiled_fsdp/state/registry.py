"""The parameter and the unit that belong to a ``param_id``, by which a graph finds them at run time.

Equal layers share compiled graphs, so the text of a graph must not name a parameter. Instead each sharded parameter has
a number, its ``param_id``. A tensor with the numbers of a block is an input of every call, and each read takes its own
number from it.
"""

# Why: docs/design/reads.md, "Graphs name no ranks and no layers"
# Why: docs/design/memory.md, "A loss keeps its unit alive"

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from compiled_fsdp.state.equal_hooks import share_hooks
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit

# Weak, because a model that is deleted takes its parameters along.
_parameters: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()  # by their parameters' ids
_all_units: weakref.WeakSet[Unit] = weakref.WeakSet()  # also units without parameters
_may_retain: weakref.WeakSet[Unit] = weakref.WeakSet()
_generation = 0


def register(unit: Unit) -> None:
    """Add ``unit`` and its parameters, so that they are found."""
    _all_units.add(unit)
    unit.code_version = str(_generation)
    for parameter in unit.parameters:
        share_hooks(parameter)
        _parameters[parameter.param_id] = parameter
        _units[parameter.param_id] = unit
        # an autograd graph saves this tensor, so it keeps the unit for its gradients even if the model is deleted
        vars(parameter.id_tensor)["unit"] = unit


def unregister(unit: Unit) -> None:
    """Undo ``register``."""
    _all_units.discard(unit)
    for parameter in unit.parameters:
        _parameters.pop(parameter.param_id, None)
        _units.pop(parameter.param_id, None)


def begin_generation(has_plan: Callable[[Unit], bool]) -> None:
    """Give new models, and models whose root has no agreed plan yet, compiled code of their own from now on.

    Dynamo lets equal models share code without asking the backend. If there are several variants for the same
    parameters, for example one with a graph break and one without, two ranks might run different ones.

    Args:
        has_plan: whether a root unit has an agreed plan.
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
            f"compiled_fsdp: a graph reads parameter number {int(param_id)}, whose model has been deleted. Keep the "
            "sharded model alive as long as its compiled code or a pending backward uses it."
        )
    return parameter


def parameters_of(param_ids: Sequence[int | torch.Tensor]) -> list[ShardedParameter]:
    """The sharded parameters with these numbers; raises as ``parameter_of``."""
    return [parameter_of(param_id) for param_id in param_ids]


def unit_of(parameter: ShardedParameter) -> Unit:
    """The unit of a parameter whose model is alive."""
    return _units[parameter.param_id]


def parameters_by_param() -> dict[torch.Tensor, ShardedParameter]:
    """The sharded parameter of each DTensor in a living model."""
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
    """Record that ``unit`` may hold full parameters outside of its forwards from now on."""
    _may_retain.add(unit)


def retaining_units() -> list[Unit]:
    """The units recorded by ``may_retain`` that hold full parameters now.

    It does not look at all units, because every optimizer step asks, and there may be one optimizer per parameter.
    """
    return [unit for unit in _may_retain if unit.state is not ShardState.SHARDED or unit.eager.kept_by]


def unsharded_units() -> list[Unit]:
    """The units that ``unshard()`` has gathered, and that are still unsharded."""
    return [unit for unit in _all_units if unit.state is ShardState.UNSHARDED]
