"""Checks before a region is compiled, whose errors name the option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_fsdp.compat.compilers import check_inductor_options
from compiled_fsdp.compat.graphs import activation_memory_budget
from compiled_fsdp.compat.modules import torch_fsdp_in_forward
from compiled_fsdp.compat.symm_mem import known_to_inductor, missing_kernel
from compiled_fsdp.compiler.cached_code import checked_cache_folder
from compiled_fsdp.compiler.hardware import hardware_of, local_nodes, use_bucket_kernels
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.compiler.user_buckets import check_patterns_are_used
from compiled_fsdp.passes.cost import Hardware


def checked_options(
    options: Options | Mapping[str, Any] | None,
    mode: str | None,
    region: Region,
    inputs: list[Any],
    *,
    runs: bool = True,
) -> Options:
    """Return the options, parsed, if this region can be compiled with them.

    Args:
        runs: whether the compiled code will run; else the region is planned only, perhaps for other hardware.

    Raises:
        ValueError: an option is unknown or bad, or cannot be satisfied here; all-gather extensions have failed; other
            users can write to the folder of cached code.
        NotImplementedError: a module that torch's own FSDP2 has sharded is running on ``inputs``.
    """
    if region.failed_hooks:
        raise ValueError(region.failed_hooks)
    parsed = Options.parse(options)
    check_inductor_options(parsed.inductor, mode)
    check_patterns_are_used(parsed, region)
    hardware = hardware_of(parsed, region)  # this and the next call raise if an option cannot be satisfied here
    use_bucket_kernels(parsed, region)
    _check_transport(parsed, region, hardware, runs=runs)
    if parsed.memory_budget is not None and (share := activation_memory_budget()) != 1:
        raise ValueError(
            "compiled_fsdp: option 'memory_budget' decides what backward computes again, and so does "
            f"torch._functorch.config.activation_memory_budget={share}. Set that to 1.0, or leave the option out."
        )
    if runs and parsed.codegen == "inductor":
        checked_cache_folder()
    if not region.reads and (name := torch_fsdp_in_forward(inputs)) is not None:
        raise NotImplementedError(
            f"compiled_fsdp: {name} was sharded by torch.distributed.fsdp.fully_shard, whose collectives stay outside "
            "of graphs. Shard it with compiled_fsdp.fully_shard (change the import), or compile it with "
            'backend="inductor".'
        )
    return parsed


def _check_transport(options: Options, region: Region, hardware: Hardware, *, runs: bool) -> None:
    """Raise ValueError if the option ``transport`` cannot be satisfied: here, or for a mesh of the region."""
    if options.transport == "backend" or not region.reads:
        return
    if runs and (op := missing_kernel(torch.device(region.device_kind))):
        raise ValueError(
            f"compiled_fsdp: option 'transport': 'symm_mem' needs GPUs: torch's {op} has no kernel for "
            f"{region.device_kind!r}. Leave the option at 'backend'. `explain(model, args)` and compiled-fsdp plan "
            "take it for GPUs that you do not have."
        )
    if runs and not known_to_inductor():
        raise ValueError(
            f"compiled_fsdp: option 'transport': 'symm_mem' needs torch 2.13 or later, because Inductor of torch "
            f"{torch.__version__} does not know these collectives. Leave the option at 'backend'."
        )
    if runs and options.codegen == "aot_eager" and not region.on_cpu:
        raise ValueError(
            "compiled_fsdp: option 'transport': 'symm_mem' needs codegen='inductor', because only Inductor keeps a "
            "bucket's memory until the copy engines have read it."
        )
    for group in region.groups:
        nodes = local_nodes(hardware, group.gather_ranks)
        if nodes > 1:
            raise ValueError(
                f"compiled_fsdp: option 'transport': 'symm_mem' works inside a node, but a parameter is sharded over "
                f"{len(group.gather_ranks)} ranks on {nodes} nodes (by LOCAL_WORLD_SIZE, or by the hardware's "
                "ranks_per_node). Shard inside nodes, with a mesh of (nodes, GPUs of a node), or leave the option at "
                "'backend'."
            )
