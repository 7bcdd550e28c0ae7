"""What the compiler makes of the kernel for GPUs that need not be there: 16 bytes at a time, and little else."""

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")

from bench.gpu.code import CAPABILITIES, Code, CodecVariant, Variant, compiled, compiled_codec
from bench.gpu.codecs import CODECS
from compiled_fsdp.buckets.kernels import copy, layout
from tests.harness import variants

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def vectors(variant: Variant, dtype: str) -> int:
    """Accesses of 16 bytes that a thread needs for its elements."""
    return variant.block // (32 * copy.warps(variant.block)) * ITEMSIZE[dtype] // 16


def assert_by_vectors(variant: Variant, code: Code) -> None:
    source, target = (variant.kind, variant.bucket) if variant.pack else (variant.bucket, variant.kind)
    assert code.loads[128] == vectors(variant, source)
    assert code.stores[128] == vectors(variant, target)
    assert code.spilled == 0


@pytest.mark.parametrize("capability", variants(CAPABILITIES, 90))
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("kind", "bucket"), [("fp32", "bf16"), ("bf16", "bf16")])
def test_16_bytes_at_a_time(kind, bucket, pack, capability):
    """Loads and stores of both sides, where they are aligned, and no division."""
    variant = Variant(kind, bucket, pack)
    code = compiled(variant, capability)
    assert_by_vectors(variant, code)
    assert code.calls == 0


@pytest.mark.parametrize("capability", variants(CAPABILITIES, 90))
@pytest.mark.parametrize("pack", [True, False])
def test_pieces_16_bytes_at_a_time(pack, capability):
    """What is sharded on another dimension; a long division for the block, in each branch, and none for elements."""
    variant = Variant("bf16", "bf16", pack, strided=True)
    code = compiled(variant, capability)
    assert_by_vectors(variant, code)
    assert code.calls == 2


@pytest.mark.parametrize("block", variants(layout.BLOCKS, *layout.BLOCKS[:2]))
def test_small_blocks(block):
    variant = Variant("fp32", "bf16", pack=True, block=block)
    assert_by_vectors(variant, compiled(variant, 90))


@pytest.mark.parametrize("pack", [True, False])
def test_element_by_element_where_it_is_not_aligned(pack):
    """The other branch is not told that it is: as many accesses of two bytes as a thread has elements."""
    code = compiled(Variant("bf16", "bf16", pack), 90)
    for accesses in (code.loads, code.stores):
        assert accesses[16] >= layout.BLOCKS[0] // (32 * copy.warps(layout.BLOCKS[0]))


@pytest.mark.parametrize("strided", [False, True])
def test_mixed_dtypes(strided):
    """Tensors of any dtype in one launch: each is read by vectors."""
    code = compiled(Variant(None, "bf16", pack=True, strided=strided), 90)
    assert code.loads[128] >= vectors(Variant("fp32", "bf16", pack=True), "fp32") + vectors(
        Variant("bf16", "bf16", pack=True), "bf16"
    )
    assert code.spilled == 0


@pytest.mark.parametrize(
    ("text", "kind", "capability"),
    variants(
        [("int8/256", "fp32", 80), ("int8/256", "bf16", 100), *((text, "fp32", 90) for text in CODECS)],
        ("int8/256", "fp32", 90),
    ),
)
def test_codecs_16_bytes_at_a_time(text, kind, capability):
    """A thread's 16 elements, exact and encoded, and no division but of scales."""
    exact, encoded = ITEMSIZE[kind], 2 if text == "bfloat16" else 1
    encode = compiled_codec(CodecVariant(text, kind, "encode"), capability)
    assert (encode.loads[128], encode.stores[128]) == (exact, encoded)
    decode = compiled_codec(CodecVariant(text, kind, "decode"), capability)
    assert (decode.loads[128], decode.stores[128]) == (encoded, exact)
    assert (encode.spilled, decode.spilled) == (0, 0)
    assert decode.calls == 0
    added = compiled_codec(CodecVariant(text, kind, "decode_sum"), capability)
    assert added.stores[128] == exact
    assert added.loads[128] >= 2 * encoded  # of the first row, and of other ones
    assert added.loads[128] % encoded == 0
    with_feedback = compiled_codec(CodecVariant(text, kind, "encode", feedback=True), capability)
    assert with_feedback.stores[128] == encoded + 4
    assert with_feedback.spilled == 0
