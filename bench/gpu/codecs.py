"""Time the encoding and decoding of a bucket: compiled_fsdp's kernels beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.copies import OURS, WORLD, Bucket, Buffers, copies_of, layer_of, many
from bench.gpu.record import Record
from bench.gpu.timing import Call, rotations, timings
from compiled_fsdp.buckets.codec import byte_offsets

CODECS = ("bfloat16", "int8/256", "float8_e4m3fn/256")
_ours = torch.ops.compiled_fsdp


def _encode_shards(b: Buffers, codec: str) -> Call:
    return partial(_ours.encode.default, b.shards, 1, codec)


def _decode_fulls(b: Buffers, codec: str) -> Call:
    return _each(b, codec, lambda *at: _ours.decode.default(*at, codec, torch.bfloat16))


def _encode_grads(b: Buffers, codec: str) -> Call:
    return partial(_ours.encode.default, b.grads, WORLD, codec)


def _decode_sum(b: Buffers, codec: str) -> Call:
    return _each(b, codec, lambda *at: _ours.decode_sum.default(*at, 1, True, codec, torch.float32))


def _each(b: Buffers, codec: str, decode: Callable[..., Tensor]) -> Call:
    """Return a call that decodes every tensor of a bucket of ``WORLD`` rows."""
    bucket, numels = _ours.encode.default(b.grads, WORLD, codec), b.bucket.shards
    places = byte_offsets(codec, numels)

    def run() -> list[Tensor]:
        return [decode(bucket, place, numel, WORLD) for place, numel in zip(places, numels, strict=False)]

    return run


# By operation: the function that makes its call, the bytes of an element that is not encoded, and whether the operation
# works on one rank's part alone.
SYSTEMS: dict[str, tuple[Callable[[Buffers, str], Call], int, bool]] = {
    "encode shards": (_encode_shards, 4, True),
    "decode parameters": (_decode_fulls, 2, False),
    "encode gradients": (_encode_grads, 2, False),
    "decode and add gradients": (_decode_sum, 4, False),
}


def bytes_of(what: str, bucket: Bucket, codec: str) -> int:
    """Return the bytes that an operation reads and writes. The result of a sum is one rank's part."""
    _, exact, one_rank = SYSTEMS[what]
    encoded, elements = byte_offsets(codec, bucket.shards)[-1], sum(bucket.shards)
    rows = 1 if one_rank else WORLD
    return rows * encoded + (1 if what == "decode and add gradients" else rows) * elements * exact


def measure(device: torch.device, *, quick: bool) -> Iterator[Record]:
    """Yield records of each operation and codec, and of the copies that they are compared with."""
    for bucket in [layer_of(0.25)] if quick else [layer_of(16), layer_of(256), many(64, 64)]:
        for what, (make, _, _) in SYSTEMS.items():
            for codec in CODECS:
                nbytes = bytes_of(what, bucket, codec)
                sets = [Buffers(bucket, device) for _ in range(rotations(nbytes, device))]
                calls = [make(buffers, codec) for buffers in sets]
                calls[0]()  # compiles the kernel, and makes its tables
                found = timings({"copy": copies_of(nbytes, device), OURS: calls}, device, 3 if quick else 20)
                for name, timing in found.items():
                    yield Record(
                        f"codec: {what}, {codec}", name, nbytes, len(bucket.numels), timing.seconds,
                        nbytes / timing.seconds / 1e9, found["copy"].seconds / timing.seconds,
                        {"bucket": bucket.name, "quartiles": timing.quartiles, "host_seconds": timing.host},
                    )  # fmt: skip
