"""Count accesses, divisions and registers in the machine code of the bucket kernels. No GPU is needed.

The counts are static, from the machine code (SASS) of one thread of a program. They include both branches: one copies
vectors, the other copies single elements if something is not aligned.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.codecs import CODECS
from bench.gpu.record import Record
from compiled_fsdp.buckets.codec import Codec
from compiled_fsdp.buckets.kernels import codec, copy, layout

CAPABILITIES = (80, 90, 100)
"""Compute capabilities times ten: A100; H100 and H200; B200."""
_TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, None: None}


@dataclass(frozen=True)
class Variant:
    """A copy kernel with the constants that it is compiled for.

    Attributes:
        kind: the tensors' dtype; None: each tensor has its own dtype.
        bucket: the bucket's dtype.
        pack: whether it copies tensors into the bucket, and not out of it.
        strided: whether a shard is several pieces of the full tensor, because it is not sharded by rows.
        block: the number of elements per program.
    """

    kind: str | None
    bucket: str
    pack: bool
    strided: bool = False
    block: int = layout.BLOCKS[0]

    def __str__(self) -> str:
        way = f"{self.kind or 'any'} to {self.bucket}" if self.pack else f"{self.bucket} to {self.kind}"
        return f"{'pack' if self.pack else 'unpack'} {way}{', in pieces' if self.strided else ''}, {self.block}"


@dataclass(frozen=True)
class Code:
    """The counts of one variant for one GPU.

    Attributes:
        instructions: all instructions.
        loads: loads from global memory, by width in bits.
        stores: stores to global memory, by width in bits.
        calls: function calls; each is a division of 64-bit integers.
        registers: registers of a thread.
        spilled: loads and stores of local memory.
    """

    instructions: int
    loads: Counter[int]
    stores: Counter[int]
    calls: int
    registers: int
    spilled: int


def compiled(variant: Variant, capability: int) -> Code:
    """Compile a variant for a compute capability, for example 90 for 9.0."""
    assert variant.pack or variant.kind is not None, "what is unpacked has one dtype"
    signature = {
        "bucket": f"*{variant.bucket}",
        "flat": f"*{variant.bucket if variant.pack else variant.kind}",
        "pointers": "*i64" if variant.pack else f"*{variant.bucket}",
        "table": "*i64",
        "row": "i64",
        "divide": "fp32",
    }
    constants = {
        "PACK": variant.pack,
        "KIND": _TYPES[variant.kind],
        "DIVIDE": False,
        "STRIDED": variant.strided,
        "BLOCK": variant.block,
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(copy.copy_blocks, signature, constants, aligned)
    return _code(source, {"num_warps": copy.warps(variant.block)}, capability)


@dataclass(frozen=True)
class CodecVariant:
    """A codec's kernel with the constants that it is compiled for.

    Attributes:
        text: the codec, for example "int8/256".
        kind: the dtype of the tensors that are encoded, or of the decoded tensor.
        way: "encode", "decode" or "decode_sum".
        feedback: whether the kernel keeps the encoding's error for error feedback.
    """

    text: str
    kind: str
    way: str
    feedback: bool = False

    def __str__(self) -> str:
        return f"{self.way} {self.text}, {self.kind}{', feedback' if self.feedback else ''}"


def compiled_codec(variant: CodecVariant, capability: int) -> Code:
    """Compile a codec's kernel for a compute capability, for example 90 for 9.0."""
    constants: dict[str, object] = dict(codec.shape(Codec.parse(variant.text)))
    if variant.way == "encode":
        kernel = codec.encode_blocks
        signature = {"bucket": "*u8"} | dict.fromkeys(("pointers", "residuals", "table"), "*i64") | {"row": "i64"}
        constants |= {"KIND": _TYPES[variant.kind], "FEEDBACK": variant.feedback}
        aligned = (0,)
    else:
        kernel = codec.decode_blocks
        numbers = ("row", "offset", "scales", "numel", "rank")
        signature = {"bucket": "*u8", "out": f"*{variant.kind}"} | dict.fromkeys(numbers, "i32")
        constants |= {"ROWS": 8, "SUM": variant.way == "decode_sum", "AVERAGE": True}
        aligned = (0, 1)
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in aligned})
    return _code(source, codec.OPTIONS, capability)


def _code(source: ASTSource, options: dict[str, object], capability: int) -> Code:
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(made.asm["sass"], _registers(made.asm["cubin"]))


def _read(sass: str, registers: int) -> Code:
    # a line of triton's disassembly is one instruction: control codes, perhaps a predicate, the name, operands
    names = re.findall(r"(?m)^\S+\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", sass)
    kinds = Counter(name.split(".")[0] for name in names)

    def accesses(kind: str) -> Counter[int]:
        found = [re.search(r"\.[US]?(8|16|64|128)\b", name) for name in names if name.split(".")[0] == kind]
        return Counter(int(width[1]) if width else 32 for width in found)

    return Code(
        len(names), accesses("LDG"), accesses("STG"), kinds["CALL"], registers, spilled=kinds["LDL"] + kinds["STL"]
    )


def _registers(cubin: bytes) -> int:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        found = re.search(r"REG:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found is not None
    return int(found[1])


def measure() -> Iterator[Record]:
    """Yield a record for each capability and each variant that training uses."""
    variants: tuple[Variant | CodecVariant, ...] = (
        Variant("fp32", "bf16", pack=True),
        Variant("bf16", "bf16", pack=False),
        Variant("bf16", "bf16", pack=True, strided=True),
        Variant("bf16", "bf16", pack=False, strided=True),
        Variant("fp32", "bf16", pack=True, block=layout.BLOCKS[1]),
        Variant(None, "bf16", pack=True),
        *(CodecVariant(text, "bf16", way) for text in CODECS for way in ("encode", "decode", "decode_sum")),
    )
    for variant in variants:
        for capability in CAPABILITIES:
            code = (
                compiled(variant, capability) if isinstance(variant, Variant) else compiled_codec(variant, capability)
            )
            accesses = {"loads_by_bits": _widths(code.loads), "stores_by_bits": _widths(code.stores)}
            counts = {name: getattr(code, name) for name in ("instructions", "calls", "registers", "spilled")}
            yield Record("kernel code", f"{variant}, sm_{capability}", more=counts | accesses)


def _widths(accesses: Counter[int]) -> str:
    return ", ".join(f"{count} x {width}" for width, count in sorted(accesses.items(), reverse=True))
