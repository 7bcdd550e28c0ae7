"""Gates: one permanent autograd node per parameter, outside every graph, through which its gradient comes to ``.grad``.

A gate is an ordinary input of any graph that reads the parameter; ``unshard``'s backward returns the reduced gradient
to it, the engine sums what all reads return, and the gate's backward then runs once and does what AccumulateGrad does
for a leaf: it adds to ``.grad`` of the DTensor and runs its post-accumulate-grad hooks. It saves no tensor, so it
serves every backward.

The gate has the memory and the version counter of the shard, and graphs take one tensor for both. An offloaded shard is
elsewhere, in a group of one the shard may be the full parameter, and a gradient may have another dtype
(``grad_dtype``): there the gate is a tensor of that shape that owns a single zero, expanded, on the device that
computes. The engine has a thread for each device, and gates of one backward shall run one after the other. It is no
view: inputs of a nested region may not share memory.

It is the node of an ``expand_copy``, with a hook before it that takes the gradient. One of ``torch.autograd.Function``
would serve ordinary backwards, but after its first one compiled autograd refuses to capture it ("backward through the
graph a second time").

What is expanded is the anchor: one leaf for each device, and casts of it. Under compiled autograd each gate sends it a
zero, so its hook runs when all gates of the backward have run.

A parameter whose gradients wait (``accumulation.py``) has two more gates: a scalar, where full gradients end that were
added up before it, and one where gradients end that wait for the replicas.
"""

# Why: docs/design.md, note N7

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from compiled_fsdp.buckets.effects import accumulate_grad, end_backward
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.compat.autograd import backward_id, running_node, sequence_number, set_local, set_sequence_number
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs, in_compiled_autograd
from compiled_fsdp.compat.dynamo import compiling_is_on, mark_static
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.runtime.accumulate_grad import hooks_run, references_of_sole_owner
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.parameter import ShardedParameter

# Of _LEAF's dtype the leaf, of others casts of it. The engine computes no gradient of it, because gates return None.
_anchors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_LEAF = torch.float32

# AccumulateGrad nodes have the highest number there is, which is why they run as soon as their gradient is complete. Of
# several whose gradient is complete, the parameter that was sharded last comes first, as it does where they become
# complete one by one.
_AS_SOON_AS_COMPLETE = 2**62


@dataclass(frozen=True)
class _GateHook:
    """What runs before a gate's node.

    It has the number and not the parameter: a reference from the node would keep both alive for ever.
    """

    param_id: int
    sync: GradSync

    def __call__(self, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None]:
        if in_compiled_autograd():  # there something has to depend on what is done
            return (accumulate_grad(self.param_id, grads[0], self.sync.value),)
        reducer = RUNTIME.reducer
        # turning compilation off takes as long as half of the rest
        complete = reducer.gradient_never_compiled if compiling_is_on() else reducer.gradient
        complete(self.param_id, grads, self.sync)
        return (None,)


def _all_gates_have_run(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The anchor's hook; ``grad`` is None in a backward that the engine runs, which has an end of its own."""
    return None if grad is None else end_backward(grad)


def make_gate(parameter: ShardedParameter) -> None:
    """Give a parameter a gate that fits its shard, and those of gradients that wait anew, if it has any."""
    grads, shard = parameter.grads, parameter.shard
    grads.gate = _new_gate(parameter, shard.shape, parameter.gate_dtype) if parameter.may_train else None
    if grads.gate is not None and parameter.gate_has_shard:
        grads.gate.data = shard
        # from the gate: what writes to one of them is seen at all three, by their version
        parameter.shard = grads.gate.detach()
        set_local(parameter.param, parameter.valid_rows())
    if grads.unreduced_gate is not None:
        make_accumulation_gates([parameter])
    if grads.gate is not None:
        mark_static(grads.gate)


def make_accumulation_gates(parameters: Iterable[ShardedParameter]) -> None:
    """Give parameters gates for gradients that wait."""
    for parameter in parameters:
        if not parameter.may_train:
            continue
        grads, shape = parameter.grads, parameter.shard.shape
        grads.unreduced_gate = _new_gate(parameter, torch.Size(()), torch.float32, GradSync.NONE)
        grads.partial_gate = _new_gate(parameter, shape, parameter.reduce_dtype, GradSync.SHARDS_ONLY)
        mark_static(grads.partial_gate)


def _new_gate(
    parameter: ShardedParameter, shape: torch.Size, dtype: torch.dtype, sync: GradSync = GradSync.ALL
) -> torch.Tensor:
    device = parameter.read_spec.device or parameter.shard.device
    references_of_sole_owner()  # asked for outside of backwards
    with torch.enable_grad(), torch.inference_mode(False):
        anchors = {} if fake_mode_is_active() else _anchors  # a fake tensor belongs to its mode
        gate = torch.expand_copy(_anchor(anchors, device, dtype), shape)  # no view
    gate.data = torch.zeros((), dtype=dtype, device=device).expand(shape)  # which frees the copy
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
        anchor.grad = torch.zeros_like(anchor)  # or compiled autograd captures once more when it is there
        anchor.register_hook(_all_gates_have_run)
    else:
        anchor = _anchor(anchors, device, _LEAF).to(dtype)
    anchors[device, dtype] = anchor
    return anchor


@torch.compiler.assume_constant_result
def recomputes() -> bool:
    """Whether code runs in a backward and not in a gate's hooks: activation checkpointing calls forwards there."""
    node = running_node()
    if node is None:  # compiled autograd runs a graph in the place of all nodes, hooks included
        return backward_id() != -1 and compiled_autograd_runs() and not hooks_run()
    # from 2**63 on they are AccumulateGrad's
    return not 0 <= sequence_number(node) - _AS_SOON_AS_COMPLETE < _AS_SOON_AS_COMPLETE
