"""The bytes of a bucket's tensors, and the memory that a bucket holds, from which segment to which.

The planner's simulator counts with them. ``passes/verify.py`` counts the memory of a graph independently of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from compiled_fsdp.buckets.spec import FLAT, SINGLE, Kind

MAX_GAP = 64
"""The most bytes that alignment adds behind each tensor if a kernel unpacks a bucket into one tensor."""


@dataclass(frozen=True)
class TensorSize:
    """The bytes on one rank of a tensor that is gathered or reduced.

    Unless said otherwise they are those of the full tensor, padded to equal shards.

    Attributes:
        sent: bytes as it is sent.
        decoded: bytes of the decoded tensor if it is sent encoded (it is then copied before and after); else 0.
        gap: the bytes that compiled_fsdp's kernels leave free behind its shards when they pack a bucket.
        host: bytes of a gathered parameter's shard if it is copied from host memory first (CPUOffloadPolicy); else 0.
        wider: by how many bytes the gradient that compute makes is larger than ``full``, because its dtype is wider
            than the dtype that is reduced. For example, by ``full`` if a float32 gradient is reduced in bfloat16.
        wider_shard: by how many bytes the reduced gradient's shard, in the dtype of ``.grad``, is larger than its share
            of ``full``.
        cast_shard: bytes of that shard that exist twice while it is cast from the dtype that is reduced.
        copied: whether it is copied before its launch even if it is alone in its bucket: a shard that is cast; a
            gradient that is cast, is padded, is not contiguous, or is not sharded on its first dimension.
        unpacked: whether a gathered parameter is copied after its wait even if it is alone in its bucket, because it is
            not sharded on its first dimension.
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
        """Bytes of the full tensor, not encoded."""
        return self.decoded or self.sent

    def is_packed(self, form: str) -> bool:
        """Whether the tensor is copied before the launch of a bucket of this form."""
        return form == FLAT or self.copied or self.decoded > 0

    def is_unpacked(self, form: str) -> bool:
        """Whether a gathered parameter is copied after the wait for a bucket of this form."""
        return form == FLAT or self.unpacked or self.decoded > 0


class Member(Protocol):
    """A tensor of a bucket, and the segments of the graph's compute (by number) between which it is needed."""

    @property
    def size(self) -> TensorSize:
        """The tensor's bytes."""

    @property
    def first(self) -> int:
        """The segment of a gathered parameter's first use; the segment before which a gradient is complete."""

    @property
    def last(self) -> int:
        """The segment of a gathered parameter's last use; the segment that needs the reduced gradient."""


class Sending(NamedTuple):
    """How a bucket is sent, as far as it matters for memory.

    Attributes:
        world: the number of ranks.
        received: 1 for a reduction by all-to-all, which receives as many bytes as it sends; 0 for another reduction,
            which receives one shard.
        kernels: whether compiled_fsdp's kernels pack and unpack flat buckets.
        parts: over how many parts of the ranks a reduced gradient is scattered by a second reduction; 1: there is none.
    """

    world: int
    received: float
    kernels: bool
    parts: int = 1


PARTS = ("unsharded", "bucket", "sharded")
"""The kinds of memory that a bucket holds: full tensors; bytes that are sent or received; shards of reduced gradients.
"""

Held = tuple[str, int, int, float]
"""Bytes that are alive from the start of one segment to the end of another: a kind (one of ``PARTS``), the first
segment, the last segment, the bytes.

Nothing is held if the last segment is before the first one. The bytes may be a fraction.
"""


def footprint(
    kind: Kind, form: str, members: Sequence[Member], at: int, wait: int, end: int, by: Sending
) -> Iterator[Held]:
    """The memory that a bucket holds.

    A gathered parameter lives from its launch to its last use. In a flat bucket it lives only from the wait on, and the
    bucket lives from the launch to the wait. Shards that were copied or cast for sending live from the launch to the
    wait, too. A gradient lives from its completion to the end of its reduction; in a flat bucket it lives only until
    the launch. A bucket that is sent encoded counts as flat.

    Args:
        kind: the bucket's kind.
        form: SINGLE, FLAT or COALESCED.
        members: the bucket's tensors.
        at: the segment right before which the bucket is launched.
        wait: the segment right before which the bucket is waited for.
        end: the graph's last segment.
        by: how the bucket is sent.
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
    # the wait is right before the first use, perhaps behind the wait for another bucket in the same segment
    yield "bucket", at, max(at, wait - 1) if whole else wait, packed / by.world
    if whole:
        yield "bucket", at, wait, packed
    if form == FLAT and by.kernels and not sizes[0].decoded:  # one tensor, which lives until its last part's last use
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
    landed = max(at, wait - 1)  # waits for reductions are at the start of their segment
    for m, size in zip(members, sizes, strict=True):
        yield "unsharded", m.first, at if whole or size.copied else landed, (size.decoded or size.sent) + size.wider
    yield "bucket", at, landed, packed
    total = sum([size.sent for size in sizes])
    if whole:
        yield "bucket", at, at, sum([size.full for size in sizes if size.copied])
        total += sum([size.gap for size in sizes])
    yield "bucket", at, landed, max(by.received, 1 / by.world) * total
    decoded = sum([size.decoded for size in sizes])
    shards = (decoded or total) / by.world / by.parts
    yield "sharded", landed + 1, end, shards + sum([size.wider_shard for size in sizes])
    if by.parts > 1:  # what the second reduction sends and, by all-to-all, receives
        yield "bucket", landed + 1, min(landed + 1, end), (1 + by.received) * total / by.world
    # with one rank the shard is as large as the gradient, and may be cast while the next collective is in flight
    cast_from = landed if by.world == 1 else landed + 1
    yield "sharded", cast_from, min(landed + 1, end), sum([size.cast_shard for size in sizes])
