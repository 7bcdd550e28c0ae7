"""Facts about ops from their schemas. Each schema is read once, because torch makes new objects at every access."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple


class OpSchema(NamedTuple):
    """The facts that graph passes need of an op's schema."""

    # The position and the default of each argument, by name.
    arguments: Mapping[str, tuple[int, Any]]
    # Positions and names of the arguments that the op writes.
    written: tuple[tuple[int, str], ...]
    # Positions and names of the arguments whose memory a result shares: in views, lists of views such as ``unbind``'s,
    # in-place ops and out-variants.
    shown: tuple[tuple[int, str], ...]
    # Whether a result may share memory with an argument.
    aliases: bool


NO_SCHEMA = OpSchema({}, (), (), aliases=False)
"""The schema of targets that are not ops: functions, higher-order ops, names of methods."""


def schema_of(target: Any) -> OpSchema:
    """The facts about a call's target; ``NO_SCHEMA`` if the target has no schema."""
    return NO_SCHEMA if getattr(target, "_schema", None) is None else _read(target)


@functools.cache
def _read(op: Any) -> OpSchema:
    schema = op._schema
    results = {
        name for result in schema.returns if result.alias_info is not None for name in result.alias_info.before_set
    }
    returns_views = any(
        result.alias_info is not None and str(result.type).startswith("List") for result in schema.returns
    )
    formals = list(enumerate(schema.arguments))
    return OpSchema(
        arguments={formal.name: (place, formal.default_value) for place, formal in formals},
        written=tuple((place, formal.name) for place, formal in formals if formal.is_write),
        shown=tuple(
            (place, formal.name)
            for place, formal in formals
            if formal.alias_info is not None
            and (formal.alias_info.before_set & results or (returns_views and "*" in formal.alias_info.after_set))
        ),
        aliases=any(result.alias_info is not None for result in schema.returns),
    )
