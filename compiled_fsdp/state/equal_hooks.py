"""Groups of parameters with equal all-gather extensions, so that equal layers share compiled code.

While Dynamo traces, functions that it takes for constants turn a parameter's hooks into code for the graph. Their
argument is a text that Dynamo guards on; all parameters of a group have the same text.
"""

# Why: docs/design/communication.md, "AOTAutograd traces the extensions' hooks"

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
    """A group of parameters with equal hooks, and the data that they share.

    Attributes:
        key: the properties that were equal when the parameters joined the group.
        constants: attributes of their local tensors, without tensors and None. A member whose constants change leaves.
        text: the number of the group, on which Dynamo guards.
        codes: the hooks as graphs have them (``HookCode``), by the names of the local tensor's attributes that are
            tensors, joined by commas.
        members: the living parameters of the group.
    """

    def __init__(self, key: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.key, self.constants, self.text, self.codes = key, constants, str(next(_numbers)), dict[str, Any]()
        self.members: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()


def share_hooks(parameter: ShardedParameter) -> None:
    """Put a parameter into the group of its equals if it is ``wrapped``, and drop groups without living members."""
    if (before := _all.get(parameter.hooks.text)) is not None:
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
    parameter.hooks.text, parameter.hooks.codes = found.text, found.codes


def share_changed(text: str) -> bool:
    """Regroup the members whose local tensors' constants have changed since they joined; returns whether any have."""
    shared = _all[text]
    changed = [each for each in shared.members if _set_constants(each.local) != shared.constants]
    for parameter in changed:
        share_hooks(parameter)
    return bool(changed)


def one_of(text: str, read_text: str | None = None, names: Sequence[str] | None = None) -> ShardedParameter:
    """The parameter of a group that was made first, among those that live.

    Args:
        text: the group's, which is the parameter's ``hooks.text``.
        read_text: only parameters with this ``read_text``; None: any.
        names: only parameters whose local tensors have tensors in exactly these attributes; None: any.
    """
    fits = [
        each
        for each in _all[text].members
        if read_text in (None, each.read_text) and (names is None or names_of_tensors(each.attributes) == list(names))
    ]
    return min(fits, key=lambda each: each.param_id)


def names_of_tensors(attributes: dict[str, Any]) -> list[str]:
    """The names of the attributes that are tensors now."""
    return [name for name, value in attributes.items() if isinstance(value, torch.Tensor)]


def constants_of(local: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor that are not tensors. A bound method, such as a hook, is replaced by its function.

    The bound method would keep the tensor alive.
    """
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
    # an attribute that is None may become a tensor, and tensors are guarded by Dynamo
    return {} if local is None else {name: value for name, value in constants_of(local).items() if value is not None}


def _key(parameter: ShardedParameter) -> tuple[Any, ...]:
    local = parameter.local
    if local is None or not (hasattr(local, PRE_HOOK) and is_wrapper(local)):  # hooks that cannot be traced: no equals
        return (parameter.param_id,)
    inner, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    tensors = [(name, vars(local)[name]) for name in names_of_tensors(vars(local))]
    metas = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors]
    # a hook with one argument is not given the module
    module = id(parameter.owner[0]) if number_of_arguments(local) == 5 else None
    return (
        type(local), tuple(inner), context, local.shape, local.stride(), metas, constants_of(local),
        parameter.layout.size, parameter.dim, parameter.group.group_id, parameter.hooks.arguments, parameter.dtypes,
        parameter.device, module,
    )  # fmt: skip
