"""Guards on the values that lead to a graph break inside of a call. Dynamo itself forgets them."""

# Why: docs/design/graph-breaks.md, "Guards on the causes of a graph break"

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.distributed as dist

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.dynamo import is_ours

_PLAIN = frozenset({"BOOL_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "HASATTR", "ID_MATCH", "NONE_MATCH"})
"""Kinds of guards on plain values; ``ID_MATCH`` is one on a member of an enumeration."""
_CONTENTS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SEQUENCE_LENGTH", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_FUNCTIONS = frozenset({"BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH"})

_MOST_VALUES = 4
"""After so many values of one attribute at one graph break, other values of it get no guard there.

The graph break probably does not depend on the attribute then. For example, a module that counts its calls would
otherwise be compiled again in each step.
"""

# For each compiled function, and each guard at a graph break in it: the values that the guard was made for.
_values: weakref.WeakKeyDictionary[CodeType, dict[Any, set[Any]]] = weakref.WeakKeyDictionary()


def guard_breaks() -> None:
    """From now on, guard code that ends before a call on the values that led to the graph break.

    If Dynamo traces into a call and cannot trace something there, it restarts, and ends the graph before the call. The
    guards on values that it read in the call are lost. For example, a layer prints in this step. For inputs of the same
    sizes, the code with the graph break would also run in steps in which the layer does not print.

    Here these guards are kept in code for compiled_fsdp's backend, if there are several ranks. Call this before the
    first compile, because the first graph break comes before the first graph, and so before the backend is called.
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
                for guard in getattr(entry, "compiled_fsdp_guards", ()):  # each time that Dynamo restarts
                    if _value(guard, tx.output.root_tx) is not _NOWHERE:
                        tx.output.guards.add(guard)
            return has_failed

        return watched_failed

    patches.install(patches.BREAKS, noting)
    patches.install(patches.AFTER_BREAKS, adding)


def forget_breaks() -> None:
    """Forget the values that have led to graph breaks so far."""
    _values.clear()


def _kept(guard: Any) -> Any:
    """Return the guard to keep for a guard that Dynamo would forget, or None.

    For a tensor, it is a guard on the type alone, because Dynamo has no record of the tensor after a restart.
    """
    from torch._dynamo import source as sources
    from torch._dynamo.guards import GuardBuilder

    kind, source = guard.create_fn_name(), guard.originating_source
    if kind not in _PLAIN | _CONTENTS | _FUNCTIONS | {"TENSOR_MATCH", "TYPE_MATCH"} or not _is_plain(source):
        return None
    if kind in _PLAIN:
        return guard
    if kind in _CONTENTS:  # not for a class's dictionary: dozens of names are not in it
        return None if isinstance(source, getattr(sources, "TypeDictSource", ())) else guard
    # Keep guards on arguments, and on attributes that a user sets. Leave out functions in modules, which are globals,
    # and the parts of a layer, which have private names.
    name = getattr(source, "member", "")
    if not guard.name.startswith("L[") or name.startswith("_"):
        return None
    return source.make_guard(GuardBuilder.TYPE_MATCH) if kind == "TENSOR_MATCH" else guard


def _is_plain(source: Any) -> bool:
    """Whether names and constant keys lead from an argument or a global to the value."""
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
    """Return the guarded value, looked up in the compiled frame; ``_NOWHERE`` if it is not there."""
    if guard.create_fn_name() == "HASATTR":
        return None
    try:
        return eval(guard.name, {"L": root.f_locals, "G": root.f_globals})  # as Dynamo looks it up
    except Exception:
        return _NOWHERE


def _counts_up(guard: Any, place: Any, root: Any) -> bool:
    """Whether to leave a guard out: its value is not there, or has had too many values at this graph break."""
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
