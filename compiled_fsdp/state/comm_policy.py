"""The user's switches of one unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_fsdp.sharding.process_groups import ShardGroup


@dataclass
class CommPolicy:
    """The user's switches of one unit, set by arguments of ``fully_shard`` and by FSDPModule's methods."""

    # None: False for a root unit, because backward needs its parameters first; True for all others.
    reshard_after_forward: bool | None = None
    # The ranks that gather in backward, if they are a part of the shard group (``reshard_after_forward=8``).
    post_forward_group: ShardGroup | None = None
    reshard_after_backward: bool = True
    # The ranks that share one copy of the parameters over microbatches (``set_reshard_after_backward(8)``); 0: each
    # rank has full parameters.
    ranks_of_parts: int = 0
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    # Leave reductions to ``finalize_backward()``, or to the end of a backward with gradient sync on.
    defer_to_finalize: bool = False
    # Divide summed gradients by this; None: by the number of ranks.
    divide_factor: float | None = None
    # Let the collective sum, and divide afterwards, instead of letting the collective average.
    force_sum: bool = False
    # Cast floating-point inputs and outputs of the forward to these; None: they stay.
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
