"""The ops and their arguments, in order.

``unshard`` turns a parameter's shard into the full parameter; its backward is ``reduce_grad``, which turns the full
gradient into the averaged gradient of the shard and hands it to the parameter's gate (``runtime/gate.py``). Both run as
they are, in plain eager and under any backend.

Our backend groups them into buckets: ``launch`` starts a bucket's collective and returns before it is done, as its
text says (``buckets/spec.py``), and the ``unpack`` ops cut a bucket into parameters. In the end it lowers them to
``_c10d_functional`` ops: ``buckets/collectives.py`` is that lowering, and also the implementation that runs when
nothing lowers them. Only launches of buckets that cross the border of one graph of a broken forward or its backward
stay (``runtime/prefetcher.py``, ``runtime/reducer.py``): one of a reduction gives a zero, ``[]``, which stands for its
results.

``attach`` (``ops/autograd.py``) is the read of a parameter that is full already, for example after ``unshard()``: the
same backward, nothing to gather. ``use`` is its first argument, and gives ``zero_grad`` to parameters that were perhaps
not used (``frontend/unused.py``); both take the parameter, so that every rank gathers it in forward and in backward,
whether it computes with it or not. ``retain`` is a full parameter that stays when the graph is over (``retained`` in a
graph that returns it twice), ``reshard`` this rank's piece of one for a smaller group. A gradient that is not reduced
goes into ``accumulate``, which adds it to what waits on its parameter; ``add_accumulated`` adds that to the next bucket
that is reduced (``runtime/accumulation.py``). In compiled autograd's graph ``accumulate_grad`` adds a reduced gradient
to its parameter's ``.grad``, and ``end_backward`` reduces what waits when all of them have come; both return zeros.
"""

# Why: docs/design.md, note N3; docs/design.md, note N4; docs/design.md, note N8

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.spec import ReadSpec

lib = torch.library.Library("compiled_fsdp", "DEF")
# What they do depends on what happened outside of the graph.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)


# ---- reads and their gradients ---------------------------------------------------------------------------------------
# Of all: ``spec`` is a ``ReadSpec`` as text, and ``read`` the read's index in the compiled region, given by our
# backend, -1 outside of it. ``shard`` is padded with zeros where its rows have run out. ``gate`` is what the gradient
# flows to: of the shard's shape, or a scalar where it waits; None if the parameter is frozen. ``param_id``, int64 on
# the CPU, one element, says which parameter this is, at run time (``state/registry.py``). ``keep``: the full parameter
# stays from forward to backward; else ``post_forward_world_size`` ranks gather it there, if it is not 0
# (``reshard_after_forward=8``).
lib.define(
    "unshard(Tensor shard, Tensor? gate, Tensor param_id, str spec, bool keep, int post_forward_world_size=0, "
    "int read=-1) -> Tensor"
)
# What Dynamo captures of ``unshard``. ``ids``: the numbers of its block's parameters, in the places that ``spec`` says.
# It consists of ``unshard`` for everybody else.
lib.define("read(Tensor shard, Tensor? gate, Tensor ids, str spec, bool keep, int post_forward_world_size) -> Tensor")
# ``dtype``: of the result, which is the padded shard's gradient: that of ``.grad``, which ``grad_dtype`` may have set.
lib.define("reduce_grad(Tensor grad, Tensor param_id, str spec, ScalarType dtype, int read=-1) -> Tensor")


def unshard_args(
    id_at: Callable[[Tensor, int], Tensor], shard: Tensor, gate: Tensor | None, ids: Tensor, spec_text: str, keep: bool,
    post_forward_world_size: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``unshard``, from those of ``read``; ``id_at`` takes one of the ids."""
    spec = ReadSpec.parse(spec_text)
    param_id = ids if spec.block_size == 1 else id_at(ids, spec.position)
    return shard, gate, param_id, spec_text, keep, post_forward_world_size


lib.define("use(Tensor output, Tensor[] fulls) -> Tensor")
lib.define("zero_grad(Tensor full, Tensor grad) -> Tensor")
lib.define("retain(Tensor full) -> Tensor")
# a view by its schema: only for graphs that are functional already
lib.define("retained(Tensor(a) full) -> Tensor(a)")
lib.define("reshard(Tensor full, int world, int group_id, int dim) -> Tensor")
lib.define("share(Tensor full) -> Tensor")
lib.define("gather_full(Tensor[] shards, Tensor[] param_ids, str[] specs) -> Tensor[]")

# ---- code that follows a plan which was made for other code (``runtime/plan_follower.py``) ---------------------------
# ``kind``: "training" or "inference". The reduction gives a zero, [], which stands for its result.
lib.define("follow_unshard(Tensor shard, Tensor param_id, str spec, str kind) -> Tensor", tags=_UNSAFE)
lib.define("follow_reduce(Tensor grad, Tensor param_id, ScalarType dtype, str reduce) -> Tensor", tags=_UNSAFE)

# ---- what waits, and what is complete --------------------------------------------------------------------------------
# ``follows``: in code that follows a plan, which may have gathers of the parameter in this backward. The tag keeps two
# equal gradients of one parameter from being taken for one.
lib.define(
    "accumulate(Tensor grad, Tensor param_id, int read=-1, bool follows=False) -> Tensor",
    tags=(*_UNSAFE, torch.Tag.nondeterministic_seeded),
)

# ---- buckets ---------------------------------------------------------------------------------------------------------
# Of ``launch`` the text is a ``BucketSpec``; of a gather that stays inside of its graph the first id is enough.
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
