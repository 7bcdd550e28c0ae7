"""The hardware that a compile plans for, the nodes of its groups, and whether Triton kernels copy its buckets."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from compiled_fsdp.base.logs import log_once, speaks_for_all
from compiled_fsdp.compat.autograd import process_group_of
from compiled_fsdp.compat.compilers import has_triton_package
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.context import GroupPlace, Groups
from compiled_fsdp.passes.cost import PROFILES, Hardware, profile_of
from compiled_fsdp.passes.cost.compute import LibraryKernel
from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)
speaks_for_all(log)

# The results of measure_hardware by process group, as long as the group lives, each with the ranks that share it.
measured: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Hardware, frozenset[int]]] = weakref.WeakKeyDictionary()


def hardware_of(options: Options, region: Region) -> Hardware:
    """Return the hardware to plan for; the first time, a log line says which one "auto" is."""
    hardware, source = hardware_and_source(options, region)
    if hardware.device and hardware.device != (here := device_name(region.device_kind)):
        log_once(
            log,
            logging.WARNING,
            (hardware.name, here),
            "option 'hardware': its costs were measured on %s, but the model computes on %s: profile the model here",
            hardware.device,
            here,
        )
    if options.hardware == "auto":
        level = logging.WARNING if _is_unknown(region) else logging.INFO
        log_once(log, level, source, "planning for %s: %s", hardware.name, source)
    return hardware


def warn_of_other_kernels(hardware: Hardware, phase: str, kernels: Sequence[LibraryKernel]) -> None:
    """Log a warning if ``hardware`` has measured times for less than half of a graph's library kernels, but for some.

    Then the times are of another model, batch or dtype, and most kernels are planned by rates.
    """
    unknown = [kernel for kernel in kernels if kernel.key not in hardware.kernels]
    total, missing = (sum(kernel.count for kernel in of) for of in (kernels, unknown))
    if hardware.kernels and 2 * missing > total:
        log_once(
            log,
            logging.WARNING,
            (hardware.name, phase),
            "option 'hardware': %s has no measured time for %d of the %d library kernels of the %s graph, for example "
            "%r: were the costs measured with another model, batch or dtype?",
            hardware.name,
            missing,
            total,
            phase,
            unknown[0].key,
        )


def hardware_and_source(options: Options, region: Region) -> tuple[Hardware, str]:
    """Return the hardware that the option ``hardware`` asks for, and its source in words.

    Its rate for float32 is the one for TF32 if torch computes float32 so.
    """
    hardware, source = _asked_for(options, region)
    tf32 = hardware.flops.get("tf32")
    if tf32 is None or region.on_cpu or not float32_is_tf32():
        return hardware, source
    return replace(hardware, flops={**hardware.flops, "float32": tf32}), source


def _asked_for(options: Options, region: Region) -> tuple[Hardware, str]:
    if isinstance(options.hardware, Hardware):
        return options.hardware, "the option 'hardware'"
    if options.hardware != "auto":
        return PROFILES[str(options.hardware)], "the option 'hardware': built-in profile, not measured"
    known = measured_for(region)
    if known is not None:
        return known, "measured"
    device = device_name(region.device_kind)
    profile = profile_of(device)
    if profile is None:
        return (
            PROFILES["h100"],
            f"there is no profile of {device!r}: call measure_hardware() before training, or give the option "
            "'hardware'",
        )
    return profile, "built-in profile, not measured: call measure_hardware() before training"


def _is_unknown(region: Region) -> bool:
    """Whether there is neither a measurement nor a profile for the region's device."""
    return measured_for(region) is None and profile_of(device_name(region.device_kind)) is None


def measured_for(region: Region) -> Hardware | None:
    """Return the result of ``measure_hardware`` for a group of the region; None if there is none.

    It is the same on all ranks that share the region's plan.

    Raises:
        ValueError: ranks that share the plan have measured apart from each other.
    """
    for group in region.groups:
        if group.first_group in measured:
            hardware, ranks = measured[group.first_group]
            if not ranks.issuperset(group.ranks):
                raise ValueError(
                    f"measure_hardware was called with a mesh of ranks {_listed(ranks)}, but the model is on a mesh of "
                    f"ranks {_listed(group.ranks)}, and the other ranks may have measured other values. With replicas "
                    "pass fully_shard's mesh of two dimensions; with tensor parallelism give every rank the same "
                    "Hardware in the option 'hardware' instead."
                )
            return hardware
    return None


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def float32_is_tf32() -> bool:
    """Whether float32 products run on the GPU's tensor cores, whichever setting allows it (such as ``allow_tf32``)."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def groups_of(group: ShardGroup, hardware: Hardware) -> Groups:
    """Return a mesh's process groups as passes know them: by name, with the number of nodes that their ranks are on."""
    gathers, replicates = local_nodes(hardware, group.gather_ranks), None
    if group.replicas > 1:
        replicates = local_nodes(hardware, group.replicate_ranks)
    names = group.group_names
    return Groups(**vars(names), nodes=gathers, replicate_nodes=replicates)


def place_of_group(group: Any, hardware: Hardware) -> GroupPlace:
    """Return the ranks' place of a process group, which may be given by its name."""
    found = process_group_of(group)
    ranks = dist.get_process_group_ranks(found)
    return GroupPlace(found.group_name, len(ranks), local_nodes(hardware, ranks))


def local_nodes(hardware: Hardware, ranks: Sequence[int]) -> int:
    """Return how many nodes global ranks are on, by ``LOCAL_WORLD_SIZE``, which torchrun sets."""
    return hardware.nodes_of(ranks, ranks_on_this_machine())


def ranks_on_this_machine() -> int | None:
    """Return ``LOCAL_WORLD_SIZE``, which torchrun sets; None if nothing has set it."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local_world_size) if local_world_size.isdigit() else None


def device_name(kind: str) -> str:
    """Return torch's name for this process's device of a kind ("cuda" or "cpu"); "cpu" if it has no such device."""
    return torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else "cpu"


def use_bucket_kernels(options: Options, region: Region) -> bool:
    """Whether Triton kernels copy into buckets and out of them: the option ``kernels``.

    With "auto" they do if the region computes on a GPU and Triton is installed.

    Raises:
        ValueError: the option is True on a GPU, without Triton.
    """
    if options.kernels is False or (options.kernels == "auto" and region.on_cpu):
        return False
    if region.on_cpu or has_triton_package():
        return True
    if options.kernels == "auto":
        return False
    raise ValueError(
        "compiled_fsdp: option 'kernels': True needs Triton on a GPU, and there is none: pip install triton, "
        "or leave the option at 'auto'."
    )
