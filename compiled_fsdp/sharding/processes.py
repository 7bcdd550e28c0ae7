"""Whether a process of this machine still runs. Elsewhere than on Linux nothing is known of any."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def machine() -> str | None:
    """What processes that can see each other have in common; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def born(pid: int) -> str | None:
    """When a process began, in ticks since the machine's start; None if it has ended, reaped or not."""
    try:
        # behind the name, which may hold anything: the state, and twentieth the start
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else rest[18]
