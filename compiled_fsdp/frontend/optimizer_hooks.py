"""The hook before every optimizer step: it drops gathered parameters, because the step makes them stale.

It also finds an optimizer that was built before sharding: that one holds the original parameters, so its steps would do
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.registry import retaining_units

# The ``ShardedParameter`` that each original parameter became.
sharded_from = WeakTensorKeyDictionary()

# Optimizers that hold no original parameter, with the value of ``_calls`` when they were checked. After another call of
# ``watch_optimizers`` they are checked again, because more parameters have been sharded.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_calls = 0


def watch_optimizers() -> None:
    """From now on let every optimizer step drop the gathered parameters that it makes stale.

    The first step of an optimizer that holds an original parameter raises ValueError.
    """
    global _calls
    if _calls == 0:
        register_optimizer_step_pre_hook(_before_step)
    _calls += 1


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) != _calls:
        _check(optimizer)
    forget_gathered([param for group in optimizer.param_groups for param in group["params"]])


def forget_gathered(written: Sequence[torch.Tensor]) -> None:
    """Drop the gathered values of these DTensors, because they are about to be written."""
    units, follower = retaining_units(), RUNTIME.follower
    follower.drop(written)  # or a forward that raised would go on with full parameters from before the step
    RUNTIME.prefetcher.drop(written)
    if units or follower.backwards.keeps:
        params = set(map(id, written))
        in_backward = backward_id() != -1  # the rest of that backward may read parameters kept for checkpoints
        if not in_backward:
            follower.backwards.drop_kept(params)
        for unit in units:
            if any(id(parameter.param) in params for parameter in unit.parameters):
                unit.reshard()
                if not in_backward:
                    unit.eager.drop_kept()


def _check(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in sharded_from:
                raise ValueError(
                    f"{type(optimizer).__name__} was built before fully_shard: it holds the unsharded "
                    f"{sharded_from[param].name!r}, which the model no longer uses, so its steps would change nothing. "
                    "Build the optimizer after fully_shard."
                )
    _checked[optimizer] = _calls
