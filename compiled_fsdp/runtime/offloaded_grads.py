"""Reduced gradients of offloaded parameters on their way to ``.grad`` in host memory."""

# Why: docs/design/memory.md, "Offloaded gradients reach their gates on the GPU"

from __future__ import annotations

import torch
from torch import Tensor

from compiled_fsdp.compat.autograd import local_of
from compiled_fsdp.state.parameter import ShardedParameter


class OffloadedGrads:
    """Copies to host memory in flight. The host waits once for all of them, not for each gradient."""

    def __init__(self) -> None:
        # Recorded after the last copy, on its stream; None if no copy is in flight.
        self._copied: torch.Event | None = None
        # Local tensors of ``.grad``, each with the copied gradient that ``finish`` adds to it.
        self._to_add: list[tuple[Tensor, Tensor]] = []

    @property
    def idle(self) -> bool:
        """Whether no copy is in flight."""
        return self._copied is None

    def accumulate(self, parameter: ShardedParameter, rows: Tensor) -> None:
        """Start adding ``rows``, the gradient without padding, to ``.grad``, which is complete after ``finish``.

        Without pinned memory (``CPUOffloadPolicy(pin_memory=False)``) the copy is done when this returns.
        """
        assert parameter.offload is not None
        pinned, param = parameter.offload.pinned, parameter.param
        on_host = rows.to(parameter.shard.device, non_blocking=pinned)
        if param.grad is None:
            parameter.set_grad(on_host)
        else:
            self._to_add.append((local_of(param.grad), on_host))
        self._copied = torch.accelerator.current_stream(rows.device).record_event()

    def finish(self) -> None:
        """Wait for the copies and complete every ``.grad``."""
        if self._copied is None:
            return
        to_add = self._to_add
        copied, self._copied, self._to_add = self._copied, None, []
        copied.synchronize()
        for total, grad in to_add:
            total.add_(grad)
