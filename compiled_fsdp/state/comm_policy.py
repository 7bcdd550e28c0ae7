"""The user's switches of one unit."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_fsdp.sharding.process_groups import ShardGroup


@dataclass
class CommPolicy:
    """The user's switches of one unit: arguments of ``fully_shard``, and what FSDPModule's methods set."""

    # None: True, except for a root, whose backward comes first.
    reshard_after_forward: bool | None = None
    # Those who gather in backward, where that is a part of the shards (``reshard_after_forward=8``).
    post_forward_group: ShardGroup | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    # Leave reductions to ``finalize_backward()``, or to the end of a backward.
    defer_to_finalize: bool = False
    # In place of the number of ranks.
    divide_factor: float | None = None
    # Sum, and divide afterwards.
    force_sum: bool = False
