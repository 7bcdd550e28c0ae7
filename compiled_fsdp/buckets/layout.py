"""How large the tensors of a bucket are on their way, and what the bucket holds in memory, from when to when.

The planner's simulator counts with this. ``passes/verify.py`` counts the memory of graphs by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from compiled_fsdp.buckets.spec import FLAT, SINGLE, Kind

MAX_GAP = 64
"""Bytes between two tensors that a kernel unpacks into one, which it aligns."""


@dataclass(frozen=True)
class TensorSize:
    """A tensor that is gathered or reduced: bytes on one rank, of the full tensor, padded to equal shards.

    Attributes:
        sent: as it is sent.
        decoded: of the tensor itself where it is sent encoded, so that it is copied on both sides; else 0.
        gap: its share of what our kernels leave free between the tensors that they pack.
        host: of a gathered parameter's shard, if that comes from host memory first (CPUOffloadPolicy).
        wider, wider_shard: by which a gradient as compute makes it, and the shard that is left of it, are larger than
            ``full`` and its share: those of wider numbers than are reduced.
        cast_shard: of that shard what is there twice while it is cast from what is reduced.
        copied: whether it has to be copied before its launch even alone: a shard that is cast; a gradient that is not
            contiguous, is cast or is padded.
        unpacked: whether a gathered parameter is copied after its wait even alone: one that is not sharded on its first
            dimension.
    """

    sent: int
    decoded: int = 0
    gap: int = 0
    host: int = 0
    wider: int = 0
    wider_shard: int = 0
    cast_shard: int = 0
    copied: bool = False
    unpacked: bool = False

    @property
    def full(self) -> int:
        """Of the tensor that compute reads or makes."""
        return self.decoded or self.sent

    def is_packed(self, form: str) -> bool:
        """Whether it is copied before the launch of a bucket of this form."""
        return form == FLAT or self.copied or self.decoded > 0

    def is_unpacked(self, form: str) -> bool:
        """Whether a gathered one is copied after the wait for a bucket of this form."""
        return form == FLAT or self.unpacked or self.decoded > 0


class Member(Protocol):
    """A tensor of a bucket, between two places in a graph's compute, which are numbered segments."""

    @property
    def size(self) -> TensorSize:
        """Its bytes."""

    @property
    def first(self) -> int:
        """The segment of a gathered parameter's first use; the segment before which a gradient is complete."""

    @property
    def last(self) -> int:
        """The segment of its last use."""


class Sending(NamedTuple):
    """What of a bucket's way counts for memory.

    Attributes:
        world: ranks.
        received: bytes that a reduction receives, as a share of those that are sent: all of them in an all-to-all.
        kernels: whether one kernel packs or unpacks a bucket.
    """

    world: int
    received: float
    kernels: bool


PARTS = ("unsharded", "bucket", "sharded")
"""Of what a bucket holds: full tensors; what is sent or received; what is left of reduced gradients."""

Held = tuple[str, int, int, float]
"""Bytes that are alive from the start of one segment to the end of another: what, the first segment, the last, bytes.

What is one of ``PARTS``. Nothing is held if the last segment is before the first one. Bytes may be a fraction.
"""


def footprint(
    kind: Kind, form: str, members: Sequence[Member], at: int, wait: int, end: int, by: Sending
) -> Iterator[Held]:
    """What a bucket holds.

    A gathered parameter lives from its launch to its last use. In a flat bucket it lives from its wait, and the bucket
    lives from launch to wait, as do shards that were copied or cast to be sent; one that is sent encoded counts as
    flat. A gradient lives from its completion to the end of its reduction, in a flat bucket to its launch.

    Args:
        kind, form: of the bucket.
        members: all of it.
        at: the segment right before which it is launched.
        wait: the segment right before which it is waited for.
        end: the graph's last segment.
        by: how it is sent.
    """
    sizes = [m.size for m in members]
    whole = form == FLAT or sizes[0].decoded > 0
    packed = sum([size.sent for size in sizes if whole or size.copied])
    if form != SINGLE:
        packed += sum([size.gap for size in sizes if form == FLAT or size.copied])
    if kind.supplies:
        return _of_gather(form, members, sizes, whole, at, wait, packed, by)
    return _of_reduction(members, sizes, whole, at, wait, end, packed, by)


def _of_gather(
    form: str, members: Sequence[Member], sizes: Sequence[TensorSize], whole: bool, at: int, wait: int, packed: int,
    by: Sending,
) -> Iterator[Held]:  # fmt: skip
    # its wait stands before its first use, perhaps behind that of another one which is used in the same segment
    yield "bucket", at, max(at, wait - 1) if whole else wait, packed / by.world
    if whole:
        yield "bucket", at, wait, packed
    if form == FLAT and by.kernels and not sizes[0].decoded:  # one tensor, which goes with the last of them
        last = max(wait, *[m.last for m in members])
        yield "unsharded", wait, last, sum([size.sent for size in sizes]) + len(members) * MAX_GAP
        return
    for m, size in zip(members, sizes, strict=True):
        yield "unsharded", wait if whole or size.unpacked else at, max(m.last, wait), size.decoded or size.sent
        if size.unpacked and form != FLAT:
            yield "bucket", at, wait, size.sent


def _of_reduction(
    members: Sequence[Member], sizes: Sequence[TensorSize], whole: bool, at: int, wait: int, end: int, packed: int,
    by: Sending,
) -> Iterator[Held]:  # fmt: skip
    landed = max(at, wait - 1)  # waits for reductions come first in their segment
    for m, size in zip(members, sizes, strict=True):
        yield "unsharded", m.first, at if whole or size.copied else landed, (size.decoded or size.sent) + size.wider
    yield "bucket", at, landed, packed
    total = sum([size.sent for size in sizes])
    if whole:
        yield "bucket", at, at, sum([size.full for size in sizes if size.copied])
        total += sum([size.gap for size in sizes])
    yield "bucket", at, landed, max(by.received, 1 / by.world) * total
    decoded = sum([size.decoded for size in sizes])
    yield "sharded", landed + 1, end, (decoded or total) / by.world + sum([size.wider_shard for size in sizes])
    # one that is as large as the gradient perhaps while the next one is still in flight
    cast_from = landed if by.world == 1 else landed + 1
    yield "sharded", cast_from, min(landed + 1, end), sum([size.cast_shard for size in sizes])
