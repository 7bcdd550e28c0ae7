"""Objects as the code that Dynamo traces has left them so far, and guards on them.

Dynamo guards by itself on the values that traced code reads. But if traced code reads one attribute of a DTensor,
Dynamo also guards on everything else that the DTensor is (spec, mesh, local tensor), because it makes a variable of it.
The methods here guard on the one attribute alone.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

from compiled_fsdp.compat.patches import REUSED_REGIONS, Function, install

_UNKNOWN = object()

# Attributes that are set on Dynamo's output (its ``OutputGraph``), which lives as long as the trace. First: the objects
# that the traced code has not read, by ``id``.
_FOUND = "_compiled_fsdp_found"
# Second: the functions for which ``guard_on_result`` was called.
_ASKED = "_compiled_fsdp_asked"


class TracedObject:
    """An object that the traced code has read, or that a known source leads to.

    compiled_fsdp's own functions that run while Dynamo traces see objects as they were before the trace, because Dynamo
    applies the writes of traced code later. Dynamo does not guard on the values that these functions read, either. The
    methods here return the values that the traced code would see, and install the guards. For example, if the traced
    code has set ``unit.depth = 1``, ``values("depth")`` returns ``(1,)``.

    Args:
        value: the object.
        variable: Dynamo's variable for the object; None if the traced code has not read it.
        source: the source by which guards find the object.
    """

    def __init__(self, value: Any, variable: Any, source: Any) -> None:
        self._value, self._variable, self._source = value, variable, source

    @staticmethod
    def of(value: Any) -> TracedObject | None:
        """Return the object as the traced code has left it.

        None if the traced code has not read it, if it has no source, or if Dynamo is not tracing.
        """
        output = _output()
        if output is None or value not in output.side_effects:
            return None
        variable = output.side_effects[value]
        return None if variable.source is None else TracedObject(value, variable, variable.source)

    def holds_nothing(self, path: str, key: Any) -> None:
        """Guard that item ``key`` of the dictionary at the attribute path ``path`` is None."""
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import DictGetItemSource

        _guard(DictGetItemSource(self._path(path), key), GuardBuilder.NONE_MATCH)

    def item(self, value: Any, path: str, key: Any) -> TracedObject:
        """Return ``value``, which is item ``key`` of the dictionary at the attribute path ``path``.

        If another source leads to the same object, a guard says that both do.
        """
        from torch._dynamo.source import DictGetItemSource

        return _same(value, DictGetItemSource(self._path(path), key))

    def attribute(self, value: Any, path: str) -> TracedObject:
        """Return ``value``, which is at the attribute path ``path``, with the same guard as ``item``."""
        return _same(value, self._path(path))

    def contains(self, path: str, key: Any) -> None:
        """Guard that the dictionary at the attribute path ``path`` has ``key``."""
        from torch._dynamo.guards import GuardBuilder

        before_2_13 = {"invert": False} if "invert" in inspect.signature(GuardBuilder.DICT_CONTAINS).parameters else {}
        check = functools.partial(GuardBuilder.DICT_CONTAINS, key=key, **before_2_13)
        _guard(self._path(path), check)

    def has_changed(self, name: str) -> bool:
        """Whether the traced code has assigned the object's attribute ``name``."""
        return self._variable is not None and _output().side_effects.has_pending_mutation_of_attr(self._variable, name)

    def has_written(self, name: str) -> bool:
        """Whether the traced code has written to the object that the attribute ``name`` refers to."""
        effects, value = _output().side_effects, getattr(self._value, name)
        return value in effects and bool(effects.has_pending_mutation(effects[value]))

    def values(self, *paths: str) -> tuple[Any, ...] | None:
        """Return the values at attribute paths: as the traced code has assigned them, or the present ones, with guards.

        None if one of the values is not a constant.
        """
        found = tuple(self._value_at(path) for path in paths)
        return None if any(value is _UNKNOWN for value in found) else found

    def _value_at(self, path: str) -> Any:
        from torch._dynamo.guards import GuardBuilder

        if self.has_changed(path):
            written = _output().side_effects.load_attr(self._variable, path)
            return written.as_python_constant() if written.is_python_constant() else _UNKNOWN
        value = functools.reduce(getattr, path.split("."), self._value)
        if not isinstance(value, (bool, int, float, str, enum.Enum, type(None))):
            return _UNKNOWN
        check = GuardBuilder.ID_MATCH if isinstance(value, enum.Enum) else GuardBuilder.CONSTANT_MATCH
        _guard(self._path(path), check)
        return value

    def _path(self, path: str) -> Any:
        from torch._dynamo.source import AttrSource

        return functools.reduce(AttrSource, path.split("."), self._source)


