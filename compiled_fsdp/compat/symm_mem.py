"""torch's all-gather and reduce-scatter by copy engines over symmetric memory, which are private ops of torch.

Each rank copies its shard, or its part for each other rank, through memory that all ranks of a node have mapped,
between two barriers on the device. The copies occupy no multiprocessor, so torch calls the ops "low contention"
(pytorch/pytorch#130583). They run on a stream of their own. Inductor keeps their inputs until the wait, if it knows
them as collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

ALL_GATHER = torch.ops.symm_mem._low_contention_all_gather.default
REDUCE_SCATTER = torch.ops.symm_mem._low_contention_reduce_scatter.default


def missing_kernel(device: torch.device) -> str:
    """The name of an op that has no kernel for a device; "" if both ops have one."""
    key = torch._C._dispatch_key_for_device(device.type)
    for op in (ALL_GATHER, REDUCE_SCATTER):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return str(op.name())
    return ""


def known_to_inductor() -> bool:
    """Whether Inductor knows the ops as collectives: in torch 2.13, and not in torch 2.11."""
    from torch._inductor.lowering import lowerings  # Inductor is imported when something is compiled

    return ALL_GATHER in lowerings and REDUCE_SCATTER in lowerings


def launch(op: Any, sent: Tensor, *args: Any) -> Tensor:
    """Call one of the two ops. Outside of graphs, the memory of ``sent`` is not used again before it has been copied.

    The ops do not see to that. A graph that is traced here records the op alone.
    """
    received: Tensor = op(sent, *args)
    if sent.is_cuda and type(sent) is Tensor:
        sent.record_stream(symmetric_memory._get_backend_stream())
    return received
