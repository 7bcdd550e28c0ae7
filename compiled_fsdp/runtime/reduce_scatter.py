"""A bucket of reductions outside of graphs, in flight until somebody asks for its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.comm import collectives, traffic
from compiled_fsdp.comm.reduction import ALL, SCATTER, Reduction

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter

NOT_LAUNCHED = 1 << 62
"""Above the number of any graph."""


class Left:
    """Reductions of one group, dtype and kind (``how``): in flight once ``launch`` was called."""

    def __init__(self, how: Reduction) -> None:
        self.how = how
        self.graph = NOT_LAUNCHED
        self._parameters: list[ShardedParameter] = []
        self._bucket: Tensor | None = None
        self._parts = 1
        self._to_cross = False
        self._done = False

    def launch(
        self, parameters: Sequence[ShardedParameter], grads: Sequence[Tensor], graph: int = 0, exchange: bool = False
    ) -> None:
        """Start reducing full gradients; ``graph`` is the number of the graph that they are of."""
        self._parameters, self.graph = list(parameters), graph
        group = parameters[0].group
        self._parts = group.size if exchange else 1
        self._to_cross = group.replicas > 1 and self.how.sync == ALL
        numels, dims = [p.shard.numel() for p in parameters], [p.dim for p in parameters]
        slots = [p.slot for p in parameters]
        size = group.size * sum(numels) * getattr(torch, self.how.dtype).itemsize
        traffic.reduced(len(numels), size, group.size, group.replicas if self._to_cross else 1)
        self._bucket = collectives.launch_reduce(
            grads, numels, dims, group.size, group.reduce_name, self.how, slots, exchange
        )

    def launch_across(self, parameters: Sequence[ShardedParameter]) -> None:
        """Start reducing over the replicas what is reduced over the shards, and waits."""
        self._parameters, self.graph = list(parameters), 0
        shape = sum(p.shard.numel() for p in parameters)
        dtype, device = getattr(torch, self.how.dtype), parameters[0].device
        traffic.crossed(len(parameters), shape * dtype.itemsize, parameters[0].group.replicas)
        self._cross(torch.zeros(shape, dtype=dtype, device=device))

    def advance(self) -> None:
        """On with the reduction over replicas, if there is one: the first half has had time."""
        if self._to_cross:
            assert self._bucket is not None
            self._cross(collectives.wait(self._bucket))

    def _cross(self, bucket: Tensor) -> None:
        group, slots = self._parameters[0].group, [p.slot for p in self._parameters]
        numels = [p.shard.numel() for p in self._parameters]
        self._bucket = collectives.launch_all_reduce(
            bucket, group.across, self.how, slots, numels, self._parts, group.rank
        )
        self._to_cross, self._parts = False, 1

    @property
    def in_flight(self) -> bool:
        return self._bucket is not None and not self._done

    def shard(self, offset: int, parameter: ShardedParameter) -> Tensor:
        """One reduced gradient of the padded shard's shape, once the collective is done."""
        self.wait()
        assert self._bucket is not None
        dtype, device = parameter.shard.dtype, parameter.shard.device
        if self.how.sync == SCATTER:
            dtype, device = getattr(torch, self.how.dtype), self._bucket.device
        size, rank = tuple(parameter.shard.shape), parameter.group.rank
        return collectives.unpack_reduce(self._bucket, offset, size, dtype, self.how, self._parts, rank, device)

    def shards(self) -> list[Tensor]:
        """All of them, in the order of the bucket."""
        out, offset = [], 0
        for parameter in self._parameters:
            out.append(self.shard(offset, parameter))
            offset += parameter.shard.numel()
        return out

    def wait(self) -> None:
        if self.in_flight:
            self.advance()
            assert self._bucket is not None
            self._done = True
            collectives.wait(self._bucket)
