"""An error for a part of a unit that is called by itself, so that nothing gathers its parameters.

For example, the model is one unit and the user calls ``model.layers[0](x)``. The parameters read there are sharded
DTensors, and torch refuses to compute with a DTensor and a plain tensor. Looking at a DTensor is no error. So a forward
outside of its unit's forward gets a tensor that behaves like the DTensor and explains the mistake if torch refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import without_torch_function
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.compat.modules import forwards_in_trace, running_forwards, tree_flatten
from compiled_fsdp.compat.tracing import TracedObject
from compiled_fsdp.state.parameter import ShardedParameter, path_of
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


def is_called_alone(module: nn.Module, unit: Unit) -> bool:
    """Whether a closed unit's parameter is read in a forward of ``module``, which owns it, or of the module around it.

    False while a forward of the whole model runs, because that may look at another unit's parameter on purpose.
    """
    return unit.root.depth == 0 and _is_in(module, running_forwards())


def traced_alone(module: nn.Module, unit: Unit) -> bool:
    """``is_called_alone`` while Dynamo traces the read, with a guard."""
    root = unit.root
    traced = TracedObject.of(root)
    depth = (root.depth,) if traced is None else traced.values("depth")
    # forwards in the trace, then running ones, because after a graph break Dynamo traces a method by itself
    forwards = itertools.chain(forwards_in_trace(), running_forwards())
    return depth == (0,) and not root.is_open_in_body() and _is_in(module, forwards)


def _is_in(module: nn.Module, forwards: Iterator[nn.Module]) -> bool:
    innermost = next(forwards, None)
    return innermost is not None and (innermost is module or module in innermost._modules.values())


def called_alone_error(parameter: ShardedParameter, forwards: Iterable[nn.Module]) -> str:
    """The error message for a parameter that is read outside of a forward of its unit.

    Args:
        parameter: the one that is read.
        forwards: the modules whose forwards are running, innermost first.
    """
    unit = unit_of(parameter)
    owner = " or ".join(type(module).__name__ for module in unit.modules)
    method = "let that method count as a forward, by register_fsdp_forward_method(model, 'its name')"
    gathers = "unshard() on the unit gathers for any code."
    if parameter.owner[0] in unit.modules:
        return (
            f"compiled_fsdp: {parameter.name!r} is sharded here, because a method of {owner} was called outside of its "
            f"forward, which would gather its parameters: {method}. {gathers}"
        )
    names = {module: name for root in unit.root.modules for name, module in root.named_modules()}
    inside = [names[module] for module in forwards if names.get(module)]
    path = path_of(inside[-1] if inside else parameter.name.rpartition(".")[0])
    return (
        f"compiled_fsdp: {parameter.name!r} is sharded here, because {path} was called by itself, outside of a forward "
        f"of {owner}, which would gather its parameters. Either make {path} a unit of its own, by fully_shard({path}) "
        f"before {owner} is sharded; or, if a method of {owner} calls it, {method}. {gathers}"
    )


class ReadAlone(DTensor):
    """The DTensor of a parameter that is read in a forward outside of its unit's forward."""

    _fsdp_parameter: ShardedParameter

    # Without this attribute Dynamo does not trace operations on the tensor.
    @property
    def __tensor_flatten__(self) -> NoReturn:  # type: ignore[override]
        raise AttributeError("__tensor_flatten__")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            leaves = tree_flatten((args, kwargs))[0]
            parameter = next(leaf for leaf in leaves if isinstance(leaf, ReadAlone))._fsdp_parameter
            raise RuntimeError(f"{called_alone_error(parameter, running_forwards())} Torch says: {error}") from error


@never_compiled
def read_alone(parameter: ShardedParameter) -> Tensor:
    """The parameter's DTensor as a ``ReadAlone`` with the same memory and gradient; as it is if ``wrapped``."""
    if parameter.wrapped:
        return parameter.param
    alias: Any = torch.ops.aten.alias.default(parameter.param)
    alias.__class__ = ReadAlone
    alias._fsdp_parameter = parameter
    return alias
