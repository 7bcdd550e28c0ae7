"""What a step of any optimizer means for sharded parameters.

It writes to shards, so what was gathered of them is stale.

The same hook finds an optimizer that was built before sharding: it holds the old parameters, and its steps would do
nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.registry import retaining_units

# Original parameters, and the ``ShardedParameter`` that each became.
sharded_from = WeakTensorKeyDictionary()

# Optimizers that hold none of these, as of how many calls of ``watch_optimizers``: sharding more makes more parameters
# stale.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_calls = 0


def watch_optimizers() -> None:
    """From now on every step of an optimizer drops what it makes stale.

    The first step of one that holds an original parameter raises ValueError.
    """
    global _calls
    if _calls == 0:
        register_optimizer_step_pre_hook(_before_step)
    _calls += 1


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) != _calls:
        _check(optimizer)
    if RUNTIME.follower.is_active or not RUNTIME.prefetcher.idle:
        written = [param for group in optimizer.param_groups for param in group["params"]]
        RUNTIME.follower.drop(written)  # a forward that raised would go on with the full parameters of before the step
        RUNTIME.prefetcher.drop(written)
    units, follower = retaining_units(), RUNTIME.follower
    if units or follower.backwards.keeps:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        in_backward = backward_id() != -1  # whose rest may read what checkpoints keep
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
