"""Transports, which send buckets by functional collectives, and functions that recognize such calls in a graph.

No other file names the collectives. Those over symmetric memory are private ops of torch
(``compat/symm_mem.py``), and the same waits wait for them. A new transport needs a function here that launches it, and
entries in ``TRANSPORTS``, ``LAUNCHES`` and ``KINDS``.
"""

# Why: docs/design/communication.md, "CPU gathers write into a given tensor"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.buckets.spec import FLAT, BucketSpec, Kind
from compiled_fsdp.compat import symm_mem

_NAMESPACE = "_c10d_functional"
_c10d = torch.ops._c10d_functional

WAIT = _c10d.wait_tensor.default
ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_GATHER_OUT = _c10d.all_gather_into_tensor_out.default
ALL_GATHER_COALESCED = _c10d.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
REDUCE_SCATTER_COALESCED = _c10d.reduce_scatter_tensor_coalesced.default
ALL_TO_ALL = _c10d.all_to_all_single.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_COALESCED = _c10d.all_reduce_coalesced.default

GATHERS = (ALL_GATHER, ALL_GATHER_OUT, ALL_GATHER_COALESCED, symm_mem.ALL_GATHER)
ALL_REDUCES = (ALL_REDUCE, ALL_REDUCE_COALESCED)
LAUNCHES = (*GATHERS, REDUCE_SCATTER, REDUCE_SCATTER_COALESCED, ALL_TO_ALL, symm_mem.REDUCE_SCATTER, *ALL_REDUCES)
"""The ops that launch a bucket, or its second reduction (``Transport.is_second``)."""
GROUPED = (ALL_GATHER_COALESCED, REDUCE_SCATTER_COALESCED, ALL_REDUCE_COALESCED)
"""The ops that send several tensors in one call; each returned tensor has its own wait."""


class Functional(NamedTuple):
    """A kind of torch's functional collectives, in a bucket or in the model's own code.

    Attributes:
        curve: the name of its cost curve in ``Hardware``.
        does: the kind under which a profile reports it.
    """

    curve: str
    does: str


KINDS = {
    "all_gather_into_tensor": Functional("gather", "gather"),
    "reduce_scatter_tensor": Functional("reduce", "reduce"),
    "all_reduce": Functional("all_reduce", "all_reduce"),
    "all_to_all_single": Functional("alltoall", "reduce"),
    "broadcast": Functional("gather", "broadcast"),
    "_low_contention_all_gather": Functional("gather", "gather"),
    "_low_contention_reduce_scatter": Functional("reduce", "reduce"),
}
"""The functional collectives, by the beginning of their ops' names."""


Names = TypeVar("Names", bound="GroupNames")


@dataclass(frozen=True)
class GroupNames:
    """The names of one mesh's process groups, as functional collectives take them."""

    # The group that gathers.
    all_gather: str
    # The group that reduces: the same group, or a separate one (``set_separate_reduce_scatter_group``).
    reduce_scatter: str
    # The group that reduces gradients again: the replicas', or with a working copy the ranks at the same place in other
    # parts (``ReduceSpec.within``). None: there is none.
    replicate: str | None = None
    # This rank's number in the group that gathers, and in the group that reduces again.
    rank: int = 0
    rank_in_second: int = 0

    @classmethod
    def one(cls: type[Names], name: str) -> Names:
        """The names for one group that both gathers and reduces, without replicas."""
        return cls(name, name)


# Includes bool because Inductor's C++ code cannot view bool as bytes.
_SENT_AS_THEY_ARE = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


# ---- in graphs -------------------------------------------------------------------------------------------------------
def is_functional(op: Any) -> bool:
    """Whether ``op``, the call target of a node, is one of torch's functional collectives or waits."""
    return getattr(op, "namespace", "") == _NAMESPACE or op in (symm_mem.ALL_GATHER, symm_mem.REDUCE_SCATTER)


def kind_of(op: Any) -> str | None:
    """The key of ``KINDS`` for an op; None for waits and for all other ops."""
    return next((kind for kind in KINDS if op._opname.startswith(kind)), None) if is_functional(op) else None


def waits(op: Any) -> bool:
    """Whether an op waits for collectives."""
    return is_functional(op) and op._opname in ("wait_tensor", "wait_tensors")


