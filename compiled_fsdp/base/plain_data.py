"""Convert JSON from another process or a file to a value of a given type, or raise an error.

A message of another rank or a cache file may come from another version of compiled_fsdp, or be incomplete. JSON cannot
run code when it is read, and ``from_json`` checks its values against the type's annotations before anybody uses them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Plain = TypeVar("Plain", bound="PlainData")


class Unfit(ValueError):
    """Plain data does not have the wanted type."""


class PlainData:
    """Base class of dataclasses that are written as JSON, for other processes and for files."""

    def to_json(self) -> str:
        """Return this value as JSON; ``from_json`` reads it back."""
        data: Any = self
        return json.dumps(dataclasses.asdict(data))

    @classmethod
    def from_json(cls: type[Plain], text: str) -> Plain:
        """Read a value that ``to_json`` wrote.

        Raises:
            Unfit: the text is something else, for example JSON of another version of compiled_fsdp (a ``ValueError``).
        """
        value: Plain = from_json(cls, text)
        return value


def from_json(kind: Any, text: str) -> Any:
    """Read JSON as a value of type ``kind``.

    Args:
        kind: ``str``, ``bool``, ``int``, ``float``, ``None``, ``Any``, a dataclass, ``NamedTuple``, ``Literal``,
            ``Enum``, a union, or a container with its element types: ``tuple``, ``list``, ``Sequence``, ``dict`` or
            ``Mapping`` (with ``str`` keys). For example, ``tuple[list[str], int | None]``.
        text: the JSON.

    Raises:
        Unfit: the text is not JSON, or a value has another type; the message names the value.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"no JSON: {error}") from error
    return from_data(kind, data)


def from_data(kind: Any, data: Any, at: str = "it") -> Any:
    """Convert ``data``, a result of ``json.loads``, to type ``kind``; see ``from_json``. ``at``: its name in errors."""
    if kind is Any:
        return data
    if kind is None or kind is type(None):
        return _require(data is None, data, None, at=at, wanted="nothing")
    if kind is float:
        return float(_require(_is_number(data), data, data, at=at, wanted="a number"))
    if kind is int:
        fits = _is_number(data) and (isinstance(data, int) or data.is_integer())  # accepts 80e9, which is a float
        return int(_require(fits, data, data, at=at, wanted="a whole number"))
    if kind in (str, bool):
        return _require(isinstance(data, kind), data, data, at=at, wanted=f"of type {kind.__name__}")
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, at)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        _require(data in [each.value for each in kind], data, data, at=at, wanted=f"a {kind.__name__}")
        return kind(data)
    if isinstance(kind, type) and hasattr(kind, "_fields"):  # a NamedTuple; JSON stores it as a list
        return kind(*_values(tuple(_hints(kind).values()), data, at))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _require(data in inner, data, data, at=at, wanted=f"one of {inner}")
    if origin in (Union, types.UnionType):
        return _union(inner, data, at)
    if origin is tuple and inner[1:] != (...,):
        return _values(inner, data, at)
    if origin in (tuple, list, Sequence):
        _require(isinstance(data, list), data, data, at=at, wanted="a list")
        values = [from_data(inner[0], value, f"{at}[{i}]") for i, value in enumerate(data)]
        return tuple(values) if origin is tuple else values
    if origin in (dict, Mapping):
        _require(isinstance(data, dict), data, data, at=at, wanted="a dictionary")
        return {
            from_data(inner[0], key, at): from_data(inner[1], value, f"{at}[{key!r}]") for key, value in data.items()
        }
    raise TypeError(f"{kind} is no type of plain data")


def _values(kinds: Sequence[Any], data: Any, at: str) -> tuple[Any, ...]:
    fits = isinstance(data, list) and len(data) == len(kinds)
    _require(fits, data, data, at=at, wanted=f"{len(kinds)} values")
    return tuple(from_data(kind, value, f"{at}[{i}]") for i, (kind, value) in enumerate(zip(kinds, data, strict=True)))


def _dataclass(kind: Any, data: Any, at: str) -> Any:
    _require(isinstance(data, dict), data, data, at=at, wanted=f"a {kind.__name__}")
    hints = _hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    unknown = sorted(data.keys() - {field.name for field in fields})
    _require(not unknown, data, data, at=at, wanted=f"a {kind.__name__}, which has no {', '.join(unknown)}")
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING and f.name not in data]
    _require(not needed, data, data, at=at, wanted=f"a {kind.__name__}: {', '.join(needed)} is missing")
    return kind(**{name: from_data(hints[name], value, f"{at}.{name}") for name, value in data.items()})


def _union(kinds: Sequence[Any], data: Any, at: str) -> Any:
    for kind in kinds:
        try:
            return from_data(kind, data, at)
        except Unfit:  # try the next type of the union
            continue
    return _require(False, data, data, at=at, wanted=" or ".join(str(kind) for kind in kinds))


_hints = functools.cache(get_type_hints)


def _is_number(data: Any) -> bool:
    return isinstance(data, (int, float)) and not isinstance(data, bool)


def _require(fits: bool, data: Any, value: T, *, at: str, wanted: str) -> T:
    if not fits:
        shown = repr(data)
        raise Unfit(f"{at} should be {wanted}, but is {shown if len(shown) < 80 else shown[:80] + '...'}")
    return value
