"""CPU offload: shards and their gradients, and so the optimizer's state, live in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Offload:
    """How shards are offloaded; they are copied to the device for a gather, and reduced gradients are copied back."""

    # Whether shards are in pinned memory, so that copies are asynchronous.
    pinned: bool

    def put_away(self, shard: torch.Tensor) -> torch.Tensor:
        """Copy ``shard`` to host memory; a meta tensor stays as it is."""
        if shard.is_meta:
            return shard
        host = shard.cpu()
        return host.pin_memory() if self.pinned else host


def offload_of(policy: Any) -> Offload | None:
    """Return how ``offload_policy`` offloads; None for no offload.

    Raises:
        ValueError: ``policy`` is not an ``OffloadPolicy``, or asks for pinned memory without an accelerator.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if policy is None:
        return None
    if not isinstance(policy, OffloadPolicy):
        raise ValueError(
            "fully_shard: offload_policy must be OffloadPolicy() or CPUOffloadPolicy(), but got "
            f"{type(policy).__name__}."
        )
    if not isinstance(policy, CPUOffloadPolicy):
        return None
    if policy.pin_memory and not torch.accelerator.is_available():
        raise ValueError(
            "fully_shard: offload_policy=CPUOffloadPolicy(pin_memory=True), but there is no accelerator to pin memory "
            "for; use CPUOffloadPolicy(pin_memory=False)."
        )
    return Offload(policy.pin_memory)
