"""Undo for ``fully_shard``: if it raises, the model is as it was before the call."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

from torch import nn

from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.frontend.read import ParameterReads

# The types of torch's own dictionaries of a module. In a type of the user's, ``update`` may mean something else.
_DICTIONARIES = (dict, OrderedDict, ParameterReads)


def remember(root: nn.Module, undo: ExitStack) -> None:
    """Let ``undo`` take back all later changes to the modules of ``root`` and to the units that exist already.

    It puts back classes, attributes, parameters and hooks, but not the values in a tensor's memory.
    """
    for module in root.modules():
        undo.callback(object.__setattr__, module, "__class__", type(module))
        # The dictionaries stay and get their entries back, because handles of hooks refer to the dictionaries.
        own = [value for value in module.__dict__.values() if type(value) in _DICTIONARIES]
        for dictionary in (module.__dict__, *own):
            _remember_entries(dictionary, undo)
    for unit in units_of(root):
        for each in (unit, *unit.parameters):
            _remember_entries(vars(each), undo)


def _remember_entries(dictionary: dict[Any, Any], undo: ExitStack) -> None:
    kind: Any = type(dictionary)
    if isinstance(dictionary, ParameterReads):
        # An earlier call has sharded a part of this module. ``dict``'s own methods give the stored DTensors; those of
        # ``ParameterReads`` would gather.
        kind = dict
        own = [value for value in vars(dictionary).values() if isinstance(value, dict)]
        for each in (vars(dictionary), *own):
            _remember_entries(each, undo)
    undo.callback(_set_entries, dictionary, list(kind.items(dictionary)), kind)


def _set_entries(dictionary: dict[Any, Any], entries: list[tuple[Any, Any]], kind: Any) -> None:
    now = list(kind.items(dictionary))
    if len(now) != len(entries) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, entries, strict=True)):
        kind.clear(dictionary)
        kind.update(dictionary, entries)
