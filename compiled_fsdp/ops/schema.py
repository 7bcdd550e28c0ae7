"""The ops and their arguments, in order.

``unshard`` gathers the full parameter from its shards. Its backward is ``reduce_grad``, which reduces the full gradient
to the averaged gradient of the shard and hands it to the parameter's gate (``runtime/gate.py``). Both run as they are,
in plain eager code and under any backend.

compiled_fsdp's backend groups them into buckets. ``launch`` starts a bucket's collective and returns before it is done;
its ``spec`` says how the bucket is sent (``buckets/spec.py``). The ``unpack`` ops cut a bucket into parameters. The
pass ``lower`` turns all of them into ``_c10d_functional`` ops; ``buckets/collectives.py`` is that lowering, and also
the implementation that runs if nothing lowers them. A ``launch`` stays only in one of several graphs of a broken
forward or its backward, if its bucket is at an edge of the graph. For example, a reduction may still be in flight when
the graph ends (``runtime/prefetcher.py``, ``runtime/reducer.py``); its ``launch`` returns a zero, ``[]``, which stands
for the results.

Other ops of reads:

- ``attach`` (``ops/autograd.py``) reads a parameter that is full already, for example after ``unshard()``. It has the
  backward of ``unshard`` and no gather.
- ``use(output, fulls)`` returns ``output``. In backward it sends a ``zero_grad`` to every parameter in ``fulls``, so
  that all ranks reduce the same parameters even if the forward skipped some on one rank (``frontend/unused.py``). Both
  ops take the full parameters, so that every rank gathers them in forward and in backward.
- ``retain`` marks a full parameter that stays after the graph has run. With the ``spec`` of a smaller group, only this
  rank's part for that group stays. ``retained`` replaces it in a graph that also returns the full parameter as a result
  of the user's code.
- ``reshard`` cuts this rank's shard for a smaller group out of a full parameter.

Ops of pending gradients (some are defined in ``buckets/effects.py``):

- ``accumulate`` takes a gradient that is not reduced, and adds it to the parameter's pending gradient.
- ``add_accumulated`` adds pending gradients to the next bucket that is reduced (``runtime/accumulation.py``).
- In compiled autograd's graph ``accumulate_grad`` adds a reduced gradient to its parameter's ``.grad``, and
  ``end_backward`` reduces the pending gradients once all gradients have been handed over. Both return zeros.
"""

# Why: docs/design/reads.md, "One op for a read, one op for a reduction"
# Why: docs/design/reads.md, "Graphs name no ranks and no layers"
# Why: docs/design/gradients.md, "The reduction is text in the graph"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.spec import ReadSpec

lib = torch.library.Library("compiled_fsdp", "DEF")
# These ops depend on state outside of the graph, so CUDA graphs must not capture them.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)


# ---- reads and their gradients ---------------------------------------------------------------------------------------
# Arguments of several ops:
#   shard: this rank's padded shard; zeros fill it up if it has fewer rows.
#   gate: the tensor that the gradient flows to, of the shard's shape, or a scalar if the gradient is not reduced. None
#     if the parameter is frozen.
#   param_id: a tensor of one int64 on the CPU, which identifies the parameter at run time (``state/registry.py``).
#   spec: a ``ReadSpec`` as text.
#   read: the read's index in the compiled region; the backend sets it. -1 if there is no region.
#   keep: whether the full parameter stays from forward to backward. If not, ``post_forward_world_size`` ranks gather it
#     again in backward (``reshard_after_forward=8``), or all ranks if that is 0.
lib.define(
    "unshard(Tensor shard, Tensor? gate, Tensor param_id, str spec, bool keep, int post_forward_world_size=0, "
    "int read=-1) -> Tensor"
)
# Dynamo captures ``read``; the backend replaces it by ``unshard``, and it runs as ``unshard`` everywhere else. ``ids``:
# the ids of all parameters of the block; the spec has the position of this parameter's.
lib.define("read(Tensor shard, Tensor? gate, Tensor ids, str spec, bool keep, int post_forward_world_size) -> Tensor")
# ``dtype``: the dtype of the result, the padded shard's gradient. It is the dtype of ``.grad``, which the user may set
# with ``grad_dtype``.
lib.define("reduce_grad(Tensor grad, Tensor param_id, str spec, ScalarType dtype, int read=-1) -> Tensor")


def unshard_args(
    id_at: Callable[[Tensor, int], Tensor], shard: Tensor, gate: Tensor | None, ids: Tensor, spec_text: str, keep: bool,
    post_forward_world_size: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Convert the arguments of ``read`` to those of ``unshard``; ``id_at(ids, position)`` takes one of the ids."""
    spec = ReadSpec.parse(spec_text)
    param_id = ids if spec.block_size == 1 else id_at(ids, spec.position)
    return shard, gate, param_id, spec_text, keep, post_forward_world_size


lib.define("use(Tensor output, Tensor[] fulls) -> Tensor")
lib.define("zero_grad(Tensor full, Tensor grad) -> Tensor")
lib.define('retain(Tensor full, str spec="") -> Tensor')
# its schema says that it returns a view, so only graphs that are functional already may hold it
lib.define("retained(Tensor(a) full) -> Tensor(a)")
lib.define("reshard(Tensor full, int world, int group_id, int dim) -> Tensor")
lib.define("share(Tensor full) -> Tensor")
lib.define("gather_full(Tensor[] shards, Tensor[] param_ids, str[] specs) -> Tensor[]")

# ---- code that follows a plan made for other code (``runtime/plan_follower.py``) -------------------------------------
# ``kind``: "training" or "inference". ``follow_reduce`` returns a zero, [], which stands for its result.
lib.define("follow_unshard(Tensor shard, Tensor param_id, str spec, str kind) -> Tensor", tags=_UNSAFE)
lib.define("follow_reduce(Tensor grad, Tensor param_id, ScalarType dtype, str reduce) -> Tensor", tags=_UNSAFE)

# ---- pending gradients -----------------------------------------------------------------------------------------------
# ``follows``: whether the code follows a plan, which may gather the parameter in this backward. The tag
# ``nondeterministic_seeded`` keeps compilers from merging two equal gradients of one parameter into one call.
lib.define(
    "accumulate(Tensor grad, Tensor param_id, int read=-1, bool follows=False) -> Tensor",
    tags=(*_UNSAFE, torch.Tag.nondeterministic_seeded),
)

# ---- buckets ---------------------------------------------------------------------------------------------------------
# The spec of ``launch`` is a ``BucketSpec``. A gather that is not at an edge of its graph needs only its first id.
lib.define("launch(Tensor[] tensors, Tensor[] param_ids, str spec) -> Tensor[]", tags=_UNSAFE)
lib.define("unpack_gather(Tensor bucket, int offset, str spec) -> Tensor")
lib.define("unpack_reduce(Tensor bucket, int offset, str spec, ScalarType dtype, int num_pieces=1) -> Tensor")


_ops = torch.ops.compiled_fsdp
unshard = _ops.unshard.default
read = _ops.read.default
reduce_grad = _ops.reduce_grad.default
use = _ops.use.default
zero_grad = _ops.zero_grad.default
retain = _ops.retain.default
share = _ops.share.default
gather_full = _ops.gather_full.default
accumulate = _ops.accumulate.default
