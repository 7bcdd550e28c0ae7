"""The way to read a parameter in a graph, decided by one function call while Dynamo traces.

Traced step by step, a read takes about 200 of Dynamo's steps, most of them to find that nothing about it is special. So
a function of compiled_fsdp finds that out, with guards on the state that it reads. Special reads are traced step by
step.
"""

# Why: docs/design/reads.md, "A traced read is one op and one text"

from __future__ import annotations

from typing import Any

from torch import nn

from compiled_fsdp.compat.tracing import TracedObject
from compiled_fsdp.frontend.called_alone import traced_alone
from compiled_fsdp.frontend.in_checkpoints import traced_in_checkpoint
from compiled_fsdp.frontend.read import ParameterReads
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.state.parameter import READ
from compiled_fsdp.state.unit import ShardState

STEP_BY_STEP = -1
"""The read is traced step by step, because something about it is special, or because Dynamo is not tracing."""
NOTHING_THERE = -2
"""The module stores None under that name. For example, the ``bias`` of a Linear without bias."""
CALLED_ALONE = -3
"""The unit is closed, and a forward reads one of its parameters: a part of the unit was called by itself."""
TRAINS, KEEPS, APART, REGATHERS = 1, 2, 4, 8
"""Flags; any other way to read is a sum of them.

TRAINS: the parameter requires a gradient. KEEPS: the full parameter stays from forward to backward. APART: the read
takes the shard as a tensor of its own, beside the gate or without one. REGATHERS is multiplied by the number of ranks
that gather the parameter again in backward (0: all of them).
"""


def way_to_read(module: nn.Module, name: str) -> int:
    """Decide how Dynamo, which is tracing a read of ``module``'s parameter ``name``, has to read it.

    Returns: a negative constant of this module, or a sum of flags.
    """
    stored: Any = module._parameters
    place = TracedObject.of(module)
    if not isinstance(stored, ParameterReads) or place is None or place.has_written("_parameters"):
        return STEP_BY_STEP
    parameter = stored.sharded.get(name)
    if name in stored and dict.get(stored, name) is None:
        place.holds_nothing("_parameters", name)
        return NOTHING_THERE
    if parameter is None or parameter.wrapped or parameter.shard.is_meta:
        return STEP_BY_STEP
    place.contains("_parameters.sharded", name)
    unit = place.item(stored.units[name], "_parameters.units", name)
    switches = unit.values(
        "depth", "retain_across_microbatches", "keep_for_backward", "post_forward_world_size", "code_version"
    )
    # code that runs twice gathers even if the unit is unsharded
    twice = traced_in_checkpoint()
    full = (None, None, None) if twice else unit.values("unsharded_params", "zero_grad_params", "state")
    traced = place.attribute(parameter, READ.format(name))
    own = traced.values("tensor_parallel", "param.requires_grad")
    if switches is None or full is None or own is None:
        return STEP_BY_STEP
    if traced.has_changed("active_gate") or traced.has_changed("read_text"):
        return STEP_BY_STEP
    depth, retains, keeps, ranks, _ = switches
    unsharded, zero_grads, state = full
    tensor_parallel, trains = own
    plain = unsharded is None and zero_grads is None and state is not ShardState.RETAINED and not retains
    is_open = depth > 0 or stored.units[name].is_open_in_body()
    if not (is_open or twice or recomputes()) and traced_alone(module, stored.units[name]):
        return CALLED_ALONE
    if not is_open or not plain or tensor_parallel:
        return STEP_BY_STEP
    apart = not (trains and parameter.shard_is_gate())
    return TRAINS * trains + KEEPS * keeps + APART * apart + REGATHERS * ranks
