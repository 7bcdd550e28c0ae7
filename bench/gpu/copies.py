"""Time packing and unpacking of buckets: compiled_fsdp's kernels, a copy, torch's operations, FSDP2's ops and Inductor.

It measures all work that one of ``WORLD`` GPUs does for a bucket, except the collective. A record's bytes are those
that any implementation has to read and write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # FSDP2's ops
from torch import Tensor

from bench.gpu.record import Record, not_measured
from bench.gpu.timing import Call, rotations, timings
from compiled_fsdp.buckets.kernels import layout, ops

WORLD = 8
OURS = "compiled_fsdp"
INDUCTOR = "Inductor"
MOST_FOR_INDUCTOR = 100


@dataclass(frozen=True)
class Bucket:
    """A bucket of full parameters, with float32 shards and bfloat16 in the bucket.

    ``numels`` has the parameters' numbers of elements, each a multiple of ``WORLD``.
    """

    name: str
    numels: tuple[int, ...]
    # How many elements of a shard are contiguous in the full parameter. None: all, because it is sharded by rows.
    inner: int | None = None

    @property
    def shards(self) -> list[int]:
        return [numel // WORLD for numel in self.numels]

    @property
    def inners(self) -> list[int]:
        return [self.inner or shard for shard in self.shards]


def layer_of(megabytes: float) -> Bucket:
    """Return the nine parameters of a Llama layer, of ``megabytes`` MB (2**20 bytes) in bfloat16 altogether."""
    width = int(math.sqrt(megabytes * 2**20 / 2 / 12.5)) // 16 * 16
    sizes = [width * width] * 4 + [width * (width * 17 // 6 // 16 * 16)] * 3 + [width] * 2
    return Bucket(f"layer of {megabytes:g} MB", tuple(n // (16 * WORLD) * 16 * WORLD or WORLD for n in sizes))


def many(tensors: int, kilobytes: int) -> Bucket:
    """Return equal small tensors, of ``kilobytes`` KB (2**10 bytes) in bfloat16 each."""
    return Bucket(f"{tensors} of {kilobytes} KB", (kilobytes * 512,) * tensors)


def unaligned(bucket: Bucket) -> Bucket:
    """Return ``bucket`` with fewer elements in each tensor, so that no shard begins at a multiple of 16 bytes."""
    return Bucket(f"{bucket.name}, unaligned", tuple(n - 3 * WORLD for n in bucket.numels))


def by_columns(megabytes: float) -> Bucket:
    """Return four equal matrices of ``megabytes`` MB altogether, each sharded on its second dimension."""
    width = int(math.sqrt(megabytes * 2**20 / 2 / 4)) // (16 * WORLD) * 16 * WORLD
    return Bucket(f"columns of {megabytes:g} MB", (width * width,) * 4, width // WORLD)


@dataclass
class Buffers:
    """The tensors that the measured calls read."""

    bucket: Bucket
    device: torch.device
    shards: list[Tensor] = field(init=False)
    grads: list[Tensor] = field(init=False)
    gathered: Tensor = field(init=False)
    reduced: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device, total = self.device, sum(self.bucket.numels)
        self.shards = [torch.randn(n, device=device) for n in self.bucket.shards]
        self.grads = [torch.randn(n, device=device, dtype=torch.bfloat16) for n in self.bucket.numels]
        self.gathered = torch.randn(total, device=device, dtype=torch.bfloat16)
        self.reduced = torch.randn(total // WORLD, device=device, dtype=torch.bfloat16)

    def in_our_layout(self, bucket: Tensor, world: int) -> tuple[Tensor, list[int]]:
        """Return a dense bucket in the layout of compiled_fsdp's kernels, and the offsets at which its shards begin."""
        segments = layout.packed(tuple(self.bucket.shards))
        ours = bucket.new_zeros(world, segments.row)
        pieces = bucket.view(world, -1).split(self.bucket.shards, 1)
        for piece, offset in zip(pieces, segments.offsets, strict=True):
            ours[:, offset : offset + piece.shape[1]] = piece
        return ours.view(-1), list(segments.offsets)


Make = Callable[[Buffers], Call]


# ---- compiled_fsdp ---------------------------------------------------------------------------------------------------
def our_pack_shards(b: Buffers) -> Call:
    return partial(torch.ops.compiled_fsdp.pack_shards, b.shards, torch.bfloat16)


def our_unpack_fulls(b: Buffers) -> Call:
    shards, inners = b.bucket.shards, b.bucket.inners
    gathered, offsets = b.in_our_layout(b.gathered, WORLD)
    return partial(torch.ops.compiled_fsdp.unpack_fulls, gathered, offsets, shards, inners, WORLD)


