"""Profiles of named hardware, each number with its source.

Rates are those that programs reach, not those that data sheets promise. If no measurement is cited, the number is the
data sheet's, times the share of its data sheet that a cited device reaches; the comment says so.

Latencies of all NVIDIA profiles: NCCL, src/graph/tuning.cc (2.19), protocol LL128, ring: 14 us for a collective, 1.9 us
for a hop over NVLink, 4.0 us for a hop over the network. Small messages take protocol LL if it is quicker: 6.6 us, 0.6
us (PCI Express: 1.0 us) and 2.7 us, at half the rate and at most the rates of ``llMaxBws`` (2.23, by generation). Every
further tensor of a grouped call: 2 us, assumed (NCCL aggregates a group into one launch).
"""

from __future__ import annotations

from dataclasses import replace

from compiled_fsdp.passes.cost.hardware import Contention, Hardware, LowLatency, Wires

_LL128_LATENCY, _GROUPED = 14.0e-6, 2.0e-6
_NVLINK_HOP, _NETWORK_HOP = 1.9e-6, 4.0e-6
_LL_AMPERE = LowLatency(6.6e-6, 0.6e-6, 2.7e-6, 0.5, (87.7e9, 22.5e9, 19.0e9))
_LL_HOPPER = replace(_LL_AMPERE, most=(141e9, 45e9, 35e9))
_LL_BLACKWELL = replace(_LL_AMPERE, most=(282e9, 90e9, 70e9))
_LL_PCIE_HOP = 1.0e-6


def _matmul(bfloat16: float, float32: float, tf32: float | None = None) -> dict[str, float]:
    tensor_cores = bfloat16 / 2 if tf32 is None else tf32  # half of bf16's rate in every data sheet since the A100's
    return {
        "bfloat16": bfloat16, "float16": bfloat16, "tf32": tensor_cores, "float32": float32, "float64": float32 / 2,
    }  # fmt: skip


# 400 Gb/s for each GPU are 50 GB/s, and 400 GB/s for a node of 8. NVIDIA/nccl#1218: 340 GB/s of all-gather over 32
# nodes.
_NETWORK_400G = Wires(_NETWORK_HOP, 340e9)
_NETWORK_200G = Wires(_NETWORK_HOP, 0.85 * 200e9)  # 8 x 200 Gb/s for a node, at the same share
# PCI Express with 16 lanes has 32 GB/s in one direction in generation 4, 64 GB/s in generation 5. Copies reach 80 %:
# assumed. Rings over it reach 60 %, because every byte goes through the host's bridges: assumed.
_PCIE_4, _PCIE_5 = 32e9, 64e9
_PCIE_COPY, _PCIE_RING = 0.8, 0.6
_PCIE_HOP = 5.0e-6  # assumed: NCCL's tables have 5.7 us for LL128 over PCI on Ampere and Hopper

H100 = Hardware(
    name="h100",
    # data sheet (SXM): 989 TFLOP/s dense in bf16, 67 in fp32. Large matrix products alone reach 80 % (MAMF of
    # stas00/ml-engineering), and 70 % in published steps at 700 W (docs/references.md).
    flops=_matmul(692e12, 50e12),
    copy=0.9 * 3.35e12,  # data sheet: 3.35 TB/s; 90 % assumed for streaming kernels
    kernel=2e-6,  # assumed: the gap between two kernels of a stream
    host_kernel=6e-6,  # assumed: the time of Inductor's wrapper for a launch
    host_collective=40e-6,  # assumed: the time of torch's ops, NCCL's call, and the wait
    memory=80 * 10**9,  # data sheet
    ranks_per_node=8,
    nics_per_node=8,
    inside=Wires(_NVLINK_HOP, 360e9),  # NVIDIA/nccl-tests#326: "360 GB/s is exactly what we'd expect on H100"
    between=_NETWORK_400G,
    # pytorch/pytorch#179937: matrix products take 1.3 to 1.4 times as long beside NCCL; assumed for other kernels, too.
    # Nothing is published on how much NCCL slows down.
    contention=Contention(0.35, 0.35, 0.35),
    multiprocessors=132,  # data sheet
    # FlashAttention-3 (arXiv:2407.08608), figures 5 and 6, for FlashAttention-2: 319 TFLOP/s in a causal forward of 4k
    # tokens with heads of 128, 310 in backward, over 774 for large products
    attention=(0.42, 0.40),
    latency=_LL128_LATENCY,
    low_latency=_LL_HOPPER,
    each=_GROUPED,
    host_copy=_PCIE_COPY * _PCIE_5,
)

