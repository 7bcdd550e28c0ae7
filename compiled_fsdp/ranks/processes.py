"""Whether a process of this machine still runs.

On other systems than Linux nothing is known of any process.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def machine_id() -> str | None:
    """The same for all processes that can see each other; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """When a process began, in ticks since the machine's start; None if it has ended, reaped or not."""
    try:
        # After the name, which may contain anything: the state, and the start time 19 fields later.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else rest[18]
