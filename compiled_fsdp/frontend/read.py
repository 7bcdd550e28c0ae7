"""What a module's ``_parameters`` becomes: sharded parameters come out in full while a forward of their unit runs.

The properties of ``module.py`` are how ``self.weight`` is read. This dictionary is behind every other way: ``self.parameters()``
and its like, of the module itself or of a container around it, and ``self._parameters[...]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.compat import break_graph, never_a_frame_of_its_own

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter


class Reads(dict[str, Any]):
    """A module's parameters by name. ``sharded`` are those that are read in full; the rest is as it is stored."""

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(stored)
        self.sharded: dict[str, ShardedParameter] = {}
        self.elsewhere: set[str] = set()  # tied, with another module as their first place

    def __getitem__(self, name: str) -> Any:
        stored = dict.__getitem__(self, name)
        parameter = self.sharded.get(name)
        # something else is there under torch.func.functional_call: that is what was asked for
        if parameter is not None and stored is parameter.param and parameter.unit.is_open():
            return parameter.read()
        return stored

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    # Lazily, both: ``next(self.parameters()).dtype`` must not gather what it does not look at.
    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for name in self:
            if name in self.elsewhere and torch.compiler.is_compiling():
                # two reads of a tied parameter are two values to Dynamo, and would be counted twice
                break_graph("the parameters of a module are listed in a forward, and one of them is tied")
            yield name, self[name]

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        for _, value in self.items():
            yield value


def stored(module: torch.nn.Module, name: str) -> Any:
    """What ``module._parameters`` holds, whatever forward is running; None if it was deleted."""
    return dict.get(module._parameters, name)


for _function in (Reads.__getitem__, Reads.get, Reads.items, Reads.values):
    never_a_frame_of_its_own(_function)
