"""What the compiler makes of the kernel for a GPU that need not be there: it copies 16 bytes at a time."""

import re

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_fsdp.comm.kernels import copy, layout

POINTERS = {"bucket": 0, "flat": 1}
H100 = GPUTarget("cuda", 90, 32)


def ptx(kind: str | None, bucket: str, *, pack: bool, strided: bool = False) -> str:
    signature = {
        "bucket": f"*{bucket}",
        "flat": f"*{bucket if pack or kind is None else kind}",
        "pointers": "*i64" if pack else f"*{bucket}",
        "table": "*i64",
        "tiles": "*i32",
        "row": "i64",
        "divide": "fp32",
    }
    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, None: None}
    constants = {"PACK": pack, "KIND": types[kind], "DIVIDE": True, "STRIDED": strided, "BLOCK": layout.BLOCK}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in POINTERS.values()}
    source = ASTSource(copy.copy_blocks, signature, constants, aligned)
    return triton.compile(source, target=H100, options={"num_warps": copy.WARPS}).asm["ptx"]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("kind", "bucket"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp32")])
def test_16_bytes_at_a_time(kind, bucket, pack):
    """Loads and stores of both sides, where they are aligned."""
    text = ptx(kind, bucket, pack=pack)
    for access in ("ld", "st"):
        assert re.search(rf"{access}\.global\S*\.v4\.(b|f|u)32", text), text


@pytest.mark.parametrize("pack", [True, False])
def test_element_by_element_where_it_is_not_aligned(pack):
    """The other branch is not told that it is: as many loads of two bytes as a thread has elements."""
    text = ptx("bf16", "bf16", pack=pack)
    for access in ("ld", "st"):
        assert len(re.findall(rf"{access}\.global\S*\.(?:b|u)16", text)) >= layout.BLOCK // (32 * copy.WARPS)


@pytest.mark.parametrize(("kind", "strided"), [(None, False), (None, True), ("bf16", True)])
def test_every_variant_compiles(kind, strided):
    """Mixed dtypes and other sharded dimensions; tensors of any dtype in one launch."""
    for pack in (True, False) if kind else (True,):
        assert ".entry" in ptx(kind, "bf16", pack=pack, strided=strided)
