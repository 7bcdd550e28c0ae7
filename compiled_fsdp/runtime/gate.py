"""Gates: one permanent autograd node per parameter, outside every graph, that publishes the parameter's gradient.

A gate is a tensor of the shard's shape that owns no memory (an expanded zero). It is an ordinary input of any graph that
reads the parameter; ``unshard``'s backward returns the reduced gradient to it, the engine sums what all reads return, and
the gate's backward then runs once and does what AccumulateGrad does for a leaf: it adds to ``.grad`` of the DTensor and
runs its post-accumulate-grad hooks. It saves no tensor, so it serves every backward.
"""

from __future__ import annotations

from typing import Any

import torch

from compiled_fsdp.compat import never_a_frame_of_its_own, set_sequence_number
from compiled_fsdp.runtime.publishing import PUBLISHING

# What makes a gate require grad. Its own gradient is zero, and not computed outside of compiled autograd (the edge returns None).
_anchors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

# AccumulateGrad nodes have the highest number there is, which is why they run as soon as their gradient is complete. Of several
# that are, the parameter that was sharded last comes first, as it does where they become complete one by one.
_AS_SOON_AS_COMPLETE = 2**62


# what the autograd node of a gate is called
GATE = "_GateBackward"


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, slot: int, shape: torch.Size) -> torch.Tensor:
        # The number and not the parameter: a reference from the node to the parameter would keep both alive for ever.
        ctx.slot = slot
        return anchor.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if torch.compiler.is_compiling():  # compiled autograd: in the graph, where something has to depend on it
            return torch.ops.compiled_fsdp.publish.default(ctx.slot, grad), None, None
        PUBLISHING.gradient(ctx.slot, grad)
        return None, None, None


never_a_frame_of_its_own(_Gate.backward)


def new_gate(slot: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A gate for the parameter with this slot: shape, dtype and device of its padded shard, no memory of its own."""
    with torch.enable_grad(), torch.inference_mode(False):
        if (device, dtype) not in _anchors:
            anchor = _anchors[device, dtype] = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
            anchor.grad = torch.zeros_like(anchor)  # or compiled autograd captures once more when it is there
        gate = _Gate.apply(_anchors[device, dtype], slot, shape)
    set_sequence_number(gate.grad_fn, _AS_SOON_AS_COMPLETE + slot)
    return gate
