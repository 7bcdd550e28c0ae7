"""Gathers outside of graphs: how they are counted and launched, and how their results become full parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_fsdp.base import traffic, watch
from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.spec import FLAT, BucketSpec, Kind
from compiled_fsdp.compat.autograd import outside_of_autocast
from compiled_fsdp.ranks import failures
from compiled_fsdp.state.parameter import ShardedParameter


@outside_of_autocast
def launch_all_gather(
    parameters: Sequence[ShardedParameter],
    inputs: Sequence[Tensor],
    spec: BucketSpec,
    *,
    prepared: bool = False,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Start gathering parameters of one dtype and group, into one flat bucket or (coalesced) one tensor for each.

    Args:
        inputs: the padded shards, or copies of them.
        prepared: whether ``inputs`` are ready to be sent (``ShardedParameter.all_gather_input``). For a flat bucket
            they are then one tensor.
        out: for a coalesced bucket on the CPU, the tensors to gather into. ``inputs`` are then this rank's parts of
            them.

    Returns: the tensors to wait for, one for all parameters or one for each: ``[world * elements of the shards]``, or
    bytes if there is a codec.
    """
    first = parameters[0]
    calls = [[p] for p in parameters] if spec.coalesced and first.device.type == "cpu" else [parameters]
    announce("gather", calls, [sum(p.full_nbytes for p in call) for call in calls], first.world)
    groups = first.group.group_names
    if out is not None:
        return transport.gather_into(out, inputs, first.world, groups.all_gather)
    return transport.launch(inputs, spec, groups) if prepared else collectives.launch(inputs, (), spec, groups)


def announce(kind: str, calls: Sequence[Sequence[ShardedParameter]], sizes: Sequence[int], ranks: int) -> None:
    """Tell the watcher and the traffic counter of collectives, of ``sizes`` bytes, that are launched next."""
    if (watcher := watch.current()) is not None:
        watcher.expect(kind, calls, sizes)
    for call, size in zip(calls, sizes, strict=True):
        traffic.launched(kind, len(call), size, ranks)


def spec_of(
    parameters: Sequence[ShardedParameter], form: str = FLAT, by: str = Kind.GATHER.usual_transport
) -> BucketSpec:
    """The default ``BucketSpec`` for gathering these parameters, by the transport ``by``."""
    first, numels = parameters[0], tuple([p.shard.numel() for p in parameters])
    return BucketSpec(
        Kind.GATHER, form, by, first.world, numels, first.group.group_id,
        dtype=first.dtype, codec=first.codec, device=first.read_spec.device,
    )  # fmt: skip


class GatherInFlight:
    """A bucket of parameters that is gathered outside of graphs, in flight until ``fulls``.

    Args:
        parameters: parameters of one dtype and group.
        spec: how they are gathered; None: in a flat bucket.
        buckets: the launched tensors; None: the gather is launched here, with the present shards. In a group of one
            rank there is nothing to launch.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        spec: BucketSpec | None = None,
        buckets: Sequence[Tensor] | None = None,
    ) -> None:
        self._parameters, self._spec = parameters, spec or spec_of(parameters)
        if buckets is None and self._spec.world > 1:
            buckets = launch_all_gather(parameters, [p.shard for p in parameters], self._spec)
        self._buckets = buckets or ()

    def wait(self) -> None:
        """Wait for the collective."""
        for bucket in self._buckets:
            failures.wait(bucket)

    @outside_of_autocast
    def fulls(self) -> list[Tensor]:
        """Wait, and return the full parameters. In a group of one rank without a cast they are views of the shards."""
        if self._spec.world == 1:
            alone = [collectives.to_compute(p.shard, p.dtype, p.read_spec.device) for p in self._parameters]
            return [
                full.view(parameter.read_spec.size) for full, parameter in zip(alone, self._parameters, strict=True)
            ]
        buckets = [failures.wait(bucket) for bucket in self._buckets]
        each = buckets if self._spec.coalesced else buckets * len(self._parameters)
        return [
            collectives.unpack_gather(bucket, place, p.read_spec)
            for bucket, p, place in zip(each, self._parameters, collectives.offsets(self._spec), strict=False)
        ]
