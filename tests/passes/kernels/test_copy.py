"""The kernel against plain torch: what it copies, casts and divides. Bit for bit where nothing is rounded."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from compiled_fsdp.buckets.kernels import layout, ops
from compiled_fsdp.buckets.kernels.layout import KINDS
from tests.passes.kernels.conftest import DEVICE

BLOCK = 64
"""Small, so that tensors have several blocks: the interpreter runs them one by one."""
CUDA = DEVICE.type == "cuda"
thorough = settings(
    max_examples=200 if CUDA else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Case:
    """Parameters by shape, sharded dimension and dtype, over ``world`` ranks."""

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    kinds: tuple[torch.dtype, ...]
    world: int

    @property
    def shards(self) -> list[tuple[int, ...]]:
        return [
            tuple(-(-n // self.world) if i == dim else n for i, n in enumerate(size))
            for size, dim in zip(self.sizes, self.dims, strict=True)
        ]

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(torch.Size(shard).numel() for shard in self.shards)

    @property
    def inners(self) -> tuple[int, ...]:
        return tuple(layout.inner_of(shard, dim) for shard, dim in zip(self.shards, self.dims, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 4))
    sizes, dims = [], []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 33, 48]), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(size) - 1))
        if dim > 0:  # other dimensions are split evenly
            size[dim] = world * -(-size[dim] // world)
        sizes.append(tuple(size))
        dims.append(dim)
    one = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=len(sizes), max_size=len(sizes)))
    return Case(tuple(sizes), tuple(dims), (kinds[0],) * len(sizes) if one else tuple(kinds), world)


def tensors(sizes: object, kinds: object, *, seed: int = 0) -> list[Tensor]:
    """Numbers that any of ``KINDS`` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(-128, 128, tuple(size), generator=generator) / 8).to(kind).to(DEVICE)
        for size, kind in zip(sizes, kinds, strict=True)
    ]


@pytest.mark.more
@given(case=cases(), dtype=st.sampled_from(KINDS))
@thorough
def test_pack_grads(copy, case, dtype):
    """Any mix of dtypes, sharded dimensions and uneven sizes, with a divisor that is exact."""
    grads = tensors(case.sizes, case.kinds)
    limits = tuple(grad.numel() for grad in grads)
    segments = layout.packed(case.numels, case.inners, limits, case.world)
    bucket = torch.full((case.world * segments.row,), torch.nan, dtype=dtype, device=DEVICE)
    copy.pack(grads, bucket, segments, 4.0, BLOCK)
    expected = ops._pack_grads([g.cpu() for g in grads], case.numels, case.inners, case.world, dtype, 4.0)
    assert torch.equal(bucket.cpu(), expected)


@pytest.mark.more
@given(case=cases(), kind=st.sampled_from(KINDS))
@thorough
def test_unpack_fulls(copy, case, kind):
    """What was packed comes back, full; and some parameters alone from a bucket of more."""
    fulls = tensors(case.sizes, [kind] * len(case.sizes))
    bucket = ops._pack_grads([f.cpu() for f in fulls], case.numels, case.inners, case.world, kind, 1.0).to(DEVICE)
    offsets = layout.packed(case.numels).offsets
    for chosen in (range(len(fulls)), range(0, len(fulls), 2)):
        given_ = [tuple(values[i] for i in chosen) for values in (offsets, case.numels, case.inners)]
        segments = layout.shards_of(bucket.numel(), *given_, case.world)
        flat = torch.full((segments.places[-1],), torch.nan, dtype=kind, device=DEVICE)
        copy.unpack(bucket, flat, segments, block=BLOCK)
        expected = ops._unpack_fulls(bucket.cpu(), *given_, case.world)
        for place, numel, i in zip(segments.places, segments.numels, chosen, strict=False):
            piece = flat[place : place + case.world * numel].cpu()
            assert torch.equal(piece, expected[place : place + case.world * numel])
            assert torch.equal(piece[: fulls[i].numel()], fulls[i].flatten().cpu())


