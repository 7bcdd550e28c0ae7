"""Ops that read or change the gradient state of parameters. The runtime implements them (``ops/impl.py``).

add_accumulated(bucket, ids, ..)            adds these parameters' pending gradients to a bucket
encode_with_feedback(tensors, ids, ..)      encodes gradients plus the residuals that earlier encodings left

Compiled autograd's graph hands gradients to the reducer with two more ops, which return zeros:

accumulate_grad(id, grad, ..)               adds a reduced gradient to its parameter's ``.grad``
end_backward(grad)                          reduces the pending gradients, once the graph has handed on all gradients
"""

# Why: docs/design/gradients.md, "The reduction is text in the graph"
# Why: docs/design/communication.md, "Error feedback lives with the parameter"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.encode import fake_encode

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# The ops read and write state outside of the graph.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define("add_accumulated(Tensor(a!) bucket, Tensor[] param_ids, int[] numels, bool partial) -> ()", tags=_UNSAFE)
_lib.define("encode_with_feedback(Tensor[] tensors, Tensor[] param_ids, int rows, str codec) -> Tensor", tags=_UNSAFE)
_lib.define(
    "accumulate_grad(int param_id, Tensor grad, str sync, int read=-1, bool last=False) -> Tensor", tags=_UNSAFE
)
_lib.define("end_backward(Tensor grad) -> Tensor", tags=_UNSAFE)


def _encoded(tensors: Any, param_ids: Any, rows: int, codec: str) -> Tensor:
    return fake_encode(tensors, rows, codec)


def _scalar(param_id: int, grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(())


torch.library.register_fake("compiled_fsdp::add_accumulated", lambda *_: None, lib=_lib)
torch.library.register_fake("compiled_fsdp::encode_with_feedback", _encoded, lib=_lib)
torch.library.register_fake("compiled_fsdp::accumulate_grad", _scalar, lib=_lib)
torch.library.register_fake("compiled_fsdp::end_backward", torch.empty_like, lib=_lib)

add_accumulated = torch.ops.compiled_fsdp.add_accumulated.default
encode_with_feedback = torch.ops.compiled_fsdp.encode_with_feedback.default
accumulate_grad = torch.ops.compiled_fsdp.accumulate_grad.default
end_backward = torch.ops.compiled_fsdp.end_backward.default
