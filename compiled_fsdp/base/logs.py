"""Choose the ranks that log a line, and log some lines only once.

Ranks agree on plans, so the lines of rank 0 at INFO and DEBUG hold for all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

import torch.distributed as dist

OURS = "compiled_fsdp"

# The logger's name and the key of each line that ``log_once`` has logged in this process.
_logged: set[tuple[str, Hashable]] = set()


def speaks_for_all(log: logging.Logger) -> None:
    """Let only rank 0 log to ``log`` at INFO and below, unless the user asks for compiled_fsdp's logs.

    The user asks with ``TORCH_LOGS=compiled_fsdp``, or by giving one of compiled_fsdp's loggers a level. A root logger
    at INFO, which torchtitan sets, does not count.
    """
    log.addFilter(_is_logged_here)


def warn_once(log: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """Log a warning, unless ``log_once`` has already logged a line with this ``key`` to ``log``."""
    log_once(log, logging.WARNING, key, message, *args)


def log_once(log: logging.Logger, level: int, key: Hashable, message: str, *args: object) -> None:
    """Log a line at ``level``, unless this function has already logged a line with this ``key`` to ``log``."""
    if log.isEnabledFor(level) and (log.name, key) not in _logged:
        _logged.add((log.name, key))
        log.log(level, message, *args)


def _is_logged_here(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or rank() == 0 or _asked_for(record.name)


def rank() -> int:
    """This process's rank; 0 if it is the only process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))  # torchrun sets it


def _asked_for(name: str) -> bool:
    while name.startswith(OURS):
        if logging.getLogger(name).level != logging.NOTSET:
            return True
        name = name.rpartition(".")[0]
    return False