H100_PCIE = replace(
    H100,
    name="h100-pcie",
    multiprocessors=114,  # data sheet
    flops=_matmul(0.7 * 756e12, 0.7 * 51e12),  # data sheet: 756 TFLOP/s dense in bf16, 51 in fp32; the H100's share
    copy=0.9 * 2.0e12,  # data sheet: 2 TB/s
    inside=Wires(_PCIE_HOP, _PCIE_RING * _PCIE_5),  # without NVLink bridges, which join two cards only
    low_latency=replace(_LL_HOPPER, inside=_LL_PCIE_HOP),
)

H100_NVL = replace(
    H100,
    name="h100-nvl",
    flops=_matmul(0.7 * 835e12, 0.7 * 60e12),  # data sheet: 835 TFLOP/s dense in bf16, 60 in fp32; the H100's share
    copy=0.9 * 3.9e12,  # data sheet: 3.9 TB/s
    memory=94 * 10**9,  # data sheet
    inside=H100_PCIE.inside,  # bridges join two cards, so that a ring of more cards goes over PCI Express
    low_latency=H100_PCIE.low_latency,
)

H200 = replace(
    H100,  # data sheet: the same multiprocessors, clock and links
    name="h200",
    # 78 % of the data sheet, fitted to a published step on one card (docs/references.md, row 1), as one H100 reached
    flops=_matmul(0.78 * 989e12, 50e12),
    copy=0.9 * 4.8e12,  # data sheet: 4.8 TB/s
    memory=141 * 10**9,  # data sheet
)

GH200 = replace(
    H100,  # the H100's multiprocessors
    name="gh200",
    copy=0.9 * 4.0e12,  # data sheet (96 GB HBM3): 4 TB/s
    memory=96 * 10**9,  # data sheet
    ranks_per_node=1,  # a superchip; LOCAL_WORLD_SIZE says if one host has more
    nics_per_node=1,
    between=Wires(_NETWORK_HOP, 340e9 / 8),
    host_copy=0.8 * 450e9,  # data sheet: NVLink-C2C, 900 GB/s in both directions; PCI Express's share
)

A100 = Hardware(
    name="a100",
    # data sheet: 312 TFLOP/s in bf16, 19.5 in fp32. Large products alone reach 87 % (MAMF), 80 % in published steps.
    flops=_matmul(0.8 * 312e12, 0.8 * 19.5e12),
    copy=0.9 * 2.039e12,  # data sheet (80 GB SXM): 2,039 GB/s
    kernel=H100.kernel,
    host_kernel=H100.host_kernel,
    host_collective=H100.host_collective,
    memory=80 * 10**9,  # data sheet
    ranks_per_node=8,
    nics_per_node=8,
    inside=Wires(_NVLINK_HOP, 208e9),  # NVIDIA/nccl-tests#178: 208 GB/s; #149: about 200
    between=_NETWORK_200G,
    # NVIDIA/nccl#1428: 1.2 to 1.8 times as long, by kernel; the H100's, which fits published steps
    contention=Contention(0.35, 0.35, 0.35),
    multiprocessors=108,  # data sheet
    # FlashAttention-2 (arXiv:2307.08691), figures 5 and 6: about 175 TFLOP/s in a causal forward, 160 in backward
    attention=(0.65, 0.60),
    latency=_LL128_LATENCY,
    low_latency=_LL_AMPERE,
    each=_GROUPED,
    host_copy=_PCIE_COPY * _PCIE_4,
)

A100_PCIE = replace(
    A100,
    name="a100-pcie",
    copy=0.9 * 1.935e12,  # data sheet (80 GB): 1,935 GB/s
    inside=Wires(_PCIE_HOP, _PCIE_RING * _PCIE_4),
    low_latency=replace(_LL_AMPERE, inside=_LL_PCIE_HOP),
)

