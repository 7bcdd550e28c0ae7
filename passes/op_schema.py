"""What the schemas of ops say. Each is read once: torch makes new Python objects at every look at a schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple


class OpSchema(NamedTuple):
    """What graph passes ask of an op's schema."""

    # By name: an argument's place, and its default.
    arguments: Mapping[str, tuple[int, Any]]
    # Places and names of the arguments that are written.
    written: tuple[tuple[int, str], ...]
    # Places and names of the arguments whose memory a result shows: of views, in-place ops and out-variants.
    shown: tuple[tuple[int, str], ...]
    # Whether a result may show memory of an argument.
    aliases: bool


NO_SCHEMA = OpSchema({}, (), (), aliases=False)
"""Of what is no op: functions, higher-order ops, names of methods."""


def schema_of(target: Any) -> OpSchema:
    """The schema of a call's target; ``NO_SCHEMA`` if it has none."""
    return NO_SCHEMA if getattr(target, "_schema", None) is None else _read(target)


@functools.cache
def _read(op: Any) -> OpSchema:
    schema = op._schema
    results = {
        name for result in schema.returns if result.alias_info is not None for name in result.alias_info.before_set
    }
    formals = list(enumerate(schema.arguments))
    return OpSchema(
        arguments={formal.name: (place, formal.default_value) for place, formal in formals},
        written=tuple((place, formal.name) for place, formal in formals if formal.is_write),
        shown=tuple(
            (place, formal.name)
            for place, formal in formals
            if formal.alias_info is not None and formal.alias_info.before_set & results
        ),
        aliases=any(result.alias_info is not None for result in schema.returns),
    )
