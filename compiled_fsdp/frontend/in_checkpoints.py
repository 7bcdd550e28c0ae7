"""Traced code inside of an uncompiled activation checkpoint: how to detect it, and how to reshard there."""

# Why: docs/design/reads.md, "Kept full parameters are outputs of the graph"

from __future__ import annotations

import torch

from compiled_fsdp.compat.autograd import in_checkpoint
from compiled_fsdp.compat.tracing import guard_on_result
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.state.registry import running_units
from compiled_fsdp.state.unit import ShardState, Unit


def runs_twice() -> bool:
    """While Dynamo traces: whether an uncompiled checkpoint runs the code, in forward and again in backward.

    Both runs must save the same tensors. So the code gathers in both, even if the unit is unsharded, and reads no state
    that may be different in backward.
    """
    return torch.compiler.is_dynamo_compiling() and traced_in_checkpoint()


@torch.compiler.assume_constant_result
def traced_in_checkpoint() -> bool:
    """``runs_twice`` for functions of compiled_fsdp that run while Dynamo traces.

    Code that is called in the middle of a forward gets a guard on the answer, because one rank alone may checkpoint a
    layer.
    """
    guard_on_result(in_checkpoint, _is_called_in_a_forward)
    return in_checkpoint()


def _is_called_in_a_forward() -> bool:
    return recomputes() or bool(running_units())


def reshard_unseen(unit: Unit) -> None:
    """``unit.reshard()`` for code that runs twice: it does not look at the state, because Dynamo would guard on it."""
    unit.unsharded_params = unit.unsharding = None
    unit.drop_retained()
    unit.state = ShardState.SHARDED
