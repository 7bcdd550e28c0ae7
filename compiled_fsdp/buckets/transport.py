"""How buckets are sent: the functional collectives, and which of them a call in a graph is. No other file names them.

A new transport is a function here that launches, and its entries in ``TRANSPORTS``, ``LAUNCHES`` and ``KINDS``.
"""

# Why: docs/design.md, note N45

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_fsdp.buckets.spec import BucketSpec

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

LAUNCHES = (ALL_GATHER, ALL_GATHER_OUT, ALL_GATHER_COALESCED, REDUCE_SCATTER, REDUCE_SCATTER_COALESCED, ALL_TO_ALL)
"""What gathers and reduces over the ranks that shard."""
GATHERS = (ALL_GATHER, ALL_GATHER_OUT, ALL_GATHER_COALESCED)
GROUPED = (ALL_GATHER_COALESCED, REDUCE_SCATTER_COALESCED)
"""Those that return a tensor for each of several, each with its own wait."""


class Functional(NamedTuple):
    """A kind of torch's functional collectives, those of the model's own among them.

    Attributes:
        curve: what it costs, among the curves of ``Hardware``.
        does: what it does for a bucket of ours.
    """

    curve: str
    does: str


KINDS = {
    "all_gather_into_tensor": Functional("gather", "gather"),
    "reduce_scatter_tensor": Functional("reduce", "reduce"),
    "all_reduce": Functional("all_reduce", "all_reduce"),
    "all_to_all_single": Functional("alltoall", "reduce"),
    "broadcast": Functional("gather", "broadcast"),
}
"""By how the names of their ops begin."""


Names = TypeVar("Names", bound="GroupNames")


@dataclass(frozen=True)
class GroupNames:
    """The process groups of one mesh, as names that functional collectives take."""

    all_gather: str
    # The same, but where a group of its own reduces (``set_separate_reduce_scatter_group``).
    reduce_scatter: str
    # The replicas' group; None without replicas.
    replicate: str | None = None
    # This rank's number in the group that gathers.
    rank: int = 0

    @classmethod
    def one(cls: type[Names], name: str) -> Names:
        """One group for all that is gathered and reduced, without replicas."""
        return cls(name, name)


# Inductor's C++ has no view of bool as bytes.
_SENT_AS_THEY_ARE = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


# ---- in graphs -------------------------------------------------------------------------------------------------------
def is_functional(op: Any) -> bool:
    """Whether an op, or whatever else a node calls, is one of torch's functional collectives or waits."""
    return getattr(op, "namespace", "") == _NAMESPACE


def kind_of(op: Any) -> str | None:
    """Which of ``KINDS`` an op is; None for any other, and for waits."""
    return next((kind for kind in KINDS if op._opname.startswith(kind)), None) if is_functional(op) else None


def waits(op: Any) -> bool:
    """Whether an op waits for collectives."""
    return is_functional(op) and op._opname in ("wait_tensor", "wait_tensors")


# ---- what is sent ----------------------------------------------------------------------------------------------------
def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a collective sends elements of ``dtype``.

    A complex number is sent as its real and its imaginary part. A dtype that gloo or NCCL refuses is sent as bytes, for
    example int16 or float8_e4m3fn, and so is int8, so that more tensors share a collective.
    """
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype in _SENT_AS_THEY_ARE else torch.uint8


def on_wire(flat: Tensor) -> Tensor:
    """A tensor of one dimension as a collective sends it: a view in its ``wire_dtype``."""
    dtype = wire_dtype(flat.dtype)
    return flat if flat.dtype == dtype else flat.view(dtype)


def off_wire(received: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What a collective has sent, as a view of the elements of ``dtype`` that it is; None: as it is."""
    return received if dtype is None or received.dtype == dtype else received.view(dtype)


def _as_real(flat: Tensor) -> Tensor:
    """What a reduction adds up: of complex numbers their real and imaginary parts; a view."""
    return flat.view(flat.dtype.to_real()) if flat.is_complex() else flat


# ---- launches and waits ----------------------------------------------------------------------------------------------
def wait(bucket: Tensor) -> Tensor:
    """The launched bucket, once its collective is done."""
    return WAIT(bucket)


def gather(packed: Tensor, world: int, group: str) -> Tensor:
    """Start gathering a tensor of one dimension, as it is sent: ``[n]`` to ``[world * n]``."""
    if packed.device.type == "cpu":
        # gloo's coalesced gather, through which the functional one runs, corrupts the heap now and then
        out = packed.new_empty(world * packed.numel())
        return ALL_GATHER_OUT(packed, world, group, out=out)
    return ALL_GATHER(packed, world, group)


def gather_together(sent: Sequence[Tensor], world: int, group: str) -> list[Tensor]:
    """Start gathering tensors of one dimension in one call, each into a tensor of its own."""
    if sent[0].device.type == "cpu":
        return [gather(tensor, world, group) for tensor in sent]
    return ALL_GATHER_COALESCED(sent, world, group)


def gather_into(out: Sequence[Tensor], sent: Sequence[Tensor], world: int, group: str) -> list[Tensor]:
    """Start gathering what is in ``out`` already as this rank's part of it (``sent``, a view); on the CPU."""
    return [ALL_GATHER_OUT(part, world, group, out=bucket) for part, bucket in zip(sent, out, strict=True)]


class Transport(NamedTuple):
    """A way in which a bucket is sent.

    Attributes:
        launch: starts it. Takes the tensors as they are sent, of one dimension; how; and the process group's name.
            Returns a tensor for each of them, to be waited for.
        group: which of ``GroupNames`` it runs in.
        curve: what it costs, among the curves of ``Hardware``.
        leaves_pieces: whether each rank receives everyone's piece of its shard, and adds them up after the wait.
    """

    launch: Callable[[Sequence[Tensor], BucketSpec, str], list[Tensor]]
    group: str
    curve: str
    leaves_pieces: bool = False


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
    return [ALL_REDUCE(_as_real(packed), spec.reduction.op, group) for packed in sent]


TRANSPORTS = {
    "all_gather": Transport(_all_gather, "all_gather", "gather"),
    # sums or averages ``[world * n]``, whose parts are for the ranks in their order, to ``[n]``
    "reduce_scatter": Transport(_reduce_scatter, "reduce_scatter", "reduce"),
    # sends each part to its rank: ``[world * n]``, everyone's part for this one
    "all_to_all": Transport(_all_to_all, "reduce_scatter", "alltoall", leaves_pieces=True),
    # goes on over the replicas with what is reduced over the ranks that shard
    "all_reduce": Transport(_all_reduce, "replicate", "all_reduce"),
}
"""By the name in plans and specs."""


def launch(sent: Sequence[Tensor], spec: BucketSpec, groups: GroupNames) -> list[Tensor]:
    """Start the collective of a bucket, which is packed; what is returned is to be waited for."""
    transport = TRANSPORTS[spec.transport]
    return transport.launch(sent, spec, getattr(groups, transport.group))