# ---- dtypes on the wire ----------------------------------------------------------------------------------------------
def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a collective sends elements of ``dtype``.

    A complex number is sent as its real and its imaginary part. A dtype that gloo or NCCL refuses, for example int16 or
    float8_e4m3fn, is sent as bytes. int8 is sent as bytes, too, so that more tensors share a collective.
    """
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype in _SENT_AS_THEY_ARE else torch.uint8


def on_wire(flat: Tensor) -> Tensor:
    """A tensor of one dimension as a collective sends it: a view in its ``wire_dtype``."""
    dtype = wire_dtype(flat.dtype)
    return flat if flat.dtype == dtype else flat.view(dtype)


def off_wire(received: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A received tensor, viewed as elements of ``dtype``; None: returned unchanged."""
    return received if dtype is None or received.dtype == dtype else received.view(dtype)


def _as_real(flat: Tensor) -> Tensor:
    """View complex numbers as their real and imaginary parts, because a reduction adds these up."""
    return flat.view(flat.dtype.to_real()) if flat.is_complex() else flat


# ---- launches and waits ----------------------------------------------------------------------------------------------
def wait(bucket: Tensor) -> Tensor:
    """Wait until the collective of a launched bucket is done, and return the bucket."""
    return WAIT(bucket)


def gather(packed: Tensor, world: int, group: str) -> Tensor:
    """Start gathering a packed one-dimensional tensor: ``[n]`` to ``[world * n]``."""
    if packed.device.type == "cpu":
        # on gloo ALL_GATHER runs through the coalesced gather, which sometimes corrupts the heap
        out = packed.new_empty(world * packed.numel())
        return ALL_GATHER_OUT(packed, world, group, out=out)
    return ALL_GATHER(packed, world, group)


def gather_together(sent: Sequence[Tensor], world: int, group: str) -> list[Tensor]:
    """Start gathering one-dimensional tensors in one call, each into its own tensor (on the CPU: one call for each)."""
    if sent[0].device.type == "cpu":
        return [gather(tensor, world, group) for tensor in sent]
    return ALL_GATHER_COALESCED(sent, world, group)


def gather_into(out: Sequence[Tensor], sent: Sequence[Tensor], world: int, group: str) -> list[Tensor]:
    """Start gathering in place, on the CPU: each tensor of ``sent`` is a view of this rank's part of one in ``out``."""
    return [ALL_GATHER_OUT(part, world, group, out=bucket) for part, bucket in zip(sent, out, strict=True)]


