"""What Dynamo knows while it traces: objects as the traced code has left them so far, and guards on them.

Dynamo guards by itself on what traced code reads, but on its way to an attribute of a DTensor, say, it makes a variable
of that, with guards on all that the DTensor is.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

_UNKNOWN = object()

# What Dynamo's output gets: objects that the traced code has not come to, by ``id``, which lasts as long as the trace.
_FOUND = "_compiled_fsdp_found"
# And the functions that were asked for a guard.
_ASKED = "_compiled_fsdp_asked"


class TracedObject:
    """An object that code which Dynamo traces has come to, or comes to by a known way.

    Our own functions that run while Dynamo traces see objects as they were before the trace, and Dynamo does not guard
    on what they look at. Here they see what the traced code would, and the guards are made.

    Args:
        value: the object.
        variable: what Dynamo has for it; None if the traced code has not come to it.
        source: how it is found when guards are checked.
    """

    def __init__(self, value: Any, variable: Any, source: Any) -> None:
        self._value, self._variable, self._source = value, variable, source

    @staticmethod
    def of(value: Any) -> TracedObject | None:
        """An object that the traced code has come to; None if it has not, or if Dynamo is not tracing."""
        output = _output()
        if output is None or value not in output.side_effects:
            return None
        variable = output.side_effects[value]
        return None if variable.source is None else TracedObject(value, variable, variable.source)

    def holds_nothing(self, path: str, key: Any) -> None:
        """A guard that the item ``key`` of the dictionary at a path of attributes is None."""
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import DictGetItemSource

        _guard(DictGetItemSource(self._path(path), key), GuardBuilder.NONE_MATCH)

    def item(self, value: Any, path: str, key: Any) -> TracedObject:
        """``value``, which is the item ``key`` of the dictionary at a path of attributes.

        If there is another way to it already, a guard says that both lead to the same object.
        """
        from torch._dynamo.source import DictGetItemSource

        return _same(value, DictGetItemSource(self._path(path), key))

    def attribute(self, value: Any, path: str) -> TracedObject:
        """``value``, which is at a path of attributes; as ``item``."""
        return _same(value, self._path(path))

    def contains(self, path: str, key: Any) -> None:
        """A guard that the dictionary at a path of attributes has ``key``."""
        from torch._dynamo.guards import GuardBuilder

        before_2_13 = {"invert": False} if "invert" in inspect.signature(GuardBuilder.DICT_CONTAINS).parameters else {}
        check = functools.partial(GuardBuilder.DICT_CONTAINS, key=key, **before_2_13)
        _guard(self._path(path), check)

    def has_changed(self, name: str) -> bool:
        """Whether the traced code has given the object another attribute of this name."""
        return self._variable is not None and _output().side_effects.has_pending_mutation_of_attr(self._variable, name)

    def has_written(self, name: str) -> bool:
        """Whether the traced code has written to attributes of the object that an attribute is."""
        effects, value = _output().side_effects, getattr(self._value, name)
        return value in effects and bool(effects.has_pending_mutation(effects[value]))

    def values(self, *paths: str) -> tuple[Any, ...] | None:
        """What is at paths of attributes: what the traced code has put there, or else with a guard that it is the same.

        None if one of them is no constant.
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
    """While Dynamo traces: guard the frame's code on what ``function()`` gives now, if ``is_needed()``.

    Both are asked once for each frame.
    """
    from torch._dynamo.source import GlobalStateSource

    output = _output()
    if output is None or function in output.__dict__.setdefault(_ASKED, set()):
        return
    output.__dict__[_ASKED].add(function)
    if is_needed():
        _guard(GlobalStateSource(), functools.partial(FUNCTION_RESULT, function=function, expected=function()))


def FUNCTION_RESULT(builder: Any, guard: Any, function: Callable[[], bool], expected: bool) -> None:
    """A guard on a function's result, named in capitals as Dynamo's own. It takes 0.2 us, since it is Python."""
    text = f"{function.__name__}() == {expected}"
    builder.guard_manager.root.add_lambda_guard(lambda _: function() == expected, [text], None)


def DUPLICATE_INPUT(builder: Any, guard: Any, source_b: Any) -> None:
    """Torch's guard that two ways lead to one object, by torch's name, which Dynamo goes by; compared in C++.

    Before 2.14 torch's default is one Python expression for all such pairs, which finds each object anew: 1.5 us each.
    """
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder

    with config.patch(use_lamba_guard_for_object_aliasing=False):
        GuardBuilder.DUPLICATE_INPUT(builder, guard, source_b)


def _guard(source: Any, check: Any) -> None:
    from torch._dynamo.guards import install_guard

    _guard_reused_regions()
    install_guard(source.make_guard(check))
    # What a nested region has read is compared before its graph is taken for another call of it (torch 2.13 and later).
    if (read := getattr(_output().current_tracer, "traced_sources", None)) is not None:
        read.add(source)


@functools.cache
def _guard_reused_regions() -> None:
    """Let Dynamo guard on what it compared to take a nested region's graph for another call.

    Torch 2.13 to 2.15 compare and forget: a layer that is changed after the compile would run the code of before.
    """
    try:
        from torch._dynamo.variables import invoke_subgraph as regions
    except ImportError:  # torch before 2.13 traces each call
        return
    from torch._dynamo.guards import install_guard

    is_reusable = regions.is_reusable

    @functools.wraps(is_reusable)
    def guarded(tx: Any, condition: Any, fingerprint: Any, entry: Any) -> bool:
        if not is_reusable(tx, condition, fingerprint, entry):
            return False
        replaced = regions.build_source_replacement(entry.arg_sources, fingerprint.arg_sources)

        def own(source: Any) -> Any:
            return source.clone(lambda part: replaced.get(part, part))

        if replaced:
            tx.output.guard_on_key_order |= {own(source) for source in tx.output.guard_on_key_order}
        for source, _, _, guard in condition.guards:
            mine = own(source)
            # what tensors are is guarded on where they become inputs
            if mine != source and guard.create_fn_name() != "TENSOR_MATCH":
                copied = mine.make_guard(guard.create_fn)
                copied.user_stack = guard.user_stack  # it would be looked for on the stack
                install_guard(copied)
        return True

    regions.is_reusable = guarded  # type: ignore[assignment]
