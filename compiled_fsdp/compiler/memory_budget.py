"""The option ``memory_budget`` in bytes, and the bytes that are held outside of the planned graph."""

from __future__ import annotations

import os

import torch

from compiled_fsdp.buckets.codec import RESIDUAL_ITEMSIZE
from compiled_fsdp.compiler.hardware import ranks_on_this_machine
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.state.registry import running_units


def budget_in_bytes(options: Options, region: Region) -> float | None:
    """Return the option ``memory_budget`` in bytes; None if there is no budget.

    A fraction is a share of the GPU's memory or, on CPUs, of this rank's part of the machine's memory.
    """
    budget = options.memory_budget
    assert not isinstance(budget, str)  # ``Options`` has made a number of a text
    if budget is None or budget > 1:
        return budget
    if region.on_cpu or not torch.cuda.is_available():
        total = _memory_of_machine()
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return budget * total


def host_memory_for_activations(options: Options, region: Region, hardware: Hardware) -> float:
    """Return the most bytes of host memory that activations may be copied to (option ``offload_activations``).

    If there is no GPU here, a plan for one takes any amount.
    """
    choice = options.offload_activations
    if options.memory_budget is None or choice is False or (choice == "auto" and hardware.host_computes):
        return 0
    if isinstance(choice, (bool, str)):
        return float("inf") if region.on_cpu else _memory_of_machine() // 2
    return choice


def _memory_of_machine() -> int:
    """This rank's part of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (ranks_on_this_machine() or 1)


def bytes_outside_graph(options: Options, region: Region) -> float:
    """Return the bytes that are held outside of a graph that is one of several of a forward; 0 for a whole forward.

    They are:

    - of the model's other parameters: shards, gradients and optimizer state, and also retained full parameters,
      accumulated gradients and codec residuals, if there are any;
    - at most three times the model's largest block: the bucket in flight for the next graph, its shards as they were
      sent, and the gradients that the previous graph is still reducing;
    - with HSDP, the reduce-scattered gradients of the graph before that one, which the replicas are still all-reducing.

    Activations that other graphs hold are not counted, because they are not known.
    """
    if not region.is_fragment:
        return 0
    total = 0.0
    block_bytes: dict[tuple[int, int], int] = {}
    units = dict.fromkeys(inner for unit in running_units() for inner in (unit, *unit.inner_units))
    for unit in units:
        for parameter in unit.parameters:
            shard = parameter.shard
            unsharded = parameter.world * shard.numel()
            key = (id(unit), parameter.block)
            block_bytes[key] = block_bytes.get(key, 0) + unsharded * parameter.dtype.itemsize
            if parameter.param_id in region.param_ids:
                continue
            on_device = 0 if parameter.in_host_memory else 1
            total += on_device * shard.nbytes + (parameter.retained.nbytes if parameter.retained is not None else 0)
            if parameter.param.requires_grad:
                of_training = parameter.gate_dtype.itemsize + options.optimizer_bytes_per_element
                total += on_device * shard.numel() * of_training
                if unit.accumulation.enabled:
                    ranks = (parameter.grads.within or parameter.world) if unit.pends_in_parts(parameter) else 1
                    total += unsharded // ranks * parameter.dtypes.reduced.itemsize
                total += unsharded * RESIDUAL_ITEMSIZE if parameter.grads.spec.error_feedback else 0
    largest = max(block_bytes.values(), default=0)
    left_to_replicas = [largest / group.size for group in region.groups if group.replicas > 1 and group.size > 1]
    return total + 3 * largest + max(left_to_replicas, default=0)
