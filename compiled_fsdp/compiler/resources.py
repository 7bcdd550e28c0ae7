"""What a compile may use: the hardware it plans for, its memory in bytes, and the user's own buckets by read."""

from __future__ import annotations

import fnmatch
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from compiled_fsdp import compat
from compiled_fsdp.comm.first_rank import speaks_for_all
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.cost import PROFILES, Hardware, profile_of
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.state import registry
from compiled_fsdp.state.unit import running_parameters

log = logging.getLogger(__name__)
speaks_for_all(log)

# what measure_hardware measured, as long as the process group lives
measured: weakref.WeakKeyDictionary[dist.ProcessGroup, Hardware] = weakref.WeakKeyDictionary()
_said: set[str] = set()


class PatternsDiffer(ValueError):
    """Layers that share compiled code match the patterns of the option ``bucket`` differently."""


def hardware_of(options: Options, region: Region) -> Hardware:
    """What the option ``hardware`` asks for; one log line says what "auto" is."""
    if isinstance(options.hardware, Hardware):
        return options.hardware
    if options.hardware != "auto":
        return PROFILES[options.hardware]
    known = measured_for(region)
    if known is not None:
        return _said_once(known, "as measured")
    device = device_name(region)
    profile = profile_of(device)
    if profile is None:
        return _said_once(
            PROFILES["h100"],
            f"there is no profile of {device!r}; call measure_hardware(mesh) before training, or give the option 'hardware'",
            logging.WARNING,
        )
    return _said_once(profile, f"the profile of {device!r}; measure_hardware(mesh) before training would measure it")


def measured_for(region: Region) -> Hardware | None:
    """What ``measure_hardware`` measured for a group of the region; the same on all ranks of that group."""
    return next((measured[g.process_group] for g in region.groups if g.process_group in measured), None)


def device_name(region: Region) -> str:
    """The name that torch gives the device of the region's parameters."""
    if region.on_cpu or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name()


def bucket_kernels(options: Options, region: Region) -> bool:
    """Whether kernels of ours copy into buckets and out of them: the option ``kernels``, and "auto" where there is a GPU.

    Raises:
        ValueError: asked for on a GPU without Triton.
    """
    if options.kernels is False or (options.kernels == "auto" and region.on_cpu):
        return False
    if region.on_cpu or compat.has_triton_package():
        return True
    if options.kernels == "auto":
        return False
    raise ValueError(
        "compiled_fsdp: option 'kernels': True needs Triton on a GPU, and there is none: pip install triton, or leave the option at 'auto'."
    )


def budget_in_bytes(options: Options, region: Region) -> float | None:
    """The option ``memory_budget``; a fraction is of the device's memory."""
    budget = options.memory_budget
    if budget is None or budget > 1:
        return budget
    if region.on_cpu or not torch.cuda.is_available():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return budget * total


def bytes_elsewhere(options: Options, region: Region) -> float:
    """Around a part of a broken forward: shards, gradients and optimizer state of the model's other parameters, the bucket that is in
    flight for the next graph with the shards that were sent, and the gradients that the graph before has left: at most three of the
    model's largest block. Activations that other graphs hold are not known."""
    if not region.part:
        return 0
    parameters = running_parameters()
    total = 0.0
    blocks: dict[tuple[int, int], int] = {}
    for parameter in parameters:
        shard = parameter.shard
        key = (id(parameter.unit), parameter.block)
        blocks[key] = blocks.get(key, 0) + parameter.world * shard.numel() * parameter.dtype.itemsize
        if parameter.slot_number not in region.slots:
            total += shard.nbytes + (parameter.retained.nbytes if parameter.retained is not None else 0)
            if parameter.param.requires_grad:
                total += shard.nbytes + options.optimizer_bytes * shard.numel()
                waits = parameter.world * shard.numel() * parameter.reduce_dtype.itemsize
                total += waits if parameter.unit.accumulates else 0
    return total + 3 * max(blocks.values(), default=0)


def groups_of_reads(options: Options, region: Region) -> dict[int, int]:
    """The bucket that the user's own plan has for each read."""
    if isinstance(options.bucket, (str, int, float)):
        return {}
    groups = {read.index: group_of(read.name, options.bucket) for read in region.reads}
    return {index: group for index, group in groups.items() if group is not None}


def group_of(name: str, patterns: Sequence[Sequence[str]]) -> int | None:
    """The first list with a pattern that matches a parameter's name."""
    return next((i for i, names in enumerate(patterns) if any(fnmatch.fnmatchcase(name, p) for p in names)), None)


def check_patterns_match(options: Options, region: Region) -> None:
    """Raise ValueError if a pattern of the option ``bucket`` matches no sharded parameter of any model: a slip of the pen."""
    if not region.reads or isinstance(options.bucket, (str, int, float)):
        return
    names = registry.names()
    idle = [p for patterns in options.bucket for p in patterns if not fnmatch.filter(names, p)]
    if idle:
        raise ValueError(
            f"compiled_fsdp: option 'bucket': no sharded parameter has a name that matches {', '.join(map(repr, idle))}; names here are like "
            f"{region.reads[0].name!r}."
        )


def check_patterns(bucket: Any, reads: Sequence[Read], slot: int) -> None:
    """Raise if a layer, whose first parameter is ``slot``, matches the patterns otherwise than the one whose code it shares.

    Raises:
        PatternsDiffer: with the two names.
    """
    if isinstance(bucket, (str, int, float)):
        return
    first = registry.parameter_of(slot)
    layer = {p.position: p for p in first.unit.parameters if p.block == first.block}
    forth: dict[int, int] = {}
    back: dict[int, int] = {}
    for read in reads:
        if read.block_number != reads[0].block_number or read.position not in layer:
            continue
        other = layer[read.position]
        groups = group_of(read.name, bucket), group_of(other.name, bucket)
        mine, its = (-1 - read.index if group is None else group for group in groups)  # alone
        if forth.setdefault(mine, its) != its or back.setdefault(its, mine) != mine:
            raise PatternsDiffer(
                f"compiled_fsdp: option 'bucket': {other.name!r} shares compiled code with {read.name!r}, but your patterns put them with other "
                "parameters. Equal layers that a graph break separates need equal buckets: use patterns that match all of them alike."
            )


def _said_once(hardware: Hardware, how: str, level: int = logging.INFO) -> Hardware:
    if how not in _said:
        _said.add(how)
        log.log(level, "planning for %s: %s", hardware.name, how)
    return hardware
