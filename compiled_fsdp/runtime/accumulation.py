"""Gradients that wait on their parameter: for a backward that communicates.

Without gradient sync a backward adds its full gradients up (``accumulate``), in the dtype in which they are to be reduced. With
replicas (HSDP) and without ``set_requires_all_reduce`` it adds up what was reduced over the shards. Both are added to the
bucket of the next backward that goes on (``add_waiting``, called by graphs too). What that backward does not reach is reduced at
its end, by ``reduce_accumulated``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.comm import collectives
from compiled_fsdp.comm.reduction import Reduction
from compiled_fsdp.runtime.prefetcher import BOUNDARY
from compiled_fsdp.runtime.reduce_scatter import Left

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter
    from compiled_fsdp.state.unit import Unit


def accumulate(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add a full gradient to what waits."""
    parameter.unit.set_waits(True)
    if parameter.waiting is None:
        # a copy: the graph may use its memory again
        parameter.waiting = grad.to(parameter.reduce_dtype, copy=True, memory_format=torch.contiguous_format)
    else:
        parameter.waiting.add_(grad)


def accumulate_scattered(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add the shard's gradient, reduced over the shards, to what waits for the replicas."""
    parameter.unit.set_waits(True)
    if parameter.scattered is None:
        parameter.scattered = grad.to(parameter.reduce_dtype, copy=True)
    else:
        parameter.scattered.add_(grad)


def add_waiting(parameters: Sequence[ShardedParameter], bucket: Tensor, numels: Sequence[int], scattered: bool) -> None:
    """Add what waits to a packed bucket: of full gradients, ``[world, sum of numels]``, or of scattered ones, ``[sum of numels]``."""
    offset = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        if scattered and parameter.scattered is not None:
            bucket[offset : offset + numel].add_(parameter.scattered.reshape(-1))
            parameter.scattered = None
        elif not scattered and parameter.waiting is not None:
            waiting = collectives.by_rank(parameter.waiting, numel, parameter.world, parameter.dim)
            bucket[:, offset : offset + numel].add_(waiting)
            parameter.waiting = None
        offset += numel


def drop(units: Iterable[Unit]) -> None:
    """Forget what waits."""
    for unit in units:
        for parameter in unit.parameters:
            parameter.waiting = parameter.scattered = None
        unit.set_waits(False)


def reduce_accumulated(units: Iterable[Unit]) -> None:
    """Reduce and publish what waits on the parameters of ``units``, in registration order: a collective call.

    Every rank must call it with units whose same parameters wait. Reductions go bucket by bucket, as in eager code, one in flight
    while the next is packed. It is what the end of a backward calls for what that backward has not reached, and pipeline schedules
    after the last one.
    """
    published = []
    for parameter, grad in reduced(units):
        parameter.publish(grad, owned=True)
        published.append(parameter)
    tell(published)


def tell(published: Sequence[ShardedParameter]) -> None:
    """Call the grouped hooks of these parameters' units, each once with all of its parameters."""
    hooks = dict.fromkeys(hook for parameter in published for hook in parameter.unit.post_backward_hooks.values())
    for hook in hooks:
        params = [p.param for p in published if hook in p.unit.post_backward_hooks.values()]
        BOUNDARY.drop(params)  # it may update them
        hook(params)


def reduced(units: Iterable[Unit]) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """The parameters on which something waits, each with the shard's reduced gradient; then nothing waits any more."""
    pending: tuple[list[ShardedParameter], Left] | None = None
    units = list(units)
    for unit in units:
        for members in unit.gathered_together().values():
            by_kind: dict[tuple[bool, Reduction], list[ShardedParameter]] = {}
            for p in members:
                if p.waiting is not None or p.scattered is not None:
                    by_kind.setdefault((p.waiting is None, p.how), []).append(p)
            for (across, how), some in by_kind.items():
                left = _launch(some, how, across)
                if pending is not None:
                    yield from zip(pending[0], pending[1].shards(), strict=True)
                pending = some, left
    if pending is not None:
        yield from zip(pending[0], pending[1].shards(), strict=True)
    for unit in units:
        unit.set_waits(False)


def _launch(parameters: list[ShardedParameter], how: Reduction, across: bool) -> Left:
    left = Left(how)
    if across:
        left.launch_across(parameters)
        return left
    grads = []
    for parameter in parameters:
        assert parameter.waiting is not None
        grads.append(parameter.waiting)
        parameter.waiting = None
    left.launch(parameters, grads)
    return left
