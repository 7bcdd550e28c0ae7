"""Read memory sizes as users write them: "80GB", "60GiB", "0.9"."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> float:
    """Convert a memory size to a number; upper-case and lower-case letters are equal.

    For example, "80GB" is ``80e9`` and "1.5 GiB" is ``1.5 * 2**30``. "0.9" is 0.9, because a number without a unit may
    be a share of the device's memory.

    Raises:
        ValueError: the text is not a size.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            "a size is a number of bytes, or has a unit: 80GB (80 * 10**9 bytes), 80GiB (80 * 2**30 bytes)"
        )
    return float(found[1]) * _UNITS[found[2]]


def too_small_a_budget(size: float) -> str:
    """Return an error message if a budget of ``size`` bytes must be a mistake, else "".

    For example, a budget of 80 is 80 bytes, but the user means 80 % or 80 GB.
    """
    if not 1 < size <= 100:  # a size of at most 1 is a share of the device's memory
        return ""
    return (
        f"{size:g} bytes: no model fits. For {size:g} % of the device's memory give {size / 100:g}, for {size:g} GB "
        f"give '{size:g}GB'"
    )