@pytest.mark.more
@given(case=cases(), kind=st.sampled_from(KINDS), dtype=st.sampled_from(KINDS))
@thorough
def test_shards(copy, case, kind, dtype):
    """Shards into a bucket and out again, cast both ways, divided by a power of two."""
    shards = tensors(case.shards, case.kinds)
    segments = layout.packed(case.numels)
    bucket = torch.full((segments.row,), torch.nan, dtype=kind, device=DEVICE)
    copy.pack(shards, bucket, segments, block=BLOCK)
    assert torch.equal(bucket.cpu(), ops._pack_shards([s.cpu() for s in shards], kind))
    flat = torch.full((layout.places(case.numels)[-1],), torch.nan, dtype=dtype, device=DEVICE)
    segments = layout.shards_of(bucket.numel(), segments.offsets, case.numels, case.numels, 1)
    copy.unpack(bucket, flat, segments, 2.0, BLOCK)
    expected = ops._unpack_shards(bucket.cpu(), segments.offsets, case.numels, dtype, 2.0)
    for place, shard in zip(segments.places, shards, strict=False):
        piece = slice(place, place + shard.numel())
        assert torch.equal(flat[piece].cpu(), expected[piece])
        assert torch.equal(flat[piece].cpu(), (shard.flatten().to(kind) / 2).to(dtype).cpu())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding(copy, kind):
    """Casts round to the nearest, divisions once: as torch does.

    The interpreter cuts float32 to bfloat16 off, so there within a unit of the last place.
    """
    shards = [torch.randn(100, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
    segments = layout.packed((100,) * 3)
    bucket = torch.empty(segments.row, dtype=kind, device=DEVICE)
    copy.pack(shards, bucket, segments, 3.0, BLOCK)
    expected = ops._pack_grads([s.cpu() for s in shards], [100] * 3, [100] * 3, 1, kind, 3.0)
    if CUDA or kind is not torch.bfloat16:
        assert torch.equal(bucket.cpu(), expected)
    else:
        torch.testing.assert_close(bucket.cpu(), expected, rtol=2**-6, atol=0)


def test_specials(copy):
    """Infinities and NaN stay what they are."""
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 65536.0], device=DEVICE)
    bucket = torch.empty(16, dtype=torch.float16, device=DEVICE)
    copy.pack([values], bucket, layout.packed((5,)), block=BLOCK)
    torch.testing.assert_close(bucket[:5].cpu(), values.cpu().half(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.more
def test_a_thousand_tensors(copy):
    shards = tensors([(1 + i % 7,) for i in range(1000)], [torch.float32] * 1000)
    segments = layout.packed(tuple(shard.numel() for shard in shards))
    bucket = torch.empty(segments.row, dtype=torch.bfloat16, device=DEVICE)
    copy.pack(shards, bucket, segments, block=BLOCK)
    assert torch.equal(bucket.cpu(), ops._pack_shards([s.cpu() for s in shards], torch.bfloat16))


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_tensors_at_any_address(copy, shift):
    """A view that begins between two multiples of 16 bytes, and tensors of odd sizes in the bucket."""
    memory = torch.arange(400.0, device=DEVICE)
    shards = [memory[shift : shift + 128], memory[130:133], memory[200:328]]
    segments = layout.packed((128, 3, 128))
    bucket = torch.full((segments.row,), torch.nan, device=DEVICE)
    copy.pack(shards, bucket, segments, block=BLOCK)
    assert torch.equal(bucket.cpu(), ops._pack_shards([shard.cpu() for shard in shards], torch.float32))


@pytest.mark.parametrize("inner", [16, 48, 80, 5])
def test_pieces_and_blocks(copy, inner):
    """Pieces of a shard that are smaller and larger than a block, beginning anywhere in it."""
    case = Case(((7, 3 * inner), (3 * 7, inner)), (1, 0), (torch.bfloat16,) * 2, 3)
    grads = tensors(case.sizes, case.kinds)
    segments = layout.packed(case.numels, case.inners, None, 3)
    bucket = torch.full((3 * segments.row,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    copy.pack(grads, bucket, segments, block=BLOCK)
    arguments = case.numels, case.inners, 3, torch.bfloat16, 1.0
    assert torch.equal(bucket.cpu(), ops._pack_grads([grad.cpu() for grad in grads], *arguments))
    flat = torch.full((segments.places[-1],), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    copy.unpack(bucket, flat, segments, block=BLOCK)
    for grad, place in zip(grads, segments.places, strict=False):
        assert torch.equal(flat[place : place + grad.numel()], grad.flatten())


def test_a_row_keeps_what_follows_aligned():
    """GPT-2 XL over 64 ranks: a bias leaves 25 elements a rank, and the matrix behind it begins at a multiple of 16."""
    segments = layout.packed((25, 160_000, 75), None, None, 64)
    assert segments.offsets == (0, 32, 160_032)
    assert segments.row == 160_112
    assert not any(offset % layout.ALIGNED for offset in (*segments.offsets, segments.row))


@pytest.mark.parametrize(
    ("numels", "block"),
    [((10**6, 64, 64), 4096), ((1000,) * 100, 1024), ((70,) * 9, 256), ((2048,), 4096), ((0,), 4096)],
)
def test_blocks_that_are_at_least_half_full(numels, block):
    """Where there are such, and no smaller than they have to be."""
    assert layout.packed(numels).block == block


def test_offsets_beyond_int32(copy):
    """The last tensor of a bucket of more than 2**31 elements: its place is computed in 64 bits.

    Memory is reserved, and not touched.
    """
    if CUDA and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    far = 2**31 + 48
    bucket = torch.empty(far + 80, dtype=torch.bfloat16, device=DEVICE)
    shard = torch.arange(80.0, device=DEVICE).bfloat16()
    segments = layout.Segments((far,), (80,), (80,), (80,), far + 80, 1)
    copy.pack([shard], bucket, segments, block=BLOCK)
    assert torch.equal(bucket[far:], shard)
    flat = torch.empty(80, dtype=torch.bfloat16, device=DEVICE)
    copy.unpack(bucket, flat, segments, block=BLOCK)
    assert torch.equal(flat, shard)


def test_tables_are_made_once(copy, monkeypatch):
    """Same tensors, same bucket: nothing goes to the device but the launch."""
    sent = []
    monkeypatch.setattr(
        layout, "to_device", lambda *given: sent.append(given[0]) or torch.tensor(given[0], device=DEVICE)
    )
    layout.addresses.cache_clear()
    shards = tensors([(3,), (70,)], [torch.float32] * 2)
    segments = layout.Segments((0, 16), (3, 70), (3, 70), (3, 70), 96, 1)
    bucket = torch.empty(96, device=DEVICE)
    copy.pack(shards, bucket, segments, block=BLOCK)
    assert len(sent) == 2
    copy.pack(shards, bucket, segments, block=BLOCK)
    assert len(sent) == 2
    again = [shard.clone() for shard in shards]
    copy.pack(again, bucket, segments, block=BLOCK)
    assert sent[2:] == [[shard.data_ptr() for shard in again]]
