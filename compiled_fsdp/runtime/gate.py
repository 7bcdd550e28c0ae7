"""Gates: one permanent autograd node per parameter, outside every graph, that publishes the parameter's gradient.

A gate is a tensor of the shard's shape that owns no memory (an expanded zero). It is an ordinary input of any graph that
reads the parameter; ``unshard``'s backward returns the reduced gradient to it, the engine sums what all reads return, and
the gate's backward then runs once and does what AccumulateGrad does for a leaf: it adds to ``.grad`` of the DTensor and
runs its post-accumulate-grad hooks. It saves no tensor, so it serves every backward.

It is the node of an ``expand``, with a hook ahead of it that takes the gradient. One of ``torch.autograd.Function`` would serve
ordinary backwards, but after its first one compiled autograd refuses to capture it ("backward through the graph a second time").

A parameter whose gradients wait (``waiting.py``) has more gates: a scalar that full gradients end in, which they were added
ahead of, and one that gradients end in which wait for the replicas. They publish nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_fsdp.compat import never_a_frame_of_its_own, running_node, sequence_number, set_sequence_number
from compiled_fsdp.runtime.reducer import PUBLISHED, PUBLISHING
from compiled_fsdp.runtime.sole_owner import counts, is_ours, sole_owners

# What makes a gate require grad. Its own gradient is zero, and not computed outside of compiled autograd (the hook returns None).
_anchors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

# AccumulateGrad nodes have the highest number there is, which is why they run as soon as their gradient is complete. Of several
# that are, the parameter that was sharded last comes first, as it does where they become complete one by one.
_AS_SOON_AS_COMPLETE = 2**62


@dataclass(frozen=True)
class _Publish:
    """A gate's hook. It has the number and not the parameter: a reference from the node would keep both alive for ever."""

    slot: int
    kind: str

    def __call__(self, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None]:
        if torch.compiler.is_compiling():  # compiled autograd: in the graph, where something has to depend on it
            return (torch.ops.compiled_fsdp.publish.default(self.slot, grads[0], self.kind),)
        owned = is_ours(counts(grads), grads[0])
        PUBLISHING.gradient(self.slot, grads[0], self.kind, owned)
        return (None,)


never_a_frame_of_its_own(_Publish.__call__)


def new_gate(
    slot: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, kind: str = PUBLISHED
) -> torch.Tensor:
    """A gate for the parameter with this slot: shape, dtype and device of its padded shard, no memory of its own; ``kind`` as
    ``PUBLISHING.gradient`` takes it."""
    sole_owners()  # asked for outside of backwards
    with torch.enable_grad(), torch.inference_mode(False):
        if (device, dtype) not in _anchors:
            anchor = _anchors[device, dtype] = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
            anchor.grad = torch.zeros_like(anchor)  # or compiled autograd captures once more when it is there
        gate = _anchors[device, dtype].expand(shape)
    node = gate.grad_fn
    assert node is not None
    node.register_prehook(_Publish(slot, kind))
    set_sequence_number(node, _AS_SOON_AS_COMPLETE + slot)
    return gate


def recomputes() -> bool:
    """Whether code runs in a backward and not in a gate's hooks: activation checkpointing calls forwards there."""
    node = running_node()
    # from 2**63 on they are AccumulateGrad's
    return node is not None and not 0 <= sequence_number(node) - _AS_SOON_AS_COMPLETE < _AS_SOON_AS_COMPLETE
