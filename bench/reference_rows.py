"""Published measurements of sharded training steps, each with the settings that its source gives.

A row with ``use="fit"`` may be used to choose constants of ``passes/cost/profiles.py``; a row with ``use="check"`` may
not. Where a source leaves a setting open, ``assumed`` says what we take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiled_fsdp.passes.cost import PROFILES, Hardware, Wires
from compiled_fsdp.tools.cli.shapes import SHAPES, Shape

GIB = 2**30


@dataclass(frozen=True)
class System:
    """How a training system runs a step, in terms of the planner.

    Attributes:
        name: for the table.
        fused: whether Inductor fuses kernels; else every op is a kernel.
        options: options of the planner that give the system's schedule of collectives.
    """

    name: str
    fused: bool
    options: tuple[tuple[str, object], ...]


# One unit ahead of compute, one flat bucket for each unit: FSDP1 and FSDP2.
_PER_UNIT = (("bucket", "module"),)
EAGER = System("eager, one unit ahead", False, _PER_UNIT)
COMPILED = System("compiled, one unit ahead", True, _PER_UNIT)
COPY_ENGINES = System("compiled, one unit ahead, copy engines", True, (*_PER_UNIT, ("transport", "symm_mem")))


@dataclass(frozen=True)
class Row:
    """One published measurement.

    Attributes:
        row: its number in the table.
        use: "fit" or "check".
        shape: the model.
        system: how it runs.
        hardware: the ranks' devices and wires.
        world: how many ranks there are.
        sequence, batch: tokens of a sequence, sequences of a microbatch on each rank.
        seconds: published seconds of a step.
        source: where the figure is from.
        microbatches: how many forwards and backwards a step has. Each gathers and reduces.
        checkpointing: "none", "selective" or "full".
        reshard: whether parameters are resharded after forward.
        replicate: how many groups of ranks have the same shards.
        precision: as ``compiled-fsdp plan --precision``.
        wire: as ``compiled-fsdp plan --wire``.
        float8: whether the layers' matrix products are in float8, whose casts cost time.
        memory: published bytes at the peak; None if the source has none.
        memory_kind: "allocated", "reserved" (the caching allocator's bytes, which are more than the allocated ones), or
            "?" if the source does not say.
        pending_bytes: bytes for each element of the full gradients that wait for a step's last microbatch, if only that
            one reduces; else 0.
        optimizer_bytes: bytes of the optimizer's state for each element; None for two moments in the weights' dtype.
        assumed: a setting that the source leaves open, and the value that we take.
    """

    row: str
    use: str
    shape: Shape
    system: System
    hardware: Hardware
    world: int
    sequence: int
    batch: int
    seconds: float
    source: str
    microbatches: int = 1
    checkpointing: str = "none"
    reshard: bool = True
    replicate: int = 1
    precision: str = "bf16"
    wire: str = "none"
    float8: bool = False
    memory: float | None = None
    memory_kind: str = ""
    pending_bytes: int = 0
    optimizer_bytes: float | None = None
    assumed: str = ""


def _step(tokens_per_second: float, sequence: int, batch: int, microbatches: int = 1) -> float:
    return sequence * batch * microbatches / tokens_per_second


def _float8(hardware: Hardware) -> Hardware:
    """Return hardware on which all bf16 matrix products run at the rate of float8.

    1,403 and 795 TFLOP/s are the attainable rates on H100 (stas00/ml-engineering, MAMF). Attention stays in bf16.
    """
    faster = 1403 / 795
    forward, backward = hardware.attention
    return replace(
        hardware,
        flops={**hardware.flops, "bfloat16": hardware.flops["bfloat16"] * faster},
        attention=(forward / faster, backward / faster),
    )


def float8_bytes(shape: Shape, tokens: int) -> float:
    """The bytes that casts to float8 move in a step, with one scale for each tensor (torchao's dynamic scaling).

    Each input and each output's gradient of a layer's linear modules is read for its largest value (2 bytes an
    element), read again and written as float8 (3 bytes), and transposed (2 bytes).
    """
    inside = shape.kv_heads * shape.dim // shape.heads
    linears = [(shape.dim, shape.dim)] * 2 + [(shape.dim, inside)] * 2 + [(shape.dim, shape.hidden)] * 3
    return 7.0 * tokens * shape.layers * sum(map(sum, linears))


def _slower(hardware: Hardware, share: float) -> Hardware:
    """Return hardware whose matrix products and attention run at a share of its rate."""
    return replace(hardware, flops={dtype: rate * share for dtype, rate in hardware.flops.items()})


_H100, _H200, _A100 = PROFILES["h100"], PROFILES["h200"], PROFILES["a100"]
# 4 GPUs in a node; the source does not say how fast its InfiniBand is: 400 Gb/s for each GPU are assumed.
_H200_BY_4 = replace(_H200, ranks_per_node=4, nics_per_node=4, between=Wires(_H200.between.hop, 170e9))
# Meta's H100 with 96 GB of HBM2e and a limit of 500 W instead of 700 W: products at 0.78 of the H100's rate (row 5).
_H100_500W = replace(_slower(_H100, 0.78), copy=0.9 * 2.4e12, memory=96 * 10**9)
# llm-foundry's runs are of 2023: products at 0.82 of the H100's rate (rows 10 and 13), and 0.88 of the A100's (row 16),
# because cuBLAS was younger, and for what its eager steps do beside the model. 1,600 Gb/s of RoCE for a node of A100s.
_H100_2023 = _slower(_H100, 0.82)
_A100_2023 = replace(_slower(_A100, 0.88), between=Wires(_A100.between.hop, 0.85 * 200e9))
# yandex's network is not stated: row 22 gives its rate.
_A100_YANDEX = replace(_slower(_A100, 0.88), between=Wires(_A100.between.hop, 60e9))
# fms-fsdp's networks: 400 and 800 Gb/s for a node
_A100_400G = replace(_A100, between=Wires(_A100.between.hop, 0.85 * 50e9))
_H100_800G = replace(_H100, between=Wires(_H100.between.hop, 0.85 * 100e9))
_MPT_13B = Shape("mpt-13b", 5120, 40, 40, 20480, 40, 50368, gated=False, positions=2048, tied=True)
_MPT_70B = Shape("mpt-70b", 8192, 64, 64, 32768, 80, 50368, gated=False, positions=2048, tied=True)
_LLAMA_13B = Shape("llama-13b", 5120, 40, 8, 17920, 40, 128256)
_LLAMA_34B = Shape("llama2-34b", 8192, 64, 8, 22016, 48, 32000)

_KEMPNER = "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling"
_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_FLOAT8 = "the head in float8, too"
_FMS = "foundation-model-stack/fms-fsdp, README"
_YANDEX = "yandex/YaFSDP, README"


def rows() -> Iterator[Row]:
    """Yield all rows, in the order of their numbers."""
    llama, llama2, llama70 = SHAPES["llama3-8b"], SHAPES["llama2-7b"], SHAPES["llama2-70b"]
    mpt = SHAPES["mpt-7b"]

    # Its script runs 1 and 2 GPUs with batches of 2, makes the model in bfloat16, and logs max_memory_allocated in GiB.
    # Only the last microbatch reduces. Until then FSDP2 keeps full gradients in the dtype of reductions, float32.
    kempner = Row(
        "2", "check", llama, COMPILED, _H200_BY_4, 2, 4096, 2, 3.50, _KEMPNER,
        microbatches=4, checkpointing="full", precision="bf16-weights", memory=62.4 * GIB, memory_kind="allocated",
        pending_bytes=4,
        assumed="nodes of 4 with 400 Gb/s for each GPU",
    )  # fmt: skip
    yield replace(kempner, row="1", use="fit", world=1, seconds=_step(10471, 4096, 2, 4), memory=None)
    yield kempner
    kempner = replace(kempner, batch=4, microbatches=2)
    yield replace(kempner, row="3", world=4, seconds=3.36, memory=61.1 * GIB)
    yield replace(
        kempner, row="4", shape=_LLAMA_13B, system=EAGER, world=8, microbatches=4, seconds=14.81, memory=88.5 * GIB
    )

    titan = Row(
        "5", "fit", llama, COMPILED, _H100_500W, 8, 8192, 2, _step(6667, 8192, 2), _TITAN,
        checkpointing="selective", memory=77.0 * GIB, memory_kind="reserved",
    )  # fmt: skip
    yield titan
    yield replace(titan, row="6", use="check", world=128, seconds=_step(6514, 8192, 2), memory=62.0 * GIB)
    eager = replace(titan, use="check", system=EAGER)
    float8 = replace(
        titan, use="check", hardware=_float8(_H100_500W), wire="float8_e4m3fn/none", float8=True, assumed=_FLOAT8
    )
    yield replace(eager, row="7a", seconds=_step(5762, 8192, 2), memory=82.4 * GIB)
    yield replace(eager, row="7b", world=128, seconds=_step(5605, 8192, 2), memory=67.0 * GIB)
    yield replace(float8, row="8", seconds=_step(8532, 8192, 2), memory=76.8 * GIB)
    yield replace(
        float8, row="9", hardware=_float8(_H200), world=32, seconds=_step(10938, 8192, 2), memory=47.96 * GIB,
        source="pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    )  # fmt: skip

    foundry = Row(
        "10", "fit", mpt, EAGER, _H100_2023, 8, 2048, 6, _step(10643, 2048, 6), _FOUNDRY,
        assumed="learned positions",
    )  # fmt: skip
    yield foundry
    yield replace(foundry, row="11", use="check", world=128, seconds=_step(10475, 2048, 6))
    yield replace(foundry, row="12", use="check", world=512, seconds=_step(9670, 2048, 6))
    large = replace(foundry, shape=_MPT_70B, batch=8, checkpointing="full")
    yield replace(large, row="13", world=64, microbatches=4, seconds=_step(1039, 2048, 8, 4))
    large = replace(large, use="check")
    yield replace(large, row="14a", world=128, seconds=_step(1058, 2048, 8))
    yield replace(large, row="14b", world=512, seconds=_step(1007, 2048, 8))
    yield replace(large, row="15", world=32, batch=2, microbatches=16, seconds=_step(882, 2048, 2, 16))
    ampere = replace(foundry, hardware=_A100_2023)
    yield replace(ampere, row="16", microbatches=2, seconds=_step(4641, 2048, 6, 2))
    ampere = replace(ampere, use="check")
    yield replace(ampere, row="17", shape=_MPT_13B, batch=2, microbatches=3, seconds=_step(2262, 2048, 2, 3))
    yield replace(
        ampere, row="18", shape=_MPT_70B, world=64, batch=8, microbatches=4, checkpointing="full",
        precision="bf16-reduce", seconds=_step(410, 2048, 8, 4),
    )  # fmt: skip

    fms = Row(
        "19", "check", llama2, COMPILED, _A100_400G, 128, 4096, 2, _step(4550, 4096, 2), _FMS,
        replicate=16, assumed="8 ranks shard, 400 Gb/s a node",
    )  # fmt: skip
    yield fms
    fms = replace(fms, shape=llama70, replicate=1, checkpointing="selective", assumed="400 Gb/s a node")
    yield replace(fms, row="20", seconds=_step(410, 4096, 2))
    yield replace(fms, row="21", hardware=_H100_800G, world=96, seconds=_step(890, 4096, 2), assumed="800 Gb/s a node")

    yandex = Row(
        "22", "fit", llama, EAGER, _A100_YANDEX, 64, 2048, 1, 1.10, _YANDEX,
    )  # fmt: skip
    yield yandex
    yield replace(yandex, row="23", use="check", sequence=4096, seconds=1.48)
    yield replace(yandex, row="24", use="check", shape=llama2, world=128, sequence=8192, seconds=2.31)
    yield replace(yandex, row="25", use="check", shape=_LLAMA_34B, world=256, seconds=4.50)

    # Its script, thunder/benchmarks/benchmark_litgpt.py, builds the model in bfloat16 and prints max_memory_allocated.
    thunder = Row(
        "26a", "check", llama2, EAGER, _H100, 8, 4096, 1, _step(9325, 4096, 1), "Lightning-AI/lightning-thunder#940",
        reshard=False, precision="bf16-all", memory=47.45e9, memory_kind="allocated",
    )  # fmt: skip
    yield thunder
    yield replace(thunder, row="26b", system=COMPILED, seconds=_step(11856, 4096, 1), memory=40.21e9)
    # Inductor's passes bucket the collectives of each layer, and launch one layer ahead. 48.76 % of 989 TFLOP/s is
    # that of sequences of 4,096 tokens.
    transports = Row(
        "27a", "check", llama, COMPILED, _H100, 8, 4096, 2, _step(9369, 4096, 2), "pytorch/pytorch#179937",
        memory=56.75 * GIB, memory_kind="?", assumed="no checkpointing",
    )  # fmt: skip
    yield transports
    yield replace(transports, row="27b", system=COPY_ENGINES, seconds=_step(9593, 4096, 2), memory=57.96 * GIB)
    # 28.9 % of 989 TFLOP/s, with PaLM's count of operations
    flops = 8192 * (6 * 7.50e9 + 12 * 32 * 4096 * 8192)
    yield Row(
        "28", "check", llama, EAGER, _H100, 2, 8192, 1, flops / (0.289 * 989e12), "pytorch/pytorch#129450",
        checkpointing="full", memory=72.8 * GIB, memory_kind="?",
        optimizer_bytes=4,  # two moments, less the gradient, which the optimizer's step in backward frees
        assumed="H100s, sequences of 8,192 tokens; of its three figures the middle one",
    )  # fmt: skip
