"""Whether code that is traced belongs to a checkpoint: what is read there, and what may be left behind."""

# Why: docs/design.md, note N11

from __future__ import annotations

import torch

from compiled_fsdp.compat.autograd import in_checkpoint
from compiled_fsdp.compat.tracing import guard_on_result
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.state.registry import running_units
from compiled_fsdp.state.unit import ShardState, Unit


def runs_twice() -> bool:
    """While Dynamo traces: whether an uncompiled checkpoint runs the code, which has to save the same both times.

    So it gathers both times, whatever of the unit is full, and looks at nothing that may be otherwise in backward.
    """
    return torch.compiler.is_dynamo_compiling() and traced_in_checkpoint()


@torch.compiler.assume_constant_result
def traced_in_checkpoint() -> bool:
    """The same; our own code that runs while Dynamo traces may ask, too.

    Code that is called in the middle of a forward is guarded on it, because one rank alone may checkpoint a layer.
    """
    guard_on_result(in_checkpoint, _is_called_in_a_forward)
    return in_checkpoint()


def _is_called_in_a_forward() -> bool:
    return recomputes() or bool(running_units())


def reshard_unseen(unit: Unit) -> None:
    """``unit.reshard()`` for code that runs twice: Dynamo guards on what it looks at, not on where it writes."""
    unit.unsharded_params = unit.unsharding = None
    unit.drop_retained()
    unit.state = ShardState.SHARDED
