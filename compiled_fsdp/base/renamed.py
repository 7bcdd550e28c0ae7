"""Public names that have changed. The old ones work until version 0.2, with a warning."""

from __future__ import annotations

import warnings

FUNCTIONS = {"communication": "count_communication", "collective_names": "record_collective_names"}
OPTIONS = {"optimizer_bytes": "optimizer_bytes_per_element"}
BUCKETS = {"none": "parameter"}
"""Values of the option ``bucket``."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that a program uses an old name, for example "measure_hardware(again=...)"."""
    warnings.warn(
        f"compiled_fsdp: {old} is called {new} now; the old name works until version 0.2.", FutureWarning, stacklevel=3
    )
