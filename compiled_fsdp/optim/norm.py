"""The norm of gradients over all ranks, from this rank's parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from compiled_fsdp.compat.optim import foreach_norm
from compiled_fsdp.optim.local import local


@torch.no_grad()
def norm_of_gradients(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector: that of ``torch.nn.utils.clip_grad_norm_``, with its bits.

    DTensors may be on several meshes, for example with tensor parallelism in a part of the model. Each mesh dimension
    over which gradients are sharded has one all-reduce, of an element for each gradient.

    Args:
        grads: DTensors, or tensors that are equal on all ranks.
        norm_type: the p of the p-norm; ``math.inf`` for the largest absolute value.

    Returns: a tensor of shape [] with the dtype of the gradients; 0 if there are none.
    """
    whole = [
        _of_whole_gradients(torch.stack(foreach_norm(parts, norm_type)), layout, norm_type)
        for layout, parts in _by_layout(grads).items()
    ]
    if not whole:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.cat([norm.to(whole[0].device) for norm in whole]), norm_type)


def _by_layout(grads: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """This rank's parts by mesh and placements; None for tensors that are no DTensors."""
    found = defaultdict[Any, list[Tensor]](list)
    for grad in grads:
        layout, part = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None, local(grad)
        # of no elements torch computes no norm of infinite order
        found[layout].append(part if part.numel() else part.new_zeros(1))
    return found


def _of_whole_gradients(norms: Tensor, layout: Any, norm_type: float) -> Tensor:
    """The norms of gradients, of which ``norms`` has those of this rank's parts."""
    if layout is None:
        return norms
    mesh, placements = layout
    largest = math.isinf(norm_type)
    how = [Partial("max" if largest else "sum") if place.is_shard() else Replicate() for place in placements]
    powers = DTensor.from_local(norms if largest else norms**norm_type, mesh, how, run_check=False).full_tensor()
    return powers if largest else powers ** (1.0 / norm_type)
