"""The parts of ``torch.optim.Muon`` that have no public name."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim._muon import _adjust_lr as adjusted_lr
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.optimizer import _to_scalar as scalar

__all__ = ["adjusted_lr", "newton_schulz", "scalar", "step_without_hooks"]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()``, but not the hooks around it: it is part of another optimizer's step."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
