"""Texts for people: numbers with units, lists, names of buckets."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise

WIDTH = 100
"""The most columns that a line of a table or of advice has."""
_MOST_LISTED = 3


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds: "3.1 ms", or with three digits below one millisecond: "0.205 ms".

    A time below a nanosecond, such as a rest of rounding, is "0 ms".
    """
    return f"{1e3 * seconds:,.1f} ms" if abs(seconds) >= 1e-3 else f"{round(1e3 * seconds, 6):.3g} ms"


def size_unit(size: float) -> tuple[str, float]:
    """Choose the unit to print ``size`` bytes in ("GB", "MB" or "kB"), and return it with its number of bytes."""
    if size >= 1e9:
        return "GB", 1e9
    return ("MB", 1e6) if size >= 1e5 or not size else ("kB", 1e3)


def megabytes(size: float) -> str:
    """Format bytes: "1.2 GB" or "13.4 MB"."""
    unit, divisor = size_unit(size)
    return f"{size / divisor:,.1f} {unit}"


def wrapped(text: str, indent: str) -> list[str]:
    """Break a text into lines of at most ``WIDTH`` columns; every line after the first begins with ``indent``.

    A longer word stays whole. So does a number with its unit.
    """
    together = re.sub(r"(?<=\d) (?=(?:s|ms|[kMG]B)\b)", "\0", text)
    lines = textwrap.wrap(together, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def listed(names: Sequence[str]) -> str:
    """Join names, of which at most three are written out: "a, b, c and 2 more"."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def count(number: int, what: str) -> str:
    """Format a number of things: "1 unit", "2 units", "no units"."""
    return f"{number or 'no'} {what}" + ("" if number == 1 else "s")


def number_list(numbers: Sequence[int]) -> str:
    """Format numbers of graphs: "[0] + [1]", or "[0] to [5]" if more than two numbers follow each other."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}] to [{numbers[-1]}]"
    return " + ".join(f"[{number}]" for number in numbers)


def rank_list(ranks: Sequence[int]) -> str:
    """Format a group's ranks, in a short form if the steps between them are equal: "ranks 0-63", "ranks 0,8 to 56 (8)".

    At most three ranks, and ranks at unequal steps, are all written out: "ranks 0,3,5".
    """
    steps = {following - one for one, following in pairwise(ranks)}
    if len(ranks) <= _MOST_LISTED or len(steps) > 1:
        return "ranks " + ",".join(map(str, ranks))
    if steps == {1}:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {ranks[0]},{ranks[1]} to {ranks[-1]} ({len(ranks)})"


def common_module(names: Sequence[str]) -> str:
    """Return the name of the innermost module that contains all parameters of these names; "" for the root."""
    modules = [name.rpartition(".")[0].replace(".", "/") for name in names]
    return posixpath.commonpath(modules).replace("/", ".")


def bucket_name(names: Sequence[str]) -> str:
    """Name a bucket by its parameters.

    That is its only parameter, the module that contains all of them ("layers.3.* (4)"), or the first one and the number
    of the others ("embedding.weight and 3 more").
    """
    if len(names) == 1:
        return names[0]
    if module := common_module(names):
        return f"{module}.* ({len(names)})"
    return f"{names[0]} and {len(names) - 1} more"


_WHY = {
    "data": {"gather": "needed at the start", "reduce": "complete at the end"},
    "queue": {"gather": "behind other collectives", "reduce": "behind other collectives"},
    "memory": {"gather": "no memory to launch it earlier", "reduce": "no memory to launch it earlier"},
    "compute-limited": {"gather": "too little compute beside it", "reduce": "too little compute beside it"},
}


def why_not_earlier(reason: str, kind: str) -> str:
    """Say in words why a "gather" or "reduce" does not start earlier.

    Args:
        reason: as ``passes/plan/explain_plan.py`` gives it; perhaps with "@" and a place.
        kind: the collective's kind.
    """
    reason, _, where = reason.partition("@")
    text = _WHY[reason][kind]
    return f"{text} ({where})" if where else text
