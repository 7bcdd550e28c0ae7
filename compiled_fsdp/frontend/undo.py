"""What ``fully_shard`` puts back if it raises: a model is sharded as a whole, or it is as it was."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

from torch import nn

from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.frontend.read import ParameterReads

# Of these kinds are torch's own dictionaries of a module. In a user's own kind, ``update`` may mean something else.
_DICTIONARIES = (dict, OrderedDict, ParameterReads)


def remember(root: nn.Module, undo: ExitStack) -> None:
    """Let ``undo`` take back what becomes of the modules of ``root`` and of the units that are there already.

    It puts back classes, attributes, parameters and hooks, but not what is in a tensor's memory.
    """
    for module in root.modules():
        undo.callback(object.__setattr__, module, "__class__", type(module))
        # The same dictionaries with the same entries, because handles of hooks refer to the dictionary.
        own = [value for value in module.__dict__.values() if type(value) in _DICTIONARIES]
        for dictionary in (module.__dict__, *own):
            _remember_entries(dictionary, undo)
    for unit in units_of(root):
        for each in (unit, *unit.parameters):
            _remember_entries(vars(each), undo)


def _remember_entries(dictionary: dict[Any, Any], undo: ExitStack) -> None:
    kind: Any = type(dictionary)
    if isinstance(dictionary, ParameterReads):
        # A module of which another call has sharded a part. A plain dictionary gives what is stored, not what is read.
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
