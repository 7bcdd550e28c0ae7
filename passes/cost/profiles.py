"""Named hardware, each number with its source.

Rates are what is reached, not what a data sheet promises. Where no measurement is cited, a number is the data sheet's
times the share that a cited device reaches of its own, and says so.

Latencies of all NVIDIA profiles: NCCL, src/graph/tuning.cc (2.19), protocol LL128, ring: 14 us for a collective, 1.9 us
a hop over NVLink, 4.0 us a hop over the network. Every further tensor of a grouped call: 2 us, assumed (NCCL aggregates
a group into one launch).
"""

from __future__ import annotations

from compiled_fsdp.passes.cost.hardware import Hardware, Wires

_GIB = 2**30
_LL128_LATENCY, _GROUPED = 14.0e-6, 2.0e-6
_NVLINK_HOP, _NETWORK_HOP = 1.9e-6, 4.0e-6


def _matmul(bfloat16: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, "float64": float32 / 2}


# 400 Gb/s and GPU are 50 GB/s, 400 GB/s a node of 8; 340 GB/s of all-gather over 32 nodes in NVIDIA/nccl#1218.
_NETWORK_400G = Wires(_NETWORK_HOP, 340e9)

H100 = Hardware(
    name="h100",
    # data sheet (SXM): 989 TFLOP/s dense in bf16, 67 in fp32. Large matrix products reach 65 to 80 %: 70 % assumed.
    flops=_matmul(692e12, 50e12),
    copy=0.9 * 3.35e12,  # data sheet: 3.35 TB/s; 90 % assumed for streaming kernels
    kernel=2e-6,  # assumed: the gap between two kernels of a stream
    memory=80 * _GIB,
    ranks_per_node=8,
    inside=Wires(_NVLINK_HOP, 360e9),  # NVIDIA/nccl-tests#326: "360 GB/s is exactly what we'd expect on H100"
    between=_NETWORK_400G,
    contention=0.05,  # assumed: NCCL's channels take a few of 132 multiprocessors
    latency=_LL128_LATENCY,
    each=_GROUPED,
)

H200 = Hardware(
    name="h200",
    flops=H100.flops,  # data sheet: the same multiprocessors and clock as the H100
    copy=0.9 * 4.8e12,  # data sheet: 4.8 TB/s
    kernel=H100.kernel,
    memory=141 * 10**9,  # data sheet
    ranks_per_node=8,
    inside=H100.inside,
    between=_NETWORK_400G,
    contention=H100.contention,
    latency=_LL128_LATENCY,
    each=_GROUPED,
)

A100 = Hardware(
    name="a100",
    flops=_matmul(0.8 * 312e12, 0.8 * 19.5e12),  # data sheet: 312 TFLOP/s in bf16, 19.5 in fp32; 80 % assumed
    copy=0.9 * 2.039e12,  # data sheet (80 GB SXM): 2,039 GB/s
    kernel=H100.kernel,
    memory=80 * _GIB,
    ranks_per_node=8,
    inside=Wires(_NVLINK_HOP, 208e9),  # NVIDIA/nccl-tests#178: 208 GB/s; #149: about 200
    between=Wires(_NETWORK_HOP, 0.85 * 200e9),  # 8 x 200 Gb/s a node, at the H100 profile's share
    contention=0.08,  # assumed: 108 multiprocessors
    latency=_LL128_LATENCY,
    each=_GROUPED,
)

B200 = Hardware(
    name="b200",
    flops=_matmul(
        0.7 * 2250e12, 0.7 * 80e12
    ),  # data sheet: 2.25 PFLOP/s dense in bf16, 80 TFLOP/s in fp32; the H100's share
    copy=0.9 * 8.0e12,  # data sheet: 8 TB/s
    kernel=H100.kernel,
    memory=180 * 10**9,  # data sheet (HGX)
    ranks_per_node=8,
    inside=Wires(_NVLINK_HOP, 2 * 360e9),  # NVLink 5 has twice NVLink 4's bandwidth (data sheet: 1.8 TB/s)
    between=_NETWORK_400G,
    contention=H100.contention,
    latency=_LL128_LATENCY,
    each=_GROUPED,
)

# Measured with measure_hardware on a machine of two cores at 2 ranks (torch 2.13, one thread a rank): rough on purpose,
# so that plans are sensible where nothing was measured.
CPU = Hardware(
    name="cpu",
    flops={"float32": 90e9, "float64": 45e9, "bfloat16": 30e9, "float16": 30e9},
    copy=5e9,
    kernel=5e-6,
    memory=16 * _GIB,
    ranks_per_node=10**6,
    inside=Wires(50e-6, 1.0e9),
    between=Wires(100e-6, 0.11e9),
    latency=300e-6,
    each=300e-6,  # gloo groups nothing: each tensor is a collective of its own
    contention=0.25,
    reduce_moves=2.0,  # a reduce-scatter is an all-reduce inside gloo
)

PROFILES = {profile.name: profile for profile in (A100, H100, H200, B200, CPU)}


def profile_of(device_name: str) -> Hardware | None:
    """The profile of a device, by the name that torch gives it ("NVIDIA H100 80GB HBM3", "cpu"), if there is one."""
    words = device_name.lower().replace("-", " ").split()
    return next((profile for name, profile in PROFILES.items() if name in words), None)
