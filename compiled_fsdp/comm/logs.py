"""Which rank says what all of them know: plans are agreed on, so the first rank's lines at INFO and DEBUG are everybody's."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

OURS = "compiled_fsdp"


def speaks_for_all(log: logging.Logger) -> None:
    """Let the first rank alone log at INFO and below to ``log``, unless our own logs were asked for.

    ``TORCH_LOGS=compiled_fsdp`` asks, and so does whoever gives one of our loggers a level. A root logger at INFO, as torchtitan has it, does not.
    """
    log.addFilter(_is_said_here)


def _is_said_here(record: logging.LogRecord) -> bool:
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
