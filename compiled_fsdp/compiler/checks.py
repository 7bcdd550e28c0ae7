"""Checks before a region is compiled, whose errors name the option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_fsdp.compat.compilers import check_inductor_options
from compiled_fsdp.compat.modules import torch_fsdp_in_forward
from compiled_fsdp.compiler.hardware import hardware_of, use_bucket_kernels
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.compiler.user_buckets import check_patterns_are_used


def checked_options(
    options: Options | Mapping[str, Any] | None, mode: str | None, region: Region, inputs: list[Any]
) -> Options:
    """Return the options, parsed, if this region can be compiled with them.

    Raises:
        ValueError: an option is unknown or bad, or cannot be satisfied here; or all-gather extensions have failed.
        NotImplementedError: a module that torch's own FSDP2 has sharded is running on ``inputs``.
    """
    if region.failed_hooks:
        raise ValueError(region.failed_hooks)
    parsed = Options.parse(options)
    check_inductor_options(parsed.inductor, mode)
    check_patterns_are_used(parsed, region)
    hardware_of(parsed, region)  # this and the next call raise if an option cannot be satisfied here
    use_bucket_kernels(parsed, region)
    if not region.reads and (name := torch_fsdp_in_forward(inputs)) is not None:
        raise NotImplementedError(
            f"compiled_fsdp: {name} was sharded by torch.distributed.fsdp.fully_shard, whose collectives stay outside "
            "of graphs. Shard it with compiled_fsdp.fully_shard (change the import), or compile it with "
            'backend="inductor".'
        )
    return parsed
