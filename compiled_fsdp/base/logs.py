"""Which rank logs what, and what is logged once.

Ranks agree on plans, so the first rank's lines at INFO and DEBUG are everybody's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

import torch.distributed as dist

OURS = "compiled_fsdp"

# Logger and key of each line that is logged once and has been, in this process.
_logged: set[tuple[str, Hashable]] = set()


def speaks_for_all(log: logging.Logger) -> None:
    """Let the first rank alone log at INFO and below to ``log``, unless our own logs were asked for.

    ``TORCH_LOGS=compiled_fsdp`` asks, and so does whoever gives one of our loggers a level. A root logger at INFO, as
    torchtitan has it, does not.
    """
    log.addFilter(_is_logged_here)


def warn_once(log: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """A warning, the first time that ``log`` gets one with this ``key``."""
    log_once(log, logging.WARNING, key, message, *args)


def log_once(log: logging.Logger, level: int, key: Hashable, message: str, *args: object) -> None:
    """A line at ``level``, the first time that ``log`` gets one with this ``key``."""
    if (log.name, key) not in _logged:
        _logged.add((log.name, key))
        log.log(level, message, *args)


def _is_logged_here(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or _rank() == 0 or _asked_for(record.name)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))  # as torchrun sets it


def _asked_for(name: str) -> bool:
    while name.startswith(OURS):
        if logging.getLogger(name).level != logging.NOTSET:
            return True
        name = name.rpartition(".")[0]
    return False