def _output() -> Any:
    import torch._dynamo as dynamo

    tx = getattr(dynamo.symbolic_convert.tls, "current_tx", None)
    return None if tx is None else tx.output


def _same(value: Any, source: Any) -> TracedObject:
    from torch._dynamo.guards import make_dupe_guard

    others = _output().__dict__.setdefault(_FOUND, {})
    known = TracedObject.of(value) or others.setdefault(id(value), TracedObject(value, None, source))
    if make_dupe_guard(source, known._source) is not None:
        _guard(source, functools.partial(DUPLICATE_INPUT, source_b=known._source))
    return known


def guard_on_result(function: Callable[[], bool], is_needed: Callable[[], bool]) -> None:
    """While Dynamo traces: guard the frame's code on the present result of ``function()``, if ``is_needed()``.

    Both are called once for each frame.
    """
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    output = _output()
    if output is None or function in output.__dict__.setdefault(_ASKED, set()):
        return
    output.__dict__[_ASKED].add(function)
    if is_needed():
        check = functools.partial(FUNCTION_RESULT, function=function, expected=function())
        install_guard(GlobalStateSource().make_guard(check))  # not among the sources that a nested region has read


def FUNCTION_RESULT(builder: Any, guard: Any, function: Callable[[], bool], expected: bool) -> None:
    """A guard on a function's result, with a name in capitals like Dynamo's own guards.

    It takes 0.2 us, because it runs in Python.
    """
    text = f"{function.__name__}() == {expected}"
    builder.guard_manager.root.add_lambda_guard(lambda _: function() == expected, [text], None)


def DUPLICATE_INPUT(builder: Any, guard: Any, source_b: Any) -> None:
    """Torch's guard that two sources lead to one object, checked in C++.

    It has the name of torch's guard, because Dynamo recognizes the guard by its name. Before torch 2.14, the default is
    one Python expression for all such pairs, which looks up each object anew: 1.5 us each.
    """
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder

    with config.patch(use_lamba_guard_for_object_aliasing=False):
        GuardBuilder.DUPLICATE_INPUT(builder, guard, source_b)


def _guard(source: Any, check: Any) -> None:
    from torch._dynamo.guards import install_guard

    _guard_reused_regions()
    install_guard(source.make_guard(check))
    # Torch 2.13 and later compare these sources before they reuse a nested region's graph for another call.
    if (read := getattr(_output().current_tracer, "traced_sources", None)) is not None:
        read.add(source)


@functools.cache  # it is asked for each guard
def _guard_reused_regions() -> None:
    """Let Dynamo guard on the conditions under which it reuses a nested region's graph for another call.

    Torch checks the conditions while it traces, but installs no guards. For example, a layer that is frozen after the
    compile would still run the code for a trained layer.
    """
    install(REUSED_REGIONS, _guarded_reuse)


def _guarded_reuse(is_reusable: Function) -> Function:
    from torch._dynamo.guards import install_guard
    from torch._dynamo.variables.invoke_subgraph import build_source_replacement

    def guarded(tx: Any, condition: Any, fingerprint: Any, cached_entry: Any) -> bool:
        if not is_reusable(tx, condition, fingerprint, cached_entry):
            return False
        replaced = build_source_replacement(cached_entry.arg_sources, fingerprint.arg_sources)

        def own(source: Any) -> Any:
            return source.clone(lambda part: replaced.get(part, part))

        if replaced:
            tx.output.guard_on_key_order |= {own(source) for source in tx.output.guard_on_key_order}
        for source, _, _, guard in condition.guards:
            mine = own(source)
            # Dynamo guards on tensors when they become inputs
            if mine != source and guard.create_fn_name() != "TENSOR_MATCH":
                copied = mine.make_guard(guard.create_fn)
                copied.user_stack = guard.user_stack  # else Dynamo would search the stack for it
                install_guard(copied)
        return True

    return guarded
