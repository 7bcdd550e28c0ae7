"""The parts of ``torch.optim.Muon`` that have no public name."""

from __future__ import annotations

from torch.optim._muon import _adjust_lr as adjusted_lr
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.optimizer import _to_scalar as scalar

__all__ = ["adjusted_lr", "newton_schulz", "scalar"]
