"""Write frozen dataclasses as text, so that a graph holds each of them as one constant, which people can read, too.

>>> @dataclass(frozen=True)
... class Spec(TextForm):
...     form: str
...     numels: tuple[int, ...]
...     kept: bool = False
>>> str(Spec("flat", (4, 32)))
'flat; numels 4 32'
>>> Spec.parse("flat; numels 4 32")
Spec(form='flat', numels=(4, 32), kept=False)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

Form = TypeVar("Form", bound="TextForm")


class TextForm:
    """Base class of frozen dataclasses that are written as text.

    The text begins with the values of all ``str`` fields without a default. The other fields follow with their names;
    a field at its default is left out. The type of a field is ``str`` without ``"; "`` (one word if it has no default),
    ``int``, ``bool``, ``torch.dtype``, ``torch.device``, an ``Enum`` with ``str`` values, a tuple of ints or bools, or
    one of these or None.
    """

    def __str__(self) -> str:
        return _text_of(self)

    @classmethod
    def parse(cls: type[Form], text: str) -> Form:
        """Read a value that ``str`` wrote."""
        kind: Any = cls
        form: Form = _parsed(kind, text)
        return form


# The caches stay small, because equal layers have equal values.
@functools.cache
def _text_of(form: Any) -> str:
    kind: Any = type(form)
    fields = _fields_of(kind)
    first = " ".join(_words(getattr(form, name)) for name in fields.first)
    named = [
        f"{name} {_words(value)}".rstrip()
        for name, default in fields.named.items()
        if (value := getattr(form, name)) != default
    ]
    return "; ".join([first] * bool(fields.first) + named)


@functools.cache
def _parsed(form: Any, text: str) -> Any:
    fields, clauses = _fields_of(form), text.split("; ")
    words = dict(zip(fields.first, clauses.pop(0).split(), strict=True)) if fields.first else {}
    for clause in clauses:
        name, _, words[name] = clause.partition(" ")
    return form(**{name: _value(fields.kinds[name], given) for name, given in words.items()})


class _Fields(NamedTuple):
    kinds: dict[str, Any]
    # Fields that the text holds without their names.
    first: list[str]
    # Fields that the text holds with their names; their defaults by name.
    named: dict[str, Any]


@functools.cache
def _fields_of(form: Any) -> _Fields:
    kinds, fields = get_type_hints(form), dataclasses.fields(form)
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    first = [name for name in needed if isinstance(kind := kinds[name], type) and issubclass(kind, str)]
    return _Fields(kinds, first, {field.name: field.default for field in fields if field.name not in first})


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _value(kind: Any, words: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # ``kind | None``
        return None if words == "None" else _value(inner[0], words)
    if origin is tuple:
        return tuple(_value(inner[0], word) for word in words.split())
    if kind is bool:
        return words == "True"
    if kind is torch.dtype:
        return getattr(torch, words)
    if isinstance(kind, type) and issubclass(kind, (int, torch.device, enum.Enum)):
        return kind(words)
    return words
