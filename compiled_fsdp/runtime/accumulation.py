"""Gradients that wait on their parameter: for a backward that communicates.

Without gradient sync a backward adds its full gradients up (``accumulate_unreduced``), in the dtype that mixed
precision or ``grad_dtype`` says. With replicas (HSDP) and without ``set_requires_all_reduce`` it adds up what was
reduced over the shards.
Both are added to the bucket of the next backward that communicates (``add_accumulated``, called by graphs too). What
that backward does not reach is reduced at its end, by ``reduced``.
"""

# Why: docs/design.md, note N10

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


def accumulate_unreduced(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add a full gradient to what waits."""
    unit, grads = unit_of(parameter), parameter.grads
    unit.set_pending(True)
    if unit.policy.defer_to_finalize:
        unit.root.accumulation.left_to_finalize = True
    if grads.unsharded_accumulated_grad is None:
        # a copy: the graph may use its memory again
        dtype = grad.dtype if parameter.dtypes.grad is None else parameter.dtypes.reduced
        contiguous = torch.contiguous_format
        grads.unsharded_accumulated_grad = grad.to(dtype, copy=True, memory_format=contiguous)
    else:
        grads.unsharded_accumulated_grad.add_(grad)


def accumulate_partial(parameter: ShardedParameter, grad: Tensor) -> None:
    """Add the shard's gradient, reduced over the shards, to what waits for the replicas."""
    unit_of(parameter).set_pending(True)
    grads = parameter.grads
    if grads.partial_reduce_output is None:
        grads.partial_reduce_output = grad.clone()
    elif grads.partial_reduce_output.dtype == grad.dtype:
        grads.partial_reduce_output.add_(grad)
    else:  # ``grad_dtype=None``: that of the wider one
        grads.partial_reduce_output = grads.partial_reduce_output + grad


@torch.no_grad()
def add_to_partial(parameter: ShardedParameter, grad: Tensor) -> Tensor:
    """The shard's reduced gradient with what waits for the replicas, where this rank is the only one.

    No all-reduce follows, to whose bucket it would be added.
    """
    grads = parameter.grads
    assert grads.partial_reduce_output is not None
    total = grads.partial_reduce_output.div_(grads.spec.after).add_(grad)
    grads.partial_reduce_output = None
    return total.to(grad.dtype)


def add_accumulated(
    parameters: Sequence[ShardedParameter], bucket: Tensor, numels: Sequence[int], partial: bool
) -> None:
    """Add what waits to a packed bucket, in place, and let it wait no more.

    Args:
        parameters: whose gradients are in the bucket, in its order.
        bucket: of full gradients, ``[world, sum of numels]``; with ``partial`` of what is reduced over the shards,
            ``[sum of numels]``.
        numels: elements of the parameters' padded shards.
        partial: whether the bucket is reduced over the shards already.
    """
    offset = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        grads = parameter.grads
        if partial and grads.partial_reduce_output is not None:
            bucket[offset : offset + numel].add_(grads.partial_reduce_output.reshape(-1))
            grads.partial_reduce_output = None
        elif not partial and grads.unsharded_accumulated_grad is not None:
            by_rank = collectives.by_rank(grads.unsharded_accumulated_grad, numel, parameter.world, parameter.dim)
            part = bucket[:, offset : offset + numel]
            if parameter.reduce_dtype == parameter.dtypes.reduced:
                part.add_(by_rank)
            else:  # a wider one, for the sake of others in its unit: its own gradients are added up in its own
                part.copy_(part.to(by_rank.dtype).add_(by_rank))
            grads.unsharded_accumulated_grad = None
        offset += numel


def residuals_of(parameters: Sequence[ShardedParameter], grads: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """What earlier reductions did not carry of the parameters' gradients, each ``[ranks, elements of the shard]``.

    It is float32, and on the gradients' device; zeros at first.
    """
    found = []
    for parameter, grad in zip(parameters, grads, strict=True):
        shape, residual = (ranks, grad.numel() // ranks), parameter.grads.residual
        if residual is None or residual.shape != shape or residual.device != grad.device:
            residual = parameter.grads.residual = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        found.append(residual)
    return found


def forget_accumulated(units: Iterable[Unit]) -> None:
    """Drop the gradients of these units that wait."""
    for unit in units:
        for parameter in unit.parameters:
            grads = parameter.grads
            grads.unsharded_accumulated_grad = grads.partial_reduce_output = None
        unit.set_pending(False)
        unit.accumulation.finalization, unit.accumulation.left_to_finalize = None, False


def reduced(units: Iterable[Unit]) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """The parameters with gradients that wait, each with the shard's reduced gradient; then nothing waits any more.

    A collective call, in registration order: every rank must call it with units whose same parameters wait. Reductions
    go bucket by bucket, one in flight while the next is packed.
    """
    before: PendingReduceScatter | None = None
    units = list(units)
    for unit in units:
        for members in unit.params_by_bucket().values():
            alike: dict[tuple[bool, ReduceSpec], list[ShardedParameter]] = {}
            for p in members:
                if p.grads.waits:
                    alike.setdefault((p.grads.unsharded_accumulated_grad is None, p.grads.spec), []).append(p)
            for (partial, spec), parameters in alike.items():
                pending = _launch(parameters, spec, partial)
                if before is not None:
                    yield from before.shards()
                before = pending
    if before is not None:
        yield from before.shards()
    for unit in units:
        unit.set_pending(False)


def _launch(parameters: list[ShardedParameter], spec: ReduceSpec, partial: bool) -> PendingReduceScatter:
    pending = PendingReduceScatter(spec)
    if partial:
        pending.launch_all_reduce(parameters)
        return pending
    grads = []
    for parameter in parameters:
        assert parameter.grads.unsharded_accumulated_grad is not None
        grads.append(parameter.grads.unsharded_accumulated_grad)
        parameter.grads.unsharded_accumulated_grad = None
    pending.launch(parameters, grads)
    return pending