L40S = replace(
    A100_PCIE,
    name="l40s",
    multiprocessors=142,  # data sheet
    flops=_matmul(0.7 * 362e12, 0.7 * 91.6e12),  # data sheet: 362 TFLOP/s dense in bf16, 91.6 in fp32; 70 % assumed
    copy=0.9 * 864e9,  # data sheet: 864 GB/s
    memory=48 * 10**9,  # data sheet
)

A10G = replace(
    A100_PCIE,
    name="a10g",
    multiprocessors=80,  # published for AWS's card
    # published for AWS's card: 70 TFLOP/s dense in bf16, 35 in fp32 and in TF32; 80 % assumed
    flops=_matmul(0.8 * 70e12, 0.8 * 35e12),
    copy=0.9 * 600e9,  # 600 GB/s
    memory=24 * 10**9,
    # instances of 4 or 8 cards have one link of up to 100 Gb/s for all cards
    nics_per_node=1,
    between=Wires(_NETWORK_HOP, 0.85 * 12.5e9),
)

B200 = replace(
    H100,
    name="b200",
    multiprocessors=148,  # published: two dies of 74
    # data sheet: 2.25 PFLOP/s dense in bf16, 80 TFLOP/s in fp32; the H100's share
    flops=_matmul(0.7 * 2250e12, 0.7 * 80e12),
    copy=0.9 * 8.0e12,  # data sheet: 8 TB/s
    memory=180 * 10**9,  # data sheet (HGX)
    inside=Wires(_NVLINK_HOP, 2 * 360e9),  # data sheet: NVLink 5 has 1.8 TB/s, twice NVLink 4's bandwidth
    low_latency=_LL_BLACKWELL,
)

B300 = replace(
    B200,  # data sheet (HGX): the B200's rates in bf16 and fp32, and its links
    name="b300",
    multiprocessors=160,  # published: two dies of 80
    memory=270 * 10**9,  # data sheet: 2.1 TB for a node of 8
    between=Wires(_NETWORK_HOP, 2 * 340e9),  # data sheet: 800 Gb/s for each GPU
)

GB200 = replace(
    B200,
    name="gb200",
    flops=_matmul(0.7 * 2500e12, 0.7 * 80e12),  # data sheet (72 GPUs): 180 PFLOP/s dense in bf16; the H100's share
    memory=186 * 10**9,  # data sheet (72 GPUs): 13.4 TB
    ranks_per_node=72,
    nics_per_node=72,
    spans_hosts=True,  # 18 hosts of 4 in one NVLink domain
    between=Wires(_NETWORK_HOP, 72 * 340e9 / 8),
    host_copy=GH200.host_copy,
)

# Measured with measure_hardware on a machine of two cores, with 2 ranks of one thread each (torch 2.13). The numbers
# are rough on purpose, so that plans are sensible on other CPUs, too.
CPU = Hardware(
    name="cpu",
    flops={"float32": 90e9, "float64": 45e9, "bfloat16": 30e9, "float16": 30e9},
    copy=5e9,
    kernel=5e-6,
    host_collective=80e-6,  # for 1 kB between two processes
    host_computes=True,
    memory=16 * 10**9,
    ranks_per_node=10**6,
    inside=Wires(50e-6, 1.0e9),
    between=Wires(100e-6, 0.11e9),
    latency=300e-6,
    each=300e-6,  # gloo does not group: each tensor is a collective of its own
    contention=Contention(0.25, 0.25, 0.25),
    reduce_moves=2.0,  # a reduce-scatter is an all-reduce inside gloo
)

PROFILES = {
    profile.name: profile
    for profile in (
        A10G, A100, A100_PCIE, B200, B300, CPU, GB200, GH200, H100, H100_NVL, H100_PCIE, H200, L40S
    )
}  # fmt: skip
"""The built-in profiles of hardware, by name, for example ``PROFILES["h100"]``."""


def profile_of(device_name: str) -> Hardware | None:
    """Find the profile of a device by the name that torch gives it; None if there is none.

    A profile fits if all words of its name are in the device's name. If several fit, the one with most words is taken.
    For example, "NVIDIA H100 NVL" gives "h100-nvl", and "NVIDIA H100 80GB HBM3" gives "h100".
    """
    words = set(device_name.lower().replace("-", " ").split())
    fitting = [profile for name, profile in PROFILES.items() if words.issuperset(name.split("-"))]
    return max(fitting, key=lambda profile: len(profile.name.split("-")), default=None)
