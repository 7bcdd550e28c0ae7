"""Ops with which compiled autograd's graph hands gradients to the reducer; both return zeros.

    accumulate_grad(id, grad, ..)   adds a reduced gradient to its parameter's ``.grad``
    end_backward(grad)              reduces what waits, when all of them have come

What they do is in ``ops/impl.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# What they do depends on what happened outside of the graph, and they write there.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define(
    "accumulate_grad(int param_id, Tensor grad, str sync, int read=-1, bool last=False) -> Tensor", tags=_UNSAFE
)
_lib.define("end_backward(Tensor grad) -> Tensor", tags=_UNSAFE)


def _scalar(param_id: int, grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(())


torch.library.register_fake("compiled_fsdp::accumulate_grad", _scalar, lib=_lib)
torch.library.register_fake("compiled_fsdp::end_backward", torch.empty_like, lib=_lib)

accumulate_grad = torch.ops.compiled_fsdp.accumulate_grad.default
end_backward = torch.ops.compiled_fsdp.end_backward.default
