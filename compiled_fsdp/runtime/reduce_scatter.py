"""A bucket of reductions outside of graphs, in flight until code asks for its gradients."""

# Why: docs/design/graph-breaks.md, "Deferred reductions bypass autograd"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.codec import sent_nbytes
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import FLAT, TORCH, BucketSpec, Kind, shard_size
from compiled_fsdp.buckets.transport import TRANSPORTS, reduced_again, reduces_by
from compiled_fsdp.compat.autograd import outside_of_autocast
from compiled_fsdp.ranks import failures
from compiled_fsdp.runtime.in_flight import announce
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state.parameter import ShardedParameter

NOT_LAUNCHED = 1 << 62
"""A number greater than that of any graph."""


FLAT_REDUCTION = AgreedBucket(Kind.REDUCE, (), Kind.REDUCE.usual_transport)


class PendingReduceScatter:
    """Reductions of one group and one spec, in flight once ``launch`` was called."""

    def __init__(self, spec: ReduceSpec) -> None:
        self.spec = spec
        # The number of the graph that the gradients come from.
        self.graph = NOT_LAUNCHED
        self._parameters: list[ShardedParameter] = []
        # For each parameter: the shape of its reduced gradient.
        self._sizes: list[list[int]] = []
        # The ranks that reduce, and this rank's number in the group from which the addends come.
        self._group: ShardGroup | None = None
        self._rank = 0
        # One flat bucket, or a tensor for each gradient.
        self._buckets: list[Tensor] = []
        # For each parameter: the index of the tensor in ``_buckets`` with its shard, and the shard's offset there.
        self._places: list[tuple[int, int]] = []
        # How many pieces of each gradient this rank has to add up: one per rank after an all-to-all, else 1.
        self._pieces = 1
        # The spec of the first reduction, if a second one is to come.
        self._first: BucketSpec | None = None
        # How the bucket was packed. Triton kernels leave gaps, which a second reduction sends with the gradients.
        self._copier = TORCH
        # During how many further graphs the bucket is in flight: one, or two with a second reduction, which begins when
        # the first one is waited for.
        self._graphs_beside = 1
        self._done = False

    @outside_of_autocast
    def launch(
        self,
        parameters: Sequence[ShardedParameter],
        grads: Sequence[Tensor],
        graph: int = 0,
        how: BucketSpec | AgreedBucket = FLAT_REDUCTION,
        group: ShardGroup | None = None,
    ) -> None:
        """Start reducing full gradients.

        Args:
            parameters: their parameters.
            grads: the gradients. With ``group`` as ``by_parts`` returns them, or what a part of the ranks has left.
            graph: the number of the graph that they come from.
            how: the transport, the form and the copier. If the form is coalesced, nothing else may write to the
                gradients' memory.
            group: the ranks that reduce; None: all that shard the parameters, or first those in ``ReduceSpec.within``.
        """
        self._parameters, self.graph, self._copier = list(parameters), graph, how.copier
        self.spec = self.spec.of(*(grad.dtype for grad in grads))
        in_parts = group is not None or self.spec.within is not None
        if group is None and self.spec.within is not None:
            ranks = self.spec.within[0]
            grads = [collectives.by_parts(g, p.world, ranks, p.dim) for g, p in zip(grads, parameters, strict=True)]
            group = parameters[0].group.part_of(ranks)
        self._group = group = group or parameters[0].group
        dims = [0 if in_parts else p.dim for p in parameters]
        self._sizes = [shard_size(g.shape, group.size, dim) for g, dim in zip(grads, dims, strict=True)]
        self._rank = group.rank
        again = group.replicas > 1 and self.spec.sync is GradSync.ALL
        by = reduces_by(how.transport, group.size, codec=self.spec.codec, over_replicas=again)
        bucket = BucketSpec(
            Kind.REDUCE, how.form, by, group.size, self._numels(), group.group_id, tuple(dims),
            reduce=str(self.spec), codec=self.spec.codec, copier=self._copier,
        )  # fmt: skip
        leaves_pieces = TRANSPORTS[bucket.transport].leaves_pieces
        self._pieces = group.size if leaves_pieces else 1
        self._first = bucket if again and by != "all_reduce" else None
        self._graphs_beside = 1 if self._first is None else 2
        one_by_one = bucket.coalesced and (grads[0].device.type == "cpu" or leaves_pieces)
        calls = [[parameter] for parameter in self._parameters] if one_by_one else [self._parameters]
        nbytes = [
            group.size * sent_nbytes(self.spec.codec, numel, parameter.reduce_dtype)
            for parameter, numel in zip(parameters, bucket.numels, strict=True)
        ]
        sizes = nbytes if one_by_one else [sum(nbytes)]
        if by == "all_reduce":
            announce("all_reduce", calls, sizes, group.replicas)
        else:
            announce("reduce", calls, sizes, group.size)
        assert not bucket.coalesced or self._first is None
        self._buckets = collectives.launch(grads, self._id_tensors(), bucket, group.group_names)
        self._places = _places(bucket)
        if in_parts and self.spec.sync is GradSync.ALL:
            self._sizes = [list(p.shard.shape) for p in parameters]
        if self.spec.adds_accumulated:  # the bucket has the pending gradients; the op does not clear fake tensors
            for parameter in parameters:
                parameter.grads.unsharded_accumulated_grad = None

    def launch_all_reduce(self, parameters: Sequence[ShardedParameter]) -> None:
        """Start the replicas' all-reduce of pending gradients that are reduced over the shards."""
        self._parameters, self.graph = list(parameters), 0
        self._sizes, self._group = [list(p.shard.shape) for p in parameters], parameters[0].group
        waiting = [p.grads.partial_reduce_output for p in parameters]
        self.spec = self.spec.of(*(partial.dtype for partial in waiting if partial is not None))
        dtype, device = getattr(torch, self.spec.dtype), parameters[0].device
        first = BucketSpec(
            Kind.REDUCE, FLAT, "reduce_scatter", self._group.size, self._numels(), self._group.group_id,
            reduce=str(self.spec),
        )  # fmt: skip
        self._reduce_again(torch.zeros(sum(first.numels), dtype=dtype, device=device), first)

    def advance(self) -> None:
        """Wait for the first reduction and launch the second one, if there is one still to be launched."""
        if self._first is not None:
            (bucket,) = self._buckets
            self._reduce_again(failures.wait(bucket), self._first)

    @outside_of_autocast
    def _reduce_again(self, bucket: Tensor, first: BucketSpec) -> None:
        group, in_parts = self._group, self.spec.within is not None
        assert group is not None
        spec = reduced_again(first, group.replicas if in_parts else 1, self._pieces)
        size = sum(first.numels) * getattr(torch, self.spec.dtype).itemsize
        announce("reduce" if in_parts else "all_reduce", [self._parameters], [size], group.replicas)
        self._buckets = collectives.launch([bucket], self._id_tensors(), spec, group.group_names)
        if self.spec.adds_accumulated:  # as in ``launch``
            for parameter in self._parameters:
                parameter.grads.partial_reduce_output = None
        self._places = _places(replace(spec, codec=""))
        leaves_pieces = TRANSPORTS[spec.transport].leaves_pieces
        self._pieces = spec.world if leaves_pieces else 1
        self._first, self._rank = None, group.group_names.rank_in_second

    def _numels(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self._sizes))

    def _id_tensors(self) -> list[Tensor]:
        return [parameter.id_tensor for parameter in self._parameters]

    @property
    def due(self) -> int:
        """The number of the graph at whose end the bucket is waited for."""
        return self.graph + self._graphs_beside

    @property
    def in_flight(self) -> bool:
        """Whether the bucket is launched and nobody has waited for it."""
        return bool(self._buckets) and not self._done

    @outside_of_autocast
    def shard(self, parameter: ShardedParameter, which: int = 0) -> Tensor:
        """Wait, and return the reduced gradient of one of the parameters, of the padded shard's shape.

        ``which``: the index among the parameter's gradients in this bucket, if it has several.
        """
        self.wait()
        index = [i for i, p in enumerate(self._parameters) if p is parameter][which]
        number, offset = self._places[index]
        bucket = self._buckets[number]
        dtype = None if self.spec.sync is GradSync.SHARDS_ONLY else parameter.dtypes.grad
        dtype = dtype or getattr(torch, self.spec.dtype)
        size = self._sizes[index]
        return collectives.unpack_reduce(bucket, offset, size, dtype, self.spec, self._pieces, self._rank)

    def shards(self) -> list[tuple[ShardedParameter, Tensor]]:
        """All reduced gradients, each with its parameter, in the order of the bucket."""
        return [(parameter, self.shard(parameter)) for parameter in self._parameters]

    def wait(self) -> None:
        """Wait for the collective, if it is in flight."""
        if self.in_flight:
            self.advance()
            self._done = True
            for bucket in self._buckets:
                failures.wait(bucket)


def _places(bucket: BucketSpec) -> list[tuple[int, int]]:
    return [(i * bucket.coalesced, place) for i, place in enumerate(collectives.offsets(bucket)[: len(bucket.numels)])]
