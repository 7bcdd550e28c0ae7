"""The kernels that encode and decode against torch's own operations: bit for bit."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from compiled_fsdp.buckets import encode as ops
from compiled_fsdp.buckets.codec import NAMES, Codec, byte_offsets
from tests.passes.kernels.conftest import DEVICE

CUDA = DEVICE.type == "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
thorough = settings(
    max_examples=200 if CUDA else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
codecs = st.builds(
    lambda name, block: str(Codec.of(name, block)), st.sampled_from(NAMES), st.sampled_from([16, 48, 64])
)


def tensors(numels: list[int], rows: int, dtypes: list[torch.dtype], seed: int = 0) -> list[Tensor]:
    """Numbers of very different sizes, `[rows * numel]`, that bfloat16 and float16 hold, so that casts are exact."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for numel, dtype in zip(numels, dtypes, strict=True):
        sizes = torch.logspace(-4, 3, 8)[torch.randint(8, (rows * numel,), generator=generator)]
        noise = torch.randn(rows * numel, generator=generator) * sizes
        found.append(noise.bfloat16().half().to(dtype))
    return found


def moved(given_: list[Tensor] | None) -> list[Tensor] | None:
    return None if given_ is None else [tensor.to(DEVICE, copy=True) for tensor in given_]


@given(
    text=codecs,
    numels=st.lists(st.sampled_from([0, 1, 5, 16, 48, 63, 64, 160, 5000]), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    data=st.data(),
    feedback=st.booleans(),
)
@thorough
def test_encode(codec, text, numels, rows, data, feedback):
    """Elements, scales and zeros, and what is kept: any dtypes, sizes, blocks."""
    given_ = tensors(numels, rows, [data.draw(st.sampled_from(DTYPES)) for _ in numels])
    if text == "bfloat16":  # the interpreter cuts off what is rounded: see test_rounding_to_bfloat16
        given_, feedback = [tensor.bfloat16().to(tensor.dtype) for tensor in given_], False
    kept = [t.view(rows, -1).float() / 3 if t.numel() else t.new_empty(rows, 0).float() for t in given_]
    ours, theirs = (moved(kept), kept) if feedback else (None, None)
    found = codec.encode(moved(given_), rows, text, ours)
    assert torch.equal(found.cpu(), ops.encode(given_, rows, text, theirs))
    if feedback:
        for mine, reference in zip(ours, theirs, strict=True):
            assert torch.equal(mine.cpu(), reference)


@given(
    text=codecs,
    numels=st.lists(st.sampled_from([0, 1, 5, 16, 48, 63, 64, 160, 5000]), min_size=1, max_size=3),
    rows=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
    average=st.booleans(),
    data=st.data(),
)
@thorough
def test_decode(codec, text, numels, rows, dtype, average, data):
    """Each tensor of a bucket, and the sum of its rows from any rank's place."""
    given_ = tensors(numels, rows, [torch.float32] * len(numels))
    bucket = ops.encode(given_, rows, text)
    rank = data.draw(st.integers(0, rows - 1))
    for place, numel in zip(byte_offsets(text, numels), numels, strict=False):
        where = place, numel, rows
        assert torch.equal(
            codec.decode(bucket.to(DEVICE), *where, text, dtype).cpu(), ops.decode(bucket, *where, text, dtype)
        )
        how = rank, average, text, dtype
        assert torch.equal(
            codec.decode_sum(bucket.to(DEVICE), *where, *how).cpu(), ops.decode_sum(bucket, *where, *how)
        )


@pytest.mark.parametrize("text", ["int8/32", "float8_e4m3fn/32"])
def test_what_cannot_be_held(codec, text):
    """A block with an infinity or a NaN is NaN, and leaves nothing; subnormal ones are zeros."""
    x = torch.zeros(4, 96)
    x[0, 3], x[1, 40], x[2, 70], x[3, 5] = float("inf"), float("nan"), -float("inf"), 1e-42
    x[0, 4] = 5.0
    (mine,), reference = moved([torch.ones_like(x)]), torch.ones_like(x)
    bucket = codec.encode(moved([x]), 4, text, [mine])
    expected = ops.decode(ops.encode([x], 4, text, [reference]), 0, 96, 4, text, torch.float32)
    found = codec.decode(bucket, 0, 96, 4, text, torch.float32).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().sum() == 3 * 32
    assert torch.equal(mine.cpu(), reference)


def test_every_8_bit_number(codec):
    """Each is encoded as itself, and what lies in the middle of two as the even one."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, halves, torch.full((-(numbers.numel() + halves.numel()) % 16,), 448.0)])
    text = f"float8_e4m3fn/{x.numel()}"  # its largest is 448, so that the scale is 1
    found = codec.decode(codec.encode(moved([x]), 1, text), 0, x.numel(), 1, text, torch.float32)
    assert torch.equal(found.cpu(), x.to(torch.float8_e4m3fn).float())


def test_rounding_to_bfloat16(codec):
    """To the nearest, as torch does. The interpreter cuts off, so there within a unit of the last place."""
    (x,) = tensors([5000], 2, [torch.float32])
    x = x * 1.001
    (residual,) = moved([torch.zeros(2, 5000)])
    sent = codec.decode(codec.encode(moved([x]), 2, "bfloat16", [residual]), 0, 5000, 2, "bfloat16", torch.float32)
    torch.testing.assert_close(sent.cpu(), x.bfloat16().float(), rtol=0 if CUDA else 2**-7, atol=0)
    assert torch.equal((sent.view(2, -1) + residual).cpu(), x.view(2, -1))


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_at_any_address(codec, shift):
    """Tensors that begin between two multiples of 16 bytes, with programs that are full."""
    memory = torch.linspace(-3, 3, 3 * 4096 + 8)
    for text in ("int8/256", "float8_e4m3fn/64", "int8/48"):
        views = [memory[shift : shift + 2 * 4096], memory[shift : shift + 4100]]
        there = memory.to(DEVICE)
        found = codec.encode([there[shift : shift + 2 * 4096], there[shift : shift + 4100]], 2, text)
        assert torch.equal(found.cpu(), ops.encode(views, 2, text))


def test_a_bucket_beyond_int32(codec):
    """A row that begins beyond 2**31 bytes; memory is reserved, and hardly touched."""
    if CUDA and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    text, row = "int8/64", 2**31 + 64
    encoded = ops.encode([torch.linspace(-1, 1, 64)], 1, text)
    bucket = torch.empty(3 * row, dtype=torch.uint8, device=DEVICE)
    for line in range(3):
        bucket[line * row + 48 :][: encoded.numel()] = encoded.to(DEVICE)
    expected = ops.decode(encoded, 0, 64, 1, text, torch.float32)
    assert torch.equal(codec.decode(bucket, 48, 64, 3, text, torch.float32).cpu(), expected.repeat(3))
    total = codec.decode_sum(bucket, 48, 64, 3, 1, False, text, torch.float32)
    assert torch.equal(total.cpu(), expected + expected + expected)
