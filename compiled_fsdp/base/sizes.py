"""Sizes of memory as users write them: "80GB", "60GiB", "0.9"."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> float:
    """The number that a size of memory stands for, in any case of letters.

    For example "80GB" is ``80e9``, "1.5 GiB" is ``1.5 * 2**30``, and "0.9" stays 0.9: without a unit it may be a share.

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError("a size is a number of bytes, with a unit if you like: 80GB (10**9 bytes each), 80GiB (2**30)")
    return float(found[1]) * _UNITS[found[2]]


def too_small_a_budget(size: float) -> str:
    """Why so many bytes of memory must be a mistake; "" if they need not be.

    For example, 80 is 80 bytes, and 80 % or 80 GB are meant.
    """
    if not 1 < size <= 100:  # up to 1 it is a share of the device's memory
        return ""
    return (
        f"{size:g} bytes: no model fits. For {size:g} % of the device's memory give {size / 100:g}, for {size:g} GB "
        f"give '{size:g}GB'"
    )
