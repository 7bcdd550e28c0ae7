"""Numbers as people read them."""

from __future__ import annotations

import posixpath
import textwrap
from collections.abc import Sequence
from itertools import pairwise

WIDTH = 100
"""Columns that tables and advice have at most."""
_MOST_LISTED = 3


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds: "3.1 ms", or three digits below one."""
    return f"{1e3 * seconds:,.1f} ms" if abs(seconds) >= 1e-3 else f"{1e3 * seconds:.3g} ms"


def size_unit(size: float) -> tuple[str, float]:
    """The unit that so many bytes are told in, and its bytes: of 10**9, 10**6 or 10**3."""
    if size >= 1e9:
        return "GB", 1e9
    return ("MB", 1e6) if size >= 1e5 or not size else ("kB", 1e3)


def megabytes(size: float) -> str:
    """Bytes as "1.2 GB" or "13.4 MB"."""
    unit, divisor = size_unit(size)
    return f"{size / divisor:,.1f} {unit}"


def wrapped(text: str, indent: str) -> list[str]:
    """A text in lines of at most ``WIDTH`` columns, where its words allow it; later ones are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(names: Sequence[str]) -> str:
    """ "a, b, c and 2 more"."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def count(number: int, what: str) -> str:
    """ "1 unit", "2 units", "no units"."""
    return f"{number or 'no'} {what}" + ("" if number == 1 else "s")


def number_list(numbers: Sequence[int]) -> str:
    """Numbers of graphs: "[0] + [1]", or "[0] to [5]" where they follow each other."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}] to [{numbers[-1]}]"
    return " + ".join(f"[{number}]" for number in numbers)


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks of a group: all of them, or shortly where they lie evenly: "ranks 0-63", "ranks 0,8 to 56 (8)"."""
    steps = {following - one for one, following in pairwise(ranks)}
    if len(ranks) <= _MOST_LISTED or len(steps) > 1:
        return "ranks " + ",".join(map(str, ranks))
    if steps == {1}:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {ranks[0]},{ranks[1]} to {ranks[-1]} ({len(ranks)})"


def common_module(names: Sequence[str]) -> str:
    """The innermost module that has all parameters of these names; "" for the root."""
    modules = [name.rpartition(".")[0].replace(".", "/") for name in names]
    return posixpath.commonpath(modules).replace("/", ".")


def bucket_name(names: Sequence[str]) -> str:
    """A bucket by its parameters: the only one, the module that has them all, or the first one and how many more."""
    if len(names) == 1:
        return names[0]
    if module := common_module(names):
        return f"{module}.* ({len(names)})"
    return f"{names[0]} and {len(names) - 1} more"
