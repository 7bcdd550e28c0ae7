"""Reads of a parameter: in full while a forward of its unit runs, as the DTensor at other times.

The properties of ``parametrize.py`` serve ``self.weight``. ``ParameterReads`` serves every other way to read:
``self.parameters()`` and the like, of the module itself or of a container around it, and ``self._parameters[...]``.
"""

# Why: docs/design/reads.md, "A property reads the parameter"
# Why: docs/design/reads.md, "Dynamo's own look at parameters gathers nothing"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from compiled_fsdp.compat.dynamo import break_graph, dynamo_is_inspecting
from compiled_fsdp.compat.nested_regions import in_lasting_body
from compiled_fsdp.frontend.called_alone import is_called_alone, read_alone
from compiled_fsdp.frontend.eager_reads import read_eagerly, read_of_forward
from compiled_fsdp.frontend.in_checkpoints import runs_twice
from compiled_fsdp.frontend.wrapped_reads import read_wrapped
from compiled_fsdp.ops import calls, schema
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit


def read(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
    """The full parameter inside a forward of its unit, gathered once per forward (or recomputation)."""
    full = read_local(parameter, unit)
    return parameter.layout.in_forward(full) if parameter.tensor_parallel else full


def read_local(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
    """``read`` before tensor parallelism makes a DTensor of the result: a tensor of shape ``read_spec.size``."""
    if parameter.is_meta() and unit.unsharded_params is None:
        unit.raise_meta()
    twice = runs_twice()
    if not twice and (known := unit.zero_grad_params) is not None and parameter.index in known:
        return known[parameter.index]
    if not torch.compiler.is_compiling():
        return _read_outside_of_graphs(parameter, unit)
    ranks = unit.ranks_in_backward()
    if parameter.wrapped:
        return read_wrapped(parameter, unit)
    if not unit.is_open:
        unit.eager.in_parts = True  # always the same value, so that traced code sets it without a guard
    if not twice and unit.unsharded_params is not None:
        return calls.attach(parameter, unit.unsharded_params[parameter.index])
    parts = unit.parts()
    if not twice and unit.state is ShardState.RETAINED and parameter.retained is not None:
        full = calls.gather_retained(parameter, parts, unit.keep_for_backward) if parts else parameter.retained
        return calls.attach(parameter, full)
    full = calls.unshard(parameter, unit.keep_for_backward, ranks)
    retains = not twice and unit.retain_across_microbatches
    if retains and torch.is_grad_enabled() and not in_lasting_body():  # without gradients no backward will come
        with torch.no_grad():
            parameter.retained = schema.retain(full, parameter.part_text(parts) if parts else "")
    return full


def _read_outside_of_graphs(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
    if unit.unsharded_params is None and unit.unsharding is not None:
        unit.unsharding.wait()
    full = parameter.retained if unit.state is ShardState.RETAINED and not unit.ranks_of_parts else None
    if unit.unsharded_params is not None:
        full = unit.unsharded_params[parameter.index]
    if full is not None and unit.depth == 0:  # unsharded, and read outside of a forward
        # Not if parameters stay full between microbatches, because there Python's garbage collector decides how many
        # forwards wait for a backward: a schedule that splits backwards would find parameters in some graphs only.
        read_before = read_of_forward(parameter, unit) if unit.policy.reshard_after_backward else None
        return calls.attach_eagerly(parameter, full) if read_before is None else read_before
    return read_eagerly(parameter, unit, full)


def read_attribute(module: torch.nn.Module, reads: ParameterReads, name: str) -> Any:
    """The value of an attribute of ``module`` that is a sharded parameter, in eager code.

    After a forward it is the tensor with which the forward has computed, if that stays full until backward.
    """
    value, parameter = reads[name], reads.sharded[name]
    if value is not parameter.param or dynamo_is_inspecting():
        return value
    unit = reads.units[name]
    read = read_of_forward(parameter, unit) if unit.eager.reads else None
    if read is None and is_called_alone(module, unit):
        return read_alone(parameter)
    return value if read is None else read


def _is_open(unit: Unit) -> bool:
    """Whether reads of the unit's parameters give full tensors.

    They do in a forward of the unit, while backward runs a part of a forward again, and after ``unshard()``.
    """
    # ``recomputes`` is False in a gate, because a gate runs the user's hooks, which see sharded parameters
    if unit.is_open or unit.unsharded_params is not None or recomputes():
        # not while Dynamo itself reads, because a rank that compiles again alone must not gather alone
        return torch.compiler.is_dynamo_compiling() or not dynamo_is_inspecting()
    return False


class ParameterReads(dict[str, Any]):
    """A module's ``_parameters``, whose reads of sharded parameters are gathers while a forward of their unit runs.

    Attributes:
        known: the module's sharded parameters by name.
        units: their units by name.
        sharded: those of ``known`` whose DTensor is stored here now. Other code may store something else for a while,
            such as ``torch.func.functional_call``; then reads give that.
        owned_elsewhere: names of tied parameters, with another module as their first place.
        last_noted: the name that was changed last. It is an attribute, so that Dynamo knows when traced code changes
            an entry.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(stored)
        self.known: dict[str, ShardedParameter] = {}
        self.units: dict[str, Unit] = {}
        self.sharded: dict[str, ShardedParameter] = {}
        self.owned_elsewhere: set[str] = set()
        self.last_noted: str | None = None

    def __getitem__(self, name: str) -> Any:
        # The DTensor comes last, because Dynamo guards on all of its properties when traced code looks at it.
        parameter = self.sharded.get(name)
        if parameter is not None:
            unit = self.units[name]
            if _is_open(unit):
                return read(parameter, unit)
        return dict.__getitem__(self, name)

    # ---- changes: all methods of a dictionary, so that ``sharded`` is always right -----------------------------------
    def note(self, name: str) -> None:
        """Update ``sharded``, because the stored value or the parameter's DTensor has changed."""
        self.last_noted = name
        parameter = self.known.get(name)
        if parameter is not None:
            if dict.get(self, name) is parameter.param:
                self.sharded[name] = parameter
            else:
                self.sharded.pop(name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        parameter = self.known.get(name)
        if parameter is not None and isinstance(value, torch.Tensor) and value is not parameter.param:
            unit = self.units[name]
            if _is_open(unit):
                if torch.compiler.is_dynamo_compiling() and not unit.is_open_in_body() and in_lasting_body():
                    # functional_call puts back the full parameter that was gathered inside of the checkpoint, and code
                    # after the checkpoint would read that
                    break_graph("a checkpoint stores something for a parameter (torch.func.functional_call)")
                unit.replaced = [*(unit.replaced or ()), (self, name)]
        dict.__setitem__(self, name, value)
        self.note(name)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        self.note(name)

    def pop(self, name: str, *default: Any) -> Any:
        """As ``dict.pop``. Returns the stored DTensor, not the full parameter."""
        value = dict.pop(self, name, *default)
        self.note(name)
        return value

    def popitem(self) -> tuple[str, Any]:
        """As ``dict.popitem``."""
        name, value = dict.popitem(self)
        self.note(name)
        return name, value

    def clear(self) -> None:
        """As ``dict.clear``."""
        dict.clear(self)
        self.sharded.clear()
        self.last_noted = None

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As ``dict.setdefault``. Returns the stored value, not the full parameter."""
        if name not in self:
            self[name] = default
        return dict.__getitem__(self, name)

    def update(self, *others: Any, **more: Any) -> None:
        """As ``dict.update``."""
        for name, value in dict(*others, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> ParameterReads:  # type: ignore[override,misc]
        self.update(other)
        return self

    # ---- reads -------------------------------------------------------------------------------------------------------
    def get(self, name: str, default: Any = None) -> Any:
        """As ``dict.get``, with full parameters."""
        return self[name] if name in self else default  # noqa: SIM401

    # Both are lazy, because ``next(self.parameters()).dtype`` must not gather parameters that it does not look at.
    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        """As ``dict.items``, but an iterator, with full parameters."""
        for name in self:
            if name in self.owned_elsewhere and torch.compiler.is_compiling():
                # Dynamo sees two reads of a tied parameter as two values, so that for example a norm counts it twice
                break_graph("the parameters of a module are listed in a forward, and one of them is tied")
            yield name, self[name]

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        """As ``dict.values``, but an iterator, with full parameters."""
        for _, value in self.items():
            yield value


def stored(module: torch.nn.Module, name: str) -> Any:
    """The entry in ``module._parameters`` without a gather, even while a forward runs; None if it was deleted."""
    return dict.get(module._parameters, name)
