"""Gather parameters outside of a graph: count, launch, and cut the bucket into full parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_fsdp.comm import collectives, traffic
from compiled_fsdp.state.parameter import ShardedParameter


def launch_all_gather(parameters: Sequence[ShardedParameter], inputs: Sequence[Tensor] | None = None) -> Tensor | None:
    """Start gathering parameters of one dtype and group; None in a group of one, which has nothing to gather.

    Args:
        inputs: what to send in place of the shards as they are now.

    Returns: the flat bucket, ``[world * the shards' elements]``, to be waited for.
    """
    first = parameters[0]
    if first.world == 1 and inputs is None:
        return None
    traffic.gathered(len(parameters), sum(parameter.full_nbytes for parameter in parameters), first.world)
    shards = [parameter.shard for parameter in parameters] if inputs is None else inputs
    return collectives.launch_gather(shards, first.world, first.group.name, first.dtype, first.compute_device)


def wait_and_unpack(parameters: Sequence[ShardedParameter], bucket: Tensor | None) -> list[Tensor]:
    """The full parameters of a bucket, each of its ``size``: views of it, or of the shards where there is no bucket."""
    if bucket is None:
        return [parameter.all_gather_input().view(parameter.size) for parameter in parameters]
    bucket = collectives.wait(bucket)
    fulls, offset = [], 0
    for parameter in parameters:
        fulls.append(collectives.unpack_gather(bucket, offset, parameter.size, parameter.world, parameter.dim))
        offset += parameter.shard.numel()
    return fulls
