"""Call the ops with the values of a parameter and its unit, in the order of the ops' arguments."""

# Why: docs/design/reads.md, "Graphs name no ranks and no layers"

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_fsdp.compat.autograd import outside_of_transforms
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.ops import autograd, schema
from compiled_fsdp.ops.autograd import Attach
from compiled_fsdp.ranks.same_models import check_same_model
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.pieces import PiecesInFlight
from compiled_fsdp.state.parameter import ShardedParameter


def gate_of(parameter: ShardedParameter) -> Tensor | None:
    """The gate that the parameter's gradient flows to; None if the DTensor requires no gradient now."""
    return parameter.active_gate if trains_now(parameter) else None


def trains_now(parameter: ShardedParameter) -> bool:
    """Whether the DTensor requires a gradient now."""
    trains = parameter.trains_in_graph() if torch.compiler.is_compiling() else None
    return parameter.param.requires_grad if trains is None else trains


def unshard(parameter: ShardedParameter, keep: bool, post_forward_world_size: int) -> Tensor:
    """Gather the full parameter, of shape ``parameter.layout.size``.

    Args:
        parameter: the parameter to gather.
        keep: whether the full parameter stays from forward to backward.
        post_forward_world_size: if it does not stay, the number of ranks that gather it in backward (0: all).
    """
    trains = trains_now(parameter)
    gate = parameter.active_gate if trains else None  # not used yet: Dynamo orders a graph's inputs by their first use
    # The shard comes before the gate, as in the read of ``frontend/parametrize.py``. A checkpoint identifies saved
    # tensors by their order, and shard and gate look alike in a group of one rank.
    return schema.read(
        gate if trains and parameter.shard_is_gate() else parameter.shard, gate, parameter.block_ids,
        parameter.read_text, keep, post_forward_world_size,
    )  # fmt: skip


def attach(parameter: ShardedParameter, full: Tensor) -> Tensor:
    """Read a parameter that is full already, for example after ``unshard()``, in a graph: ``full`` with a gate."""
    return autograd.attach(full, gate_of(parameter), parameter.id_tensor, parameter.read_text)


def gather_retained(parameter: ShardedParameter, ranks: int, keep: bool) -> Tensor:
    """Gather a parameter in a graph from the parts that ``ranks`` neighbours have retained, without a gradient.

    ``keep``: as for ``unshard``.
    """
    assert parameter.retained is not None
    return schema.read(parameter.retained, None, parameter.block_ids, parameter.part_text(ranks), keep, 0)


@never_compiled
def attach_eagerly(parameter: ShardedParameter, full: Tensor) -> Tensor:
    """The same as ``attach`` in eager code."""
    with outside_of_transforms():  # code inside and outside of torch.func's transforms shares the read
        return Attach.apply(full, gate_of(parameter), parameter.id_tensor, parameter.read_text)


def gather_full(parameters: Sequence[ShardedParameter]) -> list[Tensor]:
    """Gather the full parameters of one bucket outside of a graph: a collective call."""
    first = parameters[0]
    if first.wrapped:
        with torch.inference_mode(False):
            check_same_model(first)
            RUNTIME.reducer.close_failed()
            return PiecesInFlight(parameters).fulls()
    with torch.no_grad(), torch.inference_mode(False):  # autograd may save the full parameters
        return schema.gather_full(
            [p.shard for p in parameters], [p.id_tensor for p in parameters], [p.read_text for p in parameters]
        )
