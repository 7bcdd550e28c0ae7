"""Frozen values that travel through graphs as text, which is one constant for torch, and for people to read.

>>> @dataclass(frozen=True)
... class Spec(TextForm):
...     form: str
...     numels: tuple[int, ...]
...     kept: bool = False
>>> str(Spec("flat", (4, 32)))
'form flat; numels 4 32'
>>> Spec.parse("form flat; numels 4 32")
Spec(form='flat', numels=(4, 32), kept=False)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

Spec = TypeVar("Spec", bound="TextForm")


class TextForm:
    """A frozen dataclass as text: the names of fields and their values; what is at its default is left out.

    A field is a text without ``"; "``, an int, a bool, a ``torch.dtype``, a ``torch.device``, an ``Enum`` of texts, a
    tuple of ints or bools, or one of these or None.
    """

    @functools.cache  # noqa: B019  a few: equal layers have equal ones
    def __str__(self) -> str:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            (field.name, getattr(self, field.name)) for field in fields if getattr(self, field.name) != field.default
        ]
        return "; ".join(f"{name} {_words(value)}".rstrip() for name, value in given)

    @classmethod
    @functools.cache
    def parse(cls: type[Spec], text: str) -> Spec:
        """What ``str`` wrote."""
        hints, values = get_type_hints(cls), {}
        for field in text.split("; "):
            name, _, words = field.partition(" ")
            values[name] = _value(hints[name], words)
        return cls(**values)


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _value(kind: Any, words: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # with None, which as the default is left out
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
