"""Encoding and decoding alone, against a plain definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.buckets import collectives  # noqa: F401  registers the ops
from compiled_fsdp.buckets import encode as ops
from compiled_fsdp.buckets.codec import NAMES, Codec, byte_offsets, nbytes
from tests.codecs.reference import through

ours = torch.ops.compiled_fsdp


def texts(names=NAMES):
    return st.builds(lambda name, block: str(Codec.of(name, block)), st.sampled_from(names), st.sampled_from([16, 64]))


def tensors(numels, rows, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 3, 7)[torch.randint(7, (rows, max(numels)), generator=generator)]
    noise = torch.randn(rows, max(numels), generator=generator) * sizes
    return [noise[:, :numel].to(dtype) for numel in numels]


@given(
    texts(),
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_a_bucket_carries_each_tensor_by_itself(codec, numels, rows, dtype, average):
    """What comes out depends on the tensor alone; sums are in float32, from the rank before this one downwards."""
    given_ = tensors(numels, rows, dtype)
    bucket = ours.encode(given_, rows, codec)
    *places, row = byte_offsets(codec, numels)
    assert bucket.numel() == rows * row == rows * sum(nbytes(codec, n) for n in numels)
    how = Codec.parse(codec)
    for tensor, place, numel in zip(given_, places, numels, strict=True):
        expected = torch.stack([through(how.name, line, how.block or 1) for line in tensor])
        found = ours.decode(bucket, place, numel, rows, codec, torch.float32).view(rows, numel)
        assert torch.equal(found, expected)
        narrow = ours.decode(bucket, place, numel, rows, codec, torch.bfloat16).view(rows, numel)
        assert torch.equal(narrow, expected.bfloat16())
        total = expected[0]
        for after in range(1, rows):
            total = total + expected[-after]
        total = total / rows if average else total
        assert torch.equal(ours.decode_sum(bucket, place, numel, rows, 1, average, codec, torch.float32), total)


@given(texts(), st.integers(1, 300), st.integers(0, 5))
def test_what_is_lost_is_carried_later(codec, numel, seed):
    """Sent and kept together are what was to be sent, up to float32's rounding."""
    (tensor,) = tensors([numel], 2, seed=seed)
    residual = torch.zeros(2, numel)
    sent = torch.zeros(2, numel)
    for _ in range(3):
        bucket = ops.encode([tensor], 2, codec, [residual])
        sent += ours.decode(bucket, 0, numel, 2, codec, torch.float32).view(2, numel)
    torch.testing.assert_close(sent + residual, 3 * tensor, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("codec", ["int8/32", "float8_e4m3fn/32"])
def test_what_cannot_be_held(codec):
    """Infinities and NaN make their block NaN, and no other; zeros and what is next to them are zeros."""
    x = torch.zeros(4, 96)
    x[0, 3], x[1, 40], x[2, 70], x[3, 5] = float("inf"), float("nan"), -float("inf"), 1e-42
    residual = torch.zeros_like(x)
    found = ours.decode(ops.encode([x], 4, codec, [residual]), 0, 96, 4, codec, torch.float32).view(4, 3, 32)
    lost = torch.zeros(4, 3, dtype=torch.bool)
    lost[0, 0] = lost[1, 1] = lost[2, 2] = True
    assert torch.equal(found.isnan().any(2), lost)
    assert torch.equal(found.isnan().all(2), lost)
    assert not found[~lost].any()
    assert residual.isfinite().all()


def test_all_8_bit_numbers():
    """By their bits, as torch casts them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = ~numbers.float().isnan()
    found = ops._narrow_floats(numbers).float() * 256
    assert torch.equal(found[finite], numbers.float()[finite])


def test_large_tensors_go_in_pieces():
    """Of whole blocks, whatever fits into the cache."""
    (x,) = tensors([3 * ops._ELEMENTS_AT_ONCE + 77], 2)
    codec = "int8/64"
    found = ours.decode(ours.encode([x], 2, codec), 0, x.shape[1], 2, codec, torch.float32).view_as(x)
    assert torch.equal(found, torch.stack([through("int8", line, 64) for line in x]))
