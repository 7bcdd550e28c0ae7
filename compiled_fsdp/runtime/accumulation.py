"""Pending gradients: kept on their parameter until a backward that communicates.

Without gradient sync a backward adds up full gradients (``accumulate_unreduced``), in the dtype of mixed precision or
``grad_dtype``. With replicas (HSDP) and ``set_requires_all_reduce(False)`` it adds up gradients that are reduced over
the shards (``accumulate_partial``), and with a working copy inside each node those that are reduced in the node.

The next backward that communicates adds both kinds to its buckets (``add_accumulated``, called by graphs too). At its
end, ``reduced`` reduces the pending gradients of parameters that it did not reach.
"""

# Why: docs/design/gradients.md, "Pending gradients"

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


def accumulate_unreduced(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add a full gradient to the parameter's pending one."""
    unit, grads = unit_of(parameter), parameter.grads
    unit.set_pending(True)
    if unit.policy.defer_to_finalize:
        unit.root.accumulation.left_to_finalize = True
    if grads.unsharded_accumulated_grad is None:
        # a copy, because the graph may reuse the gradient's memory
        dtype = grad.dtype if parameter.dtypes.grad is None else parameter.dtypes.reduced
        contiguous = torch.contiguous_format
        grads.unsharded_accumulated_grad = grad.to(dtype, copy=True, memory_format=contiguous)
    else:
        grads.unsharded_accumulated_grad.add_(grad)


def accumulate_partial(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add a gradient that is reduced over the shards to the one that is pending for the replicas' all-reduce."""
    unit_of(parameter).set_pending(True)
    grads = parameter.grads
    if grads.partial_reduce_output is None:
        grads.partial_reduce_output = grad.clone()
    elif grads.partial_reduce_output.dtype == grad.dtype:
        grads.partial_reduce_output.add_(grad)
    else:  # with ``grad_dtype=None`` dtypes may differ: the sum has the wider one
        grads.partial_reduce_output = grads.partial_reduce_output + grad


@torch.no_grad()
def add_to_partial(parameter: ShardedParameter, grad: Tensor) -> Tensor:
    """Return the shard's reduced gradient plus the partial gradient that is pending, if there are no replicas.

    Then no all-reduce follows to whose bucket the pending gradient could be added.
    """
    grads = parameter.grads
    assert grads.partial_reduce_output is not None
    total = grads.partial_reduce_output.div_(grads.spec.after).add_(grad)
    grads.partial_reduce_output = None
    return total.to(grad.dtype)


def add_accumulated(
    parameters: Sequence[ShardedParameter], bucket: Tensor, numels: Sequence[int], partial: bool
) -> None:
    """Add the parameters' pending gradients to a packed bucket in place, and clear them.

    Args:
        parameters: the parameters whose gradients are in the bucket, in its order.
        bucket: full gradients, ``[world, sum of numels]``; with ``partial`` gradients that are reduced over the shards,
            ``[sum of numels]``.
        numels: the number of elements of each parameter's padded shard.
        partial: whether the bucket is reduced over the shards already.
    """
    offset = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        grads = parameter.grads
        if partial and grads.partial_reduce_output is not None:
            bucket[offset : offset + numel].add_(grads.partial_reduce_output.reshape(-1))
            grads.partial_reduce_output = None
        elif not partial and grads.unsharded_accumulated_grad is not None:
            full, world, dim = grads.unsharded_accumulated_grad, len(bucket), parameter.dim
            if world != parameter.world:
                full, dim = collectives.by_parts(full, parameter.world, world, dim), 0
            by_rank = collectives.by_rank(full, numel, world, dim)
            part = bucket[:, offset : offset + numel]
            if parameter.reduce_dtype == parameter.dtypes.reduced:
                part.add_(by_rank)
            else:  # the unit reduces in a wider dtype for other parameters; this one's gradients are added in its own
                part.copy_(part.to(by_rank.dtype).add_(by_rank))
            grads.unsharded_accumulated_grad = None
        offset += numel


def residuals_of(parameters: Sequence[ShardedParameter], grads: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Return each parameter's residual: the part of earlier gradients that the codec lost (error feedback).

    A residual is float32, ``[ranks, elements of the shard]``, on its gradient's device, and zero at first.
    """
    found = []
    for parameter, grad in zip(parameters, grads, strict=True):
        shape, residual = (ranks, grad.numel() // ranks), parameter.grads.residual
        if residual is None or residual.shape != shape or residual.device != grad.device:
            residual = parameter.grads.residual = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        found.append(residual)
    return found


def forget_accumulated(units: Iterable[Unit]) -> None:
    """Drop the pending gradients of these units."""
    for unit in units:
        for parameter in unit.parameters:
            grads = parameter.grads
            grads.unsharded_accumulated_grad = grads.partial_reduce_output = None
        unit.set_pending(False)
        unit.accumulation.finalization, unit.accumulation.left_to_finalize = None, False


def reduced(units: Iterable[Unit]) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """Reduce all pending gradients, and yield each parameter with its shard's reduced gradient.

    A collective call, in registration order: on every rank the same parameters must have pending gradients. One bucket
    is in flight while the next one is packed.
    """
    before: PendingReduceScatter | None = None
    units = list(units)
    for unit in units:
        for members in unit.params_by_bucket().values():
            alike: dict[tuple[int, ReduceSpec], list[ShardedParameter]] = {}
            for p in members:
                full, partial = p.grads.unsharded_accumulated_grad, p.grads.partial_reduce_output
                within = 0 if partial is None else p.ranks_of_partial
                if full is not None or within == p.world:
                    alike.setdefault((0 if full is not None else within, p.grads.spec), []).append(p)
                if 0 < within < p.world:
                    alike.setdefault((within, p.grads.spec), []).append(p)
            for (within, spec), parameters in alike.items():
                pending = _launch(parameters, spec, within)
                if before is not None:
                    yield from before.shards()
                before = pending
    if before is not None:
        yield from before.shards()
    for unit in units:
        unit.set_pending(False)


def _launch(parameters: list[ShardedParameter], spec: ReduceSpec, within: int) -> PendingReduceScatter:
    """Reduce full gradients, or gradients that ``within`` ranks have reduced already, if that is not 0."""
    group = parameters[0].group
    if 0 < within < group.size:
        divide = None if spec.divide is None else (1.0, spec.divide[1])
        pending, partials = PendingReduceScatter(replace(spec, divide=divide, adds_accumulated=False)), []
        for parameter in parameters:
            assert parameter.grads.partial_reduce_output is not None
            partials.append(parameter.grads.partial_reduce_output)
            parameter.grads.partial_reduce_output = None
        pending.launch(parameters, partials, group=group.across_parts(within))
        return pending
    pending = PendingReduceScatter(spec)
    if within:
        pending.launch_all_reduce(parameters)
        return pending
    grads = []
    for parameter in parameters:
        assert parameter.grads.unsharded_accumulated_grad is not None
        grads.append(parameter.grads.unsharded_accumulated_grad)
        parameter.grads.unsharded_accumulated_grad = None
    pending.launch(parameters, grads)
    return pending
