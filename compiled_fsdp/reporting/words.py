"""Numbers as people read them."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

_MOST_LISTED = 3


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds: "3.1 ms", or three digits below one."""
    return f"{1e3 * seconds:,.1f} ms" if abs(seconds) >= 1e-3 else f"{1e3 * seconds:.3g} ms"


def megabytes(size: float) -> str:
    """Bytes as "1.2 GB" or "13.4 MB", of 10**9 and 10**6."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 or not size else f"{size / 1e3:,.1f} kB"


def listed(names: Sequence[str]) -> str:
    """ "a, b, c and 2 more"."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def count(number: int, what: str) -> str:
    """ "1 unit", "2 units", "no units"."""
    return f"{number or 'no'} {what}" + ("" if number == 1 else "s")


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
