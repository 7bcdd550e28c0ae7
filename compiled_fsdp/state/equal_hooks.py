"""Parameters whose all-gather extensions graphs cannot tell apart, so that equal layers share compiled code.

What a graph has of a parameter's hooks is decided while Dynamo traces, by functions that it takes for constants. They
are given a text that Dynamo guards on, and equal parameters have the same one.
"""

# Why: docs/design.md, note N64

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from compiled_fsdp.compat.autograd import is_wrapper
from compiled_fsdp.sharding.extension import PRE_HOOK, number_of_arguments
from compiled_fsdp.state.parameter import ShardedParameter

_numbers = itertools.count()
_all: dict[str, EqualHooks] = {}


class EqualHooks:
    """What parameters with equal hooks share.

    Attributes:
        key: what they had in common when they came.
        constants: what their local tensors have beside tensors, which still has to be so.
        text: stands for them.
        codes: their hooks as graphs have them, by the names of the local tensor's attributes that are tensors.
        members: those that live.
    """

    def __init__(self, key: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.key, self.constants, self.text, self.codes = key, constants, str(next(_numbers)), dict[str, Any]()
        self.members: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()


def share_hooks(parameter: ShardedParameter) -> None:
    """Give a parameter, if it is ``wrapped``, what it shares with equal ones; those that are gone are forgotten."""
    if (before := _all.get(parameter.hooks_text)) is not None:
        before.members.discard(parameter)
    if not parameter.wrapped:
        return
    for text in [text for text, each in _all.items() if not each.members]:
        del _all[text]
    key = _key(parameter)
    found = next((each for each in _all.values() if each.key == key), None)
    if found is None:
        found = EqualHooks(key, _set_constants(parameter.local))
        _all[found.text] = found
    found.members.add(parameter)
    parameter.hooks_text, parameter.hook_codes = found.text, found.codes


def share_changed(text: str) -> bool:
    """Share anew what is no longer equal, since a constant of its local tensor was set; whether anything was not."""
    shared = _all[text]
    changed = [each for each in shared.members if _set_constants(each.local) != shared.constants]
    for parameter in changed:
        share_hooks(parameter)
    return bool(changed)


def one_of(text: str, read_text: str | None = None, names: Sequence[str] | None = None) -> ShardedParameter:
    """A parameter with the ``EqualHooks`` of this text: the first one made of those that live.

    Args:
        text: its ``hooks_text``.
        read_text: its ``read_text``; None: whichever it has.
        names: the attributes of its local tensor that are tensors; None: whichever are.
    """
    fits = [
        each
        for each in _all[text].members
        if read_text in (None, each.read_text) and (names is None or names_of_tensors(each.attributes) == list(names))
    ]
    return min(fits, key=lambda each: each.param_id)


def names_of_tensors(attributes: dict[str, Any]) -> list[str]:
    """The attributes that are tensors now."""
    return [name for name, value in attributes.items() if isinstance(value, torch.Tensor)]


def constants_of(local: torch.Tensor) -> dict[str, Any]:
    """What a tensor has beside tensors: hooks that were put on it, perhaps, which do not keep it here."""
    found = {
        name: value
        for name, value in vars(local).items()
        if not isinstance(value, torch.Tensor) and "_dynamo_" not in name  # torch's own marks
    }
    for name, value in found.items():
        if isinstance(value, types.MethodType) and value.__self__ is local:
            found[name] = value.__func__
    return found


def _set_constants(local: torch.Tensor | None) -> dict[str, Any]:
    # what is None may become a tensor, which Dynamo guards
    return {} if local is None else {name: value for name, value in constants_of(local).items() if value is not None}


def _key(parameter: ShardedParameter) -> tuple[Any, ...]:
    local = parameter.local
    if local is None or not (hasattr(local, PRE_HOOK) and is_wrapper(local)):  # not to be traced
        return (parameter.param_id,)
    inner, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    tensors = [(name, vars(local)[name]) for name in names_of_tensors(vars(local))]
    metas = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors]
    # a hook of one argument knows no module
    module = id(parameter.owner[0]) if number_of_arguments(local) == 5 else None
    return (
        type(local), tuple(inner), context, local.shape, local.stride(), metas, constants_of(local),
        parameter.layout.size, parameter.dim, parameter.group.group_id, parameter.hook_arguments, parameter.dtypes,
        parameter.device, module,
    )  # fmt: skip
