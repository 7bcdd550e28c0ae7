"""How buckets are sent: the functional collectives, and which of them a call in a graph is. No other file names them.

A new transport is a pair of functions here, one that launches and one for ``wait`` where it has a wait of its own, and
entries of ``LAUNCHES`` and ``KINDS``.
"""

# Why: docs/design.md, note N45

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def reduce(packed: Tensor, op: str, world: int, group: str, use_all_to_all: bool) -> Tensor:
    """Start reducing a tensor of one dimension, whose ``world`` parts are for the ranks in their order.

    Args:
        packed: ``[world * n]``.
        op: "avg" or "sum".
        world: ranks.
        group: by name.
        use_all_to_all: only send each part to its rank: the result is ``[world * n]``, everyone's part for this one.
            Else it is ``[n]``.
    """
    sent = _as_real(packed)
    if use_all_to_all:
        part = [sent.numel() // world] * world
        return ALL_TO_ALL(sent, part, part, group)
    return REDUCE_SCATTER(sent, op, world, group)


def reduce_together(each: Sequence[Tensor], op: str, world: int, group: str, use_all_to_all: bool) -> list[Tensor]:
    """Start reducing several tensors, in one call where there is one."""
    if each[0].device.type == "cpu" or use_all_to_all:
        return [reduce(packed, op, world, group, use_all_to_all) for packed in each]
    return REDUCE_SCATTER_COALESCED([_as_real(packed) for packed in each], op, world, group)


def reduce_over_replicas(piece: Tensor, op: str, group: str) -> Tensor:
    """Start an all-reduce of what a reduction has left of a bucket."""
    return ALL_REDUCE(_as_real(piece), op, group)
