"""Gates: one permanent autograd node per parameter, outside of every graph, that brings its gradient to ``.grad``.

A gate is an ordinary input of any graph that reads the parameter. The backward of ``unshard`` returns the reduced
gradient to it, and autograd's engine sums the gradients of all reads. Then the gate's backward runs once, and does what
AccumulateGrad does for a leaf: it adds to ``.grad`` of the DTensor and runs its post-accumulate-grad hooks. A gate
saves no tensor, so it serves every backward.

A gate has the memory and the version counter of the shard, so that graphs take one tensor for both. It has its own
memory if the shard is offloaded, if the local tensor has all-gather extensions, if the group has one rank (the shard
may be the full parameter), or if the gradient has another dtype (``grad_dtype``). Then the gate is a single zero,
expanded to the shard's shape, on the device that computes: the engine has a thread for each device, and the gates of
one backward must run one after the other. It is not a view, because inputs of a nested region may not share memory.

The node is that of an ``expand_copy``, with a prehook that takes the gradient. A ``torch.autograd.Function`` would
serve ordinary backwards, but compiled autograd refuses to capture such a node after it has run once ("backward through
the graph a second time").

The expanded tensor is the anchor: one leaf for each device, and casts of it. Under compiled autograd each gate sends a
zero to the anchor, so the anchor's hook runs when all gates of the backward have run.

A parameter that may have pending gradients (``accumulation.py``) has two more gates: a scalar one for full gradients
that were added to the pending one, and one for gradients that are pending for the replicas' all-reduce.
"""

# Why: docs/design/gradients.md, "Gates bring gradients to .grad"

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from compiled_fsdp.buckets.effects import accumulate_grad, end_backward
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.compat.autograd import (
    backward_id,
    local_of,
    running_node,
    sequence_number,
    set_local,
    set_sequence_number,
)
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs, in_compiled_autograd
from compiled_fsdp.compat.dynamo import compiling_is_on, mark_static
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.runtime.accumulate_grad import hooks_run, references_of_sole_owner
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import Unit

# For the dtype _LEAF the leaf, for other dtypes casts of it. The leaf gets no gradient, because gates return None.
_anchors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_LEAF = torch.float32

# The engine runs the ready node with the highest sequence number first. AccumulateGrad nodes have the highest possible
# number, so they run as soon as their gradient is complete. Gates come next. If several gates are ready, the parameter
# that was sharded last comes first, as it does if their gradients become complete one by one.
_AS_SOON_AS_COMPLETE = 2**62


@dataclass(frozen=True)
class _GateHook:
    """The prehook of a gate's node, which takes the gradient.

    It holds the parameter's number, because a reference from the node to the parameter would keep both alive for ever.
    """

    param_id: int
    sync: GradSync

    def __call__(self, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None]:
        if in_compiled_autograd():  # nothing removes the op from its graph, because the anchor depends on its result
            return (accumulate_grad(self.param_id, grads[0], self.sync.value),)
        reducer = RUNTIME.reducer
        # only if compilation is on: turning it off takes as long as half of the rest
        complete = reducer.gradient_never_compiled if compiling_is_on() else reducer.gradient
        complete(self.param_id, grads, self.sync)
        return (None,)


def _all_gates_have_run(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The anchor's hook. ``grad`` is None in a backward that the engine runs, where a callback marks the end."""
    return None if grad is None else end_backward(grad)


def give_gate(parameter: ShardedParameter, unit: Unit) -> None:
    """Make the gate of a parameter whose shard is new, and mark its tensors' shapes as static.

    Without the mark Dynamo would make them symbolic as soon as it sees a layer of another width.
    """
    _make_gate(parameter)
    parameter.active_gate = parameter.grads.gate_for(parameter.sync_for(unit.accumulation.sync))
    parameter.show()
    local = local_of(parameter.param)
    parts = parameter.held_tensors() if parameter.wrapped else [local]
    for tensor in (parameter.param, *parts, parameter.shard):
        mark_static(tensor)


def _make_gate(parameter: ShardedParameter) -> None:
    """Give a parameter a gate that fits its shard, and new gates for pending gradients if it has such gates."""
    grads, shard = parameter.grads, parameter.shard
    grads.gate = _new_gate(parameter, shard.shape, parameter.gate_dtype) if parameter.may_train else None
    if grads.gate is not None and parameter.gate_has_shard:
        grads.gate.data = shard
        # made from the gate, so that the version counter of all three shows a write to any of them
        parameter.shard = grads.gate.detach()
        set_local(parameter.param, parameter.valid_rows())
    if grads.unreduced_gate is not None:
        make_accumulation_gates([parameter])
    if grads.gate is not None:
        mark_static(grads.gate)


def make_accumulation_gates(parameters: Iterable[ShardedParameter]) -> None:
    """Give parameters the gates for pending gradients."""
    for parameter in parameters:
        if not parameter.may_train:
            continue
        grads, shape = parameter.grads, torch.Size(parameter.partial_shape)
        grads.unreduced_gate = _new_gate(parameter, torch.Size(()), torch.float32, GradSync.NONE)
        grads.partial_gate = _new_gate(parameter, shape, parameter.reduce_dtype, GradSync.SHARDS_ONLY)
        mark_static(grads.partial_gate)


def _new_gate(
    parameter: ShardedParameter, shape: torch.Size, dtype: torch.dtype, sync: GradSync = GradSync.ALL
) -> torch.Tensor:
    device = parameter.read_spec.device or parameter.shard.device
    references_of_sole_owner()  # measured now, outside of backwards
    with torch.enable_grad(), torch.inference_mode(False):
        anchors = {} if fake_mode_is_active() else _anchors  # a fake tensor belongs to its mode
        gate = torch.expand_copy(_anchor(anchors, device, dtype), shape)  # not a view
    gate.data = torch.zeros((), dtype=dtype, device=device).expand(shape)  # frees the copy
    node = gate.grad_fn
    assert node is not None
    node.register_prehook(_GateHook(parameter.param_id, sync))
    set_sequence_number(node, _AS_SOON_AS_COMPLETE + parameter.param_id)
    return gate


def _anchor(
    anchors: dict[tuple[torch.device, torch.dtype], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    known = anchors.get((device, dtype))
    if known is not None:
        return known
    if dtype is _LEAF:
        anchor = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        anchor.grad = torch.zeros_like(anchor)  # else compiled autograd captures again once the anchor has a gradient
        anchor.register_hook(_all_gates_have_run)
    else:
        anchor = _anchor(anchors, device, _LEAF).to(dtype)
    anchors[device, dtype] = anchor
    return anchor


@torch.compiler.assume_constant_result
def recomputes() -> bool:
    """Whether the code runs in a backward but not in a gate's hooks, as a forward that a checkpoint runs again."""
    node = running_node()
    if node is None:  # compiled autograd's graph replaces all nodes, and runs hooks too
        return backward_id() != -1 and compiled_autograd_runs() and not hooks_run()
    # numbers from 2**63 on belong to AccumulateGrad nodes
    return not 0 <= sequence_number(node) - _AS_SOON_AS_COMPLETE < _AS_SOON_AS_COMPLETE