def exchange(sent: Tensor, given: Sequence[int], taken: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Start to send a part of a one-dimensional tensor to each rank, in eager code. Parts may have any sizes.

    Bytes are sent, because gloo does not know every dtype.

    Args:
        sent: the parts for all ranks, in their order; must live until the work is done.
        given: the number of elements for each rank.
        taken: the number of elements that come from each rank.
        group: the ranks.

    Returns:
        The tensor that receives the parts from all ranks, and the work to wait for.
    """
    received, width = sent.new_empty(sum(taken)), sent.dtype.itemsize
    sizes = [width * count for count in taken], [width * count for count in given]
    work = dist.all_to_all_single(
        received.view(torch.uint8), sent.view(torch.uint8), *sizes, group=group, async_op=True
    )
    return received, work


class Transport(NamedTuple):
    """A way to send a bucket.

    Attributes:
        launch: starts the collective. Takes the packed one-dimensional tensors, the bucket's spec, and the name of the
            process group. Returns a tensor for each of them, which is valid after a wait.
        group: the field of ``GroupNames`` that names its process group.
        curve: the name of its cost curve in ``Hardware``.
        leaves_pieces: whether each rank receives one addend for its shard from every rank, and adds them up itself
            after the wait.
        copy_engines: whether the GPUs' copy engines move the bytes, so that ``Hardware.copy_engines`` has its costs.
        is_second: whether it reduces a bucket again, which the ranks that shard the parameters have reduced.
    """

    launch: Callable[[Sequence[Tensor], BucketSpec, str], list[Tensor]]
    group: str
    curve: str
    leaves_pieces: bool = False
    copy_engines: bool = False
    is_second: bool = False


def _all_gather(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    if spec.coalesced:
        return gather_together(sent, spec.world, group)
    return [gather(sent[0], spec.world, group)]


def _reduce_scatter(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    op = spec.reduction.op
    if not spec.coalesced or sent[0].device.type == "cpu":
        return [REDUCE_SCATTER(_as_real(packed), op, spec.world, group) for packed in sent]
    return REDUCE_SCATTER_COALESCED([_as_real(packed) for packed in sent], op, spec.world, group)


def _all_to_all(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    real = [_as_real(packed) for packed in sent]
    parts = [[packed.numel() // spec.world] * spec.world for packed in real]
    return [ALL_TO_ALL(packed, part, part, group) for packed, part in zip(real, parts, strict=True)]


def _all_reduce(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    op, real = spec.reduction.op, [_as_real(packed) for packed in sent]
    if not spec.coalesced or sent[0].device.type == "cpu":
        return [ALL_REDUCE(packed, op, group) for packed in real]
    return ALL_REDUCE_COALESCED(real, op, group)


def _gather_by_copies(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    return [symm_mem.launch(symm_mem.ALL_GATHER, packed, group) for packed in sent]


def _reduce_by_copies(sent: Sequence[Tensor], spec: BucketSpec, group: str) -> list[Tensor]:
    op = spec.reduction.op
    return [symm_mem.launch(symm_mem.REDUCE_SCATTER, _as_real(packed), op, group) for packed in sent]


TRANSPORTS = {
    "all_gather": Transport(_all_gather, "all_gather", "gather"),
    # sums or averages ``[world * n]``, one part for each rank in order, to ``[n]``
    "reduce_scatter": Transport(_reduce_scatter, "reduce_scatter", "reduce"),
    # sends each part of ``[world * n]`` to its rank, and receives ``[world * n]``: one addend from every rank
    "all_to_all": Transport(_all_to_all, "reduce_scatter", "alltoall", leaves_pieces=True),
    # sums or averages ``[n]`` over the replicas, if there is one shard only
    "all_reduce": Transport(_all_reduce, "replicate", "all_reduce"),
    # the same for ``[n]`` that was reduced over the ranks that shard before
    "all_reduce_shards": Transport(_all_reduce, "replicate", "all_reduce", is_second=True),
    # as "reduce_scatter" and "all_to_all", for what a part of the ranks has reduced before
    "reduce_scatter_parts": Transport(_reduce_scatter, "replicate", "reduce", is_second=True),
    "all_to_all_parts": Transport(_all_to_all, "replicate", "alltoall", leaves_pieces=True, is_second=True),
    "symm_mem_all_gather": Transport(_gather_by_copies, "all_gather", "gather", copy_engines=True),
    "symm_mem_reduce_scatter": Transport(_reduce_by_copies, "reduce_scatter", "reduce", copy_engines=True),
}
"""The transports, by their names in plans and specs."""
BY_COPY_ENGINES = {Kind.GATHER: "symm_mem_all_gather", Kind.REDUCE: "symm_mem_reduce_scatter"}
"""The transports of the option ``transport="symm_mem"``."""


def reduces_by(asked: str, world: int, *, codec: str = "", over_replicas: bool) -> str:
    """The transport of a bucket of reductions.

    Args:
        asked: the transport if neither replicas nor a codec decide.
        world: the number of shards.
        codec: the codec of the gradients; "" for none.
        over_replicas: whether gradients are reduced over replicas, too.
    """
    if world == 1 and over_replicas:
        return "all_reduce"
    return "all_to_all" if codec else asked


def reduces_again_by(first: str, *, in_parts: bool) -> str:
    """The transport of a bucket's second reduction.

    Args:
        first: the transport of its first reduction.
        in_parts: whether a part of the ranks has reduced it; else all that shard it, and replicas are left.
    """
    if not in_parts:
        return "all_reduce_shards"
    return "all_to_all_parts" if first == "all_to_all" else "reduce_scatter_parts"


def reduced_again(first: BucketSpec, parts: int, pieces: int) -> BucketSpec:
    """The spec of a bucket's second reduction, over the replicas or over ``parts`` parts of the ranks.

    Args:
        first: the spec of the first reduction.
        parts: 1 for replicas.
        pieces: as how many addends the first reduction leaves the bucket.
    """
    in_parts = first.reduction.within is not None
    return replace(
        first,
        form=FLAT,
        transport=reduces_again_by(first.transport, in_parts=in_parts),
        world=parts if in_parts else first.world,
        numels=tuple([numel // parts for numel in first.numels]),
        dims=(),
        reads=(),
        pieces=pieces,
    )


def launch(sent: Sequence[Tensor], spec: BucketSpec, groups: GroupNames) -> list[Tensor]:
    """Start the collective of a packed bucket. The returned tensors are valid after a wait."""
    transport = TRANSPORTS[spec.transport]
    return transport.launch(sent, spec, getattr(groups, transport.group))
