"""Guards on what leads to a graph break inside of a call, which Dynamo forgets."""

# Why: docs/design.md, note N61

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.distributed as dist

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.dynamo import is_ours

_PLAIN = frozenset({"BOOL_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "HASATTR", "ID_MATCH", "NONE_MATCH"})
"""Guards of plain values, ``ID_MATCH`` of members of enumerations."""
_CONTENTS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SEQUENCE_LENGTH", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_FUNCTIONS = frozenset({"BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH"})

_MOST_VALUES = 4
"""So many values of one thing are told apart at a break. It does not come of what leads there whatever its value is, as
a count of calls does: each step would be compiled anew."""

# By the code that is compiled and the place of the break: of each guard, the values that it was made for.
_values: weakref.WeakKeyDictionary[CodeType, dict[Any, set[Any]]] = weakref.WeakKeyDictionary()


def guard_breaks() -> None:
    """From now on, guard a graph that ends before a call on why the call could not be traced.

    Dynamo traces into a call, comes to something that it cannot trace, and begins anew, to end the graph before the
    call. What it looked at in there is guarded on no more: code for a layer that prints in this step is taken in steps
    in which it does not, for the sizes that it was compiled for. With this it is, in what is compiled with our backend
    where there are several ranks. The first break comes before the first graph, and so before the backend is called.
    """
    from torch._dynamo.symbolic_convert import tls

    def noting(fail: Callable[..., Any]) -> Callable[..., Any]:
        def watched_fail(entry: Any, *args: Any, **kwargs: Any) -> None:
            tx: Any = getattr(tls, "current_tx", None)
            if tx is not None and _several_ranks() and is_ours(tx.output.compiler_fn):
                place = entry.filename, entry.lineno, entry.instruction_pointer
                kept = (_kept(guard) for guard in tx.output.guards)
                entry.compiled_fsdp_guards = [
                    guard for guard in kept if guard is not None and not _counts_up(guard, place, tx.output.root_tx)
                ]
            fail(entry, *args, **kwargs)

        return watched_fail

    def adding(failed: Callable[..., Any]) -> Callable[..., Any]:
        def watched_failed(entry: Any, tx: Any) -> bool:
            has_failed: bool = failed(entry, tx)
            if has_failed:
                for guard in getattr(entry, "compiled_fsdp_guards", ()):  # each time that Dynamo begins anew
                    if _value(guard, tx.output.root_tx) is not _NOWHERE:
                        tx.output.guards.add(guard)
            return has_failed

        return watched_failed

    patches.install(patches.BREAKS, noting)
    patches.install(patches.AFTER_BREAKS, adding)


def forget_breaks() -> None:
    """Forget what led to graph breaks so far."""
    _values.clear()


def _kept(guard: Any) -> Any:
    """The guard that is kept of one that would be forgotten, or None.

    Of a tensor Dynamo has no record once it begins anew: what stays is that it is one.
    """
    from torch._dynamo import source as sources
    from torch._dynamo.guards import GuardBuilder

    kind, source = guard.create_fn_name(), guard.originating_source
    if kind not in _PLAIN | _CONTENTS | _FUNCTIONS | {"TENSOR_MATCH", "TYPE_MATCH"} or not _is_plain(source):
        return None
    if kind in _PLAIN:
        return guard
    if kind in _CONTENTS:  # not of classes, which have attributes by the dozen that are not there
        return None if isinstance(source, getattr(sources, "TypeDictSource", ())) else guard
    # what the user puts into an attribute, or an argument; not functions of modules, nor what layers are made of
    name = getattr(source, "member", "")
    if not guard.name.startswith("L[") or name.startswith("_"):
        return None
    return source.make_guard(GuardBuilder.TYPE_MATCH) if kind == "TENSOR_MATCH" else guard


def _is_plain(source: Any) -> bool:
    """Whether a value is reached from an argument or a global by names and constant keys."""
    from torch._dynamo import source as sources

    names = ("Attr", "GenericAttr", "DictGetItem", "Closure", "Defaults", "Type", "TypeMRO", "TypeDict", "NNModule")
    steps = tuple(getattr(sources, f"{name}Source") for name in names if hasattr(sources, f"{name}Source"))
    while not isinstance(source, (sources.LocalSource, sources.GlobalSource)):
        if isinstance(source, (sources.DictGetItemSource, sources.GetItemSource)):
            if not isinstance(source.index, str | int) or isinstance(source, sources.TupleIteratorGetItemSource):
                return False
        elif not isinstance(source, steps):
            return False
        source = source.base
    return True


_NOWHERE = object()


def _value(guard: Any, root: Any) -> Any:
    """What a guard is about, found in the frame that is compiled; ``_NOWHERE`` if it is not there."""
    if guard.create_fn_name() == "HASATTR":
        return None
    try:
        return eval(guard.name, {"L": root.f_locals, "G": root.f_globals})  # as guards are checked
    except Exception:
        return _NOWHERE


def _counts_up(guard: Any, place: Any, root: Any) -> bool:
    """Whether to leave a guard out: it would be for one value too many at this break, or is of what is not there."""
    value, kind = _value(guard, root), guard.create_fn_name()
    if value is _NOWHERE:
        return True
    if kind == "SEQUENCE_LENGTH":
        value = len(value)
    elif kind == "TYPE_MATCH":
        value = type(value).__qualname__
    elif kind in _CONTENTS:
        value = None
    elif not isinstance(value, bool | int | float | str | None):
        value = id(value)
    seen = _values.setdefault(root.f_code, {}).setdefault((place, guard.name, kind), set())
    seen.add((type(value), value))
    return len(seen) > _MOST_VALUES


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