def our_pack_grads(b: Buffers) -> Call:
    shards, inners = b.bucket.shards, b.bucket.inners
    return partial(torch.ops.compiled_fsdp.pack_grads, b.grads, shards, inners, WORLD, torch.float32, 1.0)


def our_unpack_shards(b: Buffers) -> Call:
    reduced, offsets = b.in_our_layout(b.reduced, 1)
    return partial(torch.ops.compiled_fsdp.unpack_shards, reduced, offsets, b.bucket.shards, torch.float32, 2.0)


# ---- torch's own operations ------------------------------------------------------------------------------------------
def foreach_pack_shards(b: Buffers) -> Call:
    def run() -> Tensor:
        out = torch.empty(sum(b.bucket.shards), device=b.device, dtype=torch.bfloat16)
        torch._foreach_copy_(list(out.split(b.bucket.shards)), b.shards)
        return out

    return run


def foreach_unpack_fulls(b: Buffers) -> Call:
    def run() -> list[Tensor]:
        outs = [torch.empty(n, device=b.device, dtype=torch.bfloat16) for n in b.bucket.numels]
        pieces = b.gathered.view(WORLD, -1).split(b.bucket.shards, 1)
        torch._foreach_copy_([out.view(WORLD, -1) for out in outs], list(pieces))
        return outs

    return run


def foreach_pack_grads(b: Buffers) -> Call:
    def run() -> Tensor:
        return torch.cat([grad.float().view(WORLD, -1) for grad in b.grads], 1)

    return run


def foreach_unpack_shards(b: Buffers) -> Call:
    def run() -> list[Tensor]:
        pieces = torch._foreach_div(list(b.reduced.split(b.bucket.shards)), 2.0)
        outs = [torch.empty_like(piece, dtype=torch.float32) for piece in pieces]
        torch._foreach_copy_(outs, list(pieces))
        return outs

    return run


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------
def fsdp2_pack_shards(b: Buffers) -> Call:
    """Like ``_get_param_all_gather_inputs`` and ``foreach_all_gather``: one cast of all parameters, then the copies."""
    shards = b.bucket.shards

    def run() -> Any:
        sent = torch.empty(sum(shards), device=b.device, dtype=torch.bfloat16).split(shards)
        torch._foreach_copy_(list(sent), b.shards)
        out = torch.empty(WORLD * sum(shards), device=b.device, dtype=torch.bfloat16)
        return torch.ops.fsdp.all_gather_copy_in(list(sent), out, shards, sum(shards), 0)

    return run


def fsdp2_unpack_fulls(b: Buffers) -> Call:
    """Like ``foreach_all_gather_copy_out``; its outputs are allocated anew, like after each reshard."""
    shards = b.bucket.shards

    def run() -> list[Tensor]:
        outs = [torch.empty(n, device=b.device, dtype=torch.bfloat16) for n in b.bucket.numels]
        torch.ops.fsdp.split_with_sizes_copy(
            b.gathered.view(WORLD, -1), shards, dim=1, out=[out.view(WORLD, -1) for out in outs]
        )
        return outs

    return run


def fsdp2_pack_grads(b: Buffers) -> Call:
    """Like ``foreach_reduce``'s copy in, with the op that FSDP2 calls in this version of torch."""
    chunk_cat = getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", torch.ops.fsdp.chunk_cat)

    def run() -> Tensor:
        out = torch.empty(sum(b.bucket.numels), device=b.device, dtype=torch.float32)
        chunk_cat([grad.view(WORLD, -1) for grad in b.grads], dim=0, num_chunks=WORLD, out=out.view(WORLD, -1))
        return out

    return run


def fsdp2_unpack_shards(b: Buffers) -> Call:
    """Like ``foreach_reduce``'s end: one division and one cast of the whole output; gradients are views of it."""

    def run() -> Tensor:
        return (b.reduced / 2.0).to(torch.float32)

    return run


# ---- Inductor --------------------------------------------------------------------------------------------------------
def inductor(function: Callable[..., Any], argument: str) -> Make:
    """Return a maker of calls to ``function``, which does one op's work in plain torch, compiled for each bucket.

    The call reads the attribute of ``Buffers`` that ``argument`` names.
    """

    def make(b: Buffers) -> Call:
        return partial(_compiled(function, b.bucket), getattr(b, argument))

    return make


_known: dict[Any, Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any], bucket: Bucket) -> Callable[..., Any]:
    if (function, bucket) not in _known:
        torch._dynamo.reset()
        _known[function, bucket] = torch.compile(partial(function, bucket), dynamic=False)
    return _known[function, bucket]


def _plain_pack_shards(bucket: Bucket, shards: list[Tensor]) -> Tensor:
    return ops._pack_shards(shards, torch.bfloat16)


