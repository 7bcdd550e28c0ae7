"""Ops of a bucket's packing that take what waits on parameters. What they do is the runtime's (``ops/impl.py``).

add_accumulated(bucket, ids, ..)            adds what waits of these parameters' gradients to a bucket
encode_with_feedback(tensors, ids, ..)      encodes gradients with what the codec has lost of earlier ones
"""

# Why: docs/design.md, note N8; docs/design.md, note N69

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.encode import fake_encode

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# What they do depends on what happened outside of the graph, and they write there.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define("add_accumulated(Tensor(a!) bucket, Tensor[] param_ids, int[] numels, bool partial) -> ()", tags=_UNSAFE)
_lib.define("encode_with_feedback(Tensor[] tensors, Tensor[] param_ids, int rows, str codec) -> Tensor", tags=_UNSAFE)


def _encoded(tensors: Any, param_ids: Any, rows: int, codec: str) -> Tensor:
    return fake_encode(tensors, rows, codec)


torch.library.register_fake("compiled_fsdp::add_accumulated", lambda *_: None, lib=_lib)
torch.library.register_fake("compiled_fsdp::encode_with_feedback", _encoded, lib=_lib)

add_accumulated = torch.ops.compiled_fsdp.add_accumulated.default
encode_with_feedback = torch.ops.compiled_fsdp.encode_with_feedback.default
