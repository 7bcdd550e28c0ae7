"""Gather parameters outside of a graph: count, launch, and cut the bucket into full parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_fsdp.base import traffic, watch
from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.ranks import failures
from compiled_fsdp.state.parameter import ShardedParameter


def launch_all_gather(
    parameters: Sequence[ShardedParameter],
    inputs: Sequence[Tensor],
    *,
    coalesced: bool = False,
    prepared: bool = False,
    out: Sequence[Tensor] | None = None,
    by_kernel: bool = False,
) -> list[Tensor]:
    """Start gathering parameters of one dtype and group: a flat bucket, or a tensor for each, without copies.

    Args:
        inputs: what to send: the padded shards, or copies of them.
        prepared: ``inputs`` are as ``ShardedParameter.all_gather_input`` has them; of a flat bucket one tensor.
        by_kernel: Triton kernels pack the bucket, as they do in a graph of another rank.
        out: what to gather into, of a coalesced bucket on the CPU: ``inputs`` are this rank's parts of it.

    Returns: ``[world * the shards' elements]`` all in one, or of each, with a codec bytes; to be waited for.
    """
    first = parameters[0]
    sizes = [parameter.full_nbytes for parameter in parameters]
    calls = [[size] for size in sizes] if coalesced and first.device.type == "cpu" else [sizes]
    if (watcher := watch.current()) is not None:
        members = [[parameter] for parameter in parameters] if len(calls) > 1 else [parameters]
        watcher.expect("gather", members, [sum(call) for call in calls])
    for call in calls:
        traffic.gathered(len(call), sum(call), first.world)
    if out is not None:
        return transport.gather_into(out, inputs, first.world, first.group.name)
    world, group = first.world, first.group.name
    if prepared:
        start = transport.gather_together
        return start(inputs, world, group) if coalesced else [transport.gather(inputs[0], world, group)]
    arguments = inputs, world, group, first.dtype, first.compute_device, by_kernel, first.codec
    return collectives.launch_gathers(*arguments) if coalesced else [collectives.launch_gather(*arguments)]


def launch_flat(parameters: Sequence[ShardedParameter]) -> Tensor | None:
    """Start gathering parameters as they are now, in one flat bucket; None in a group of one: nothing is to be done."""
    if parameters[0].world == 1:
        return None
    return launch_all_gather(parameters, [parameter.shard for parameter in parameters])[0]


def wait_and_unpack(
    parameters: Sequence[ShardedParameter], bucket: Tensor | None, *, by_kernel: bool = False
) -> list[Tensor]:
    """The full parameters of a bucket, each of its ``size``; without a bucket views of the shards.

    ``by_kernel``: Triton kernels have packed it.
    """
    if bucket is None:
        alone = [collectives.to_compute(p.shard, p.dtype, p.compute_device) for p in parameters]
        return [full.view(parameter.size) for full, parameter in zip(alone, parameters, strict=True)]
    bucket = failures.wait(bucket)
    first = parameters[0]
    places = collectives.offsets([parameter.shard.numel() for parameter in parameters], by_kernel, first.codec)
    return [
        collectives.unpack_gather(bucket, place, p.size, p.world, p.dim, p.codec, p.dtype)
        for p, place in zip(parameters, places, strict=False)
    ]