def _plain_unpack_fulls(bucket: Bucket, gathered: Tensor) -> list[Tensor]:
    pieces = gathered.view(WORLD, -1).split(bucket.shards, 1)
    return [piece.reshape(-1) for piece in pieces]


def _plain_pack_grads(bucket: Bucket, grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.float().view(WORLD, -1) for grad in grads], 1)


def _plain_unpack_shards(bucket: Bucket, reduced: Tensor) -> list[Tensor]:
    return [(piece / 2.0).float() for piece in reduced.split(bucket.shards)]


SYSTEMS: dict[str, dict[str, Make]] = {
    "pack shards": {
        OURS: our_pack_shards,
        "torch, foreach": foreach_pack_shards,
        "FSDP2's ops": fsdp2_pack_shards,
        INDUCTOR: inductor(_plain_pack_shards, "shards"),
    },
    "unpack parameters": {
        OURS: our_unpack_fulls,
        "torch, foreach": foreach_unpack_fulls,
        "FSDP2's ops": fsdp2_unpack_fulls,
        INDUCTOR: inductor(_plain_unpack_fulls, "gathered"),
    },
    "pack gradients": {
        OURS: our_pack_grads,
        "torch, cat": foreach_pack_grads,
        "FSDP2's ops": fsdp2_pack_grads,
        INDUCTOR: inductor(_plain_pack_grads, "grads"),
    },
    "unpack gradients": {
        OURS: our_unpack_shards,
        "torch, foreach": foreach_unpack_shards,
        "FSDP2's ops": fsdp2_unpack_shards,
        INDUCTOR: inductor(_plain_unpack_shards, "reduced"),
    },
}


def bytes_of(what: str, bucket: Bucket) -> int:
    """Return the bytes that an operation reads and writes.

    Shards and their gradients are float32. All other tensors are bfloat16, except the packed gradients: float32.
    """
    total = sum(bucket.numels)
    return {
        "pack shards": (4 + 2) * total // WORLD,
        "unpack parameters": (2 + 2) * total,
        "pack gradients": (2 + 4) * total,
        "unpack gradients": (2 + 4) * total // WORLD,
    }[what]


def measure(device: torch.device, *, quick: bool) -> Iterator[Record]:
    """Yield records of every operation, bucket and system, and of the copies that they are compared with."""
    buckets = [layer_of(0.25), many(16, 4), by_columns(0.25)] if quick else [
        layer_of(4), layer_of(16), layer_of(64), layer_of(256), many(64, 64), many(256, 32), many(1000, 8),
        unaligned(layer_of(64)), by_columns(64),
    ]  # fmt: skip
    repeats = 3 if quick else 20
    for bucket in buckets:
        for what, systems in SYSTEMS.items():
            nbytes = bytes_of(what, bucket)
            sets = [Buffers(bucket, device) for _ in range(rotations(nbytes, device))]
            calls = {}
            for name, make in systems.items():
                try:
                    calls[name] = _calls_of(name, make, bucket, sets)
                except Exception as error:  # a comparator may raise anything: we still measure the other systems
                    if name == OURS:
                        raise
                    yield not_measured(f"bucket: {what}", f"{name}, {bucket.name}: {error}")
            found = timings({"copy": copies_of(nbytes, device), **calls}, device, repeats)
            copy = found["copy"].seconds
            for name, timing in found.items():
                yield Record(
                    f"bucket: {what}", name, nbytes, len(bucket.numels), timing.seconds, nbytes / timing.seconds / 1e9,
                    copy / timing.seconds,
                    {"bucket": bucket.name, "quartiles": timing.quartiles, "host_seconds": timing.host},
                )  # fmt: skip
            del sets, calls


class NotCompared(Exception):
    """The system is not measured on this bucket, for the reason in the message."""


def _calls_of(name: str, make: Make, bucket: Bucket, sets: list[Buffers]) -> list[Call]:
    """Return a call for each set of buffers, after running the first of them."""
    if bucket.inner is not None and name != OURS:
        raise NotCompared("written for parameters that are sharded by rows")
    if name == INDUCTOR and len(bucket.numels) > MOST_FOR_INDUCTOR:
        raise NotCompared(f"its code for over {MOST_FOR_INDUCTOR} tensors takes minutes to compile")
    calls = [make(buffers) for buffers in sets]
    calls[0]()
    return calls


def copies_of(nbytes: int, device: torch.device) -> list[Call]:
    """Return device-to-device copies, each of which reads and writes ``nbytes`` bytes in sum."""
    half = max(nbytes // 2, 1)
    pairs = [
        [torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(rotations(nbytes, device))
    ]
    return [partial(Tensor.copy_, *pair) for pair in pairs]
