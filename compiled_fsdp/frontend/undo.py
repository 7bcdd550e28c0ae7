"""What ``fully_shard`` puts back if it raises: a model is sharded as a whole, or it is as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from compiled_fsdp.frontend.fsdp_module import units_of
from compiled_fsdp.frontend.read import ParameterReads

# Of these kinds are torch's own dictionaries of a module. In a user's own kind, ``update`` may mean something else.
_DICTIONARIES = (dict, OrderedDict, ParameterReads)


def remember(root: nn.Module) -> Callable[[], None]:
    """A function that undoes changes to the modules of ``root`` and to the units that are there already.

    It puts back classes, attributes, parameters and hooks, but not what is in a tensor's memory.
    """
    undo: list[Callable[[], None]] = []
    for module in root.modules():
        undo.append(partial(object.__setattr__, module, "__class__", type(module)))
        undo.append(_entries(module.__dict__))
        # The same dictionaries with the same entries, because handles of hooks refer to the dictionary.
        undo += [_entries(value) for value in module.__dict__.values() if type(value) in _DICTIONARIES]
    for unit in units_of(root):
        undo += [_entries(vars(unit)), *(_entries(vars(parameter)) for parameter in unit.parameters)]
    return partial(_call_all, undo)


def _entries(dictionary: dict[Any, Any]) -> Callable[[], None]:
    """A function that gives a dictionary the entries that it has now."""
    if not isinstance(dictionary, ParameterReads):
        return partial(_set_entries, dictionary, list(dictionary.items()), type(dictionary))
    # A module of which another call has sharded a part. The plain dictionary gives what is stored, not what is read.
    own = [_entries(value) for value in vars(dictionary).values() if isinstance(value, dict)]
    stored = partial(_set_entries, dictionary, list(dict.items(dictionary)), dict)
    return partial(_call_all, [stored, _entries(vars(dictionary)), *own])


def _set_entries(dictionary: dict[Any, Any], entries: list[tuple[Any, Any]], kind: Any) -> None:
    now = list(kind.items(dictionary))
    if len(now) != len(entries) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, entries, strict=True)):
        kind.clear(dictionary)
        kind.update(dictionary, entries)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
