"""Calls of the ops with what a parameter and its unit say: nobody else puts their arguments in order."""

# Why: docs/design.md, note N4

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
    """What the gradient flows to, if the DTensor requires one now."""
    return parameter.active_gate if trains_now(parameter) else None


def trains_now(parameter: ShardedParameter) -> bool:
    """Whether the DTensor requires a gradient now."""
    trains = parameter.trains_in_graph() if torch.compiler.is_compiling() else None
    return parameter.param.requires_grad if trains is None else trains


def unshard(parameter: ShardedParameter, keep: bool, post_forward_world_size: int) -> Tensor:
    """The full parameter of its ``size``, gathered; ``keep``: it stays from forward to backward."""
    trains = trains_now(parameter)
    gate = parameter.active_gate if trains else None  # not looked at: Dynamo has inputs in the order of first looks
    # Shard, gate, as a read that is found at once has them. A checkpoint tells what is saved by its order, and both
    # look alike in a group of one.
    return schema.read(
        gate if trains and parameter.shard_is_gate() else parameter.shard, gate, parameter.block_ids,
        parameter.read_text, keep, post_forward_world_size,
    )  # fmt: skip


def attach(parameter: ShardedParameter, full: Tensor) -> Tensor:
    """The same of a parameter that is full already; in a graph."""
    return autograd.attach(full, gate_of(parameter), parameter.id_tensor, parameter.read_text)


@never_compiled
def attach_eagerly(parameter: ShardedParameter, full: Tensor) -> Tensor:
    """The same in eager code."""
    with outside_of_transforms():  # transformed code and other code share a read
        return Attach.apply(full, gate_of(parameter), parameter.id_tensor, parameter.read_text)


def gather_full(parameters: Sequence[ShardedParameter]) -> list[Tensor]:
    """The full parameters of one bucket, outside of a graph: a collective call."""
    first = parameters[0]
    if first.wrapped:
        with torch.inference_mode(False):
            check_same_model(first)
            RUNTIME.reducer.close_failed()
            return PiecesInFlight(parameters).fulls()
    with torch.no_grad(), torch.inference_mode(False):  # autograd may save them
        return schema.gather_full(
            [p.shard for p in parameters], [p.id_tensor for p in parameters], [p.read_text for p in parameters]
        )
