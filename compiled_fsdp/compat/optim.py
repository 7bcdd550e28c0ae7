"""The parts of ``torch.optim`` that have no public name."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim._muon import _adjust_lr as adjusted_lr
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.optimizer import _to_scalar as scalar

__all__ = ["adjusted_lr", "foreach_norm", "has_hooks", "newton_schulz", "scalar", "step_without_hooks"]


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor."""
    return list(torch._foreach_norm(tensors, norm_type))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()``, but not the hooks around it: it is part of another optimizer's step."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around this optimizer's steps, or behind the steps of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_post_hooks)
