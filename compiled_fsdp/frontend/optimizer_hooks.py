"""Detect an optimizer that was built before sharding: it holds the old parameters, and its steps would do nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_watching = False
_calls = 0  # of watch_optimizers: sharding more makes more parameters stale


def watch_optimizers(sharded: WeakTensorKeyDictionary) -> None:
    """From now on the first step of any optimizer that holds a key of ``sharded`` raises ValueError."""
    global _watching, _calls
    _calls += 1
    if _watching:
        return
    _watching = True

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _checked.get(optimizer) == _calls:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param in sharded:
                    raise ValueError(
                        f"{type(optimizer).__name__} was built before fully_shard: it holds the unsharded {sharded[param].name!r}, which the "
                        "model no longer uses, so its steps would change nothing. Build the optimizer after fully_shard."
                    )
        _checked[optimizer] = _calls

    register_optimizer_step_pre_hook(check)
