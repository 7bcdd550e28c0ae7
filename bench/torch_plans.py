"""torch's own overlap passes, for comparison on the same graphs. No GPU: torch's cost model is told to see H100s."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

TFLOPS = {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0, torch.float64: 67.0}
DRAM_GBPS = 3350.0


@contextlib.contextmanager
def h100s() -> Iterator[None]:
    """Make torch's estimates find H100s with NVLink, and its memory tracker count tensors on any device."""
    import torch._inductor.comm_analysis as comm
    import torch._inductor.fx_passes.memory_estimator as memory
    import torch.utils._runtime_estimation as runtime

    def tflops(dtype: torch.dtype, *_: Any, **__: Any) -> float:
        return TFLOPS.get(dtype, 0.0)

    def gbps(*_: Any, **__: Any) -> float:
        return DRAM_GBPS

    with contextlib.ExitStack() as stack:

        def patch(where: Any, name: str, value: Any) -> None:
            if hasattr(where, name):  # names differ between torch versions
                stack.enter_context(mock.patch.object(where, name, value))

        patch(runtime, "get_device_tflops", tflops)
        patch(runtime, "get_gpu_dram_gbps", gbps)
        patch(runtime, "get_device_dram_gbps", gbps)
        if hasattr(comm, "NVIDIA_GPU_TYPE"):
            patch(comm, "get_gpu_type", lambda: comm.NVIDIA_GPU_TYPE["HOPPER"])
        patch(comm, "_has_nvlink", lambda: True)
        track = memory.MemoryTracker.__init__
        patch(memory.MemoryTracker, "__init__", lambda self, graph, is_releasable=None, device_filter=None: track(
            self, graph, is_releasable, lambda device: True))  # fmt: skip
        patch(
            torch.Tensor,
            "copy_",
            lambda self, src, non_blocking=False: torch.ops.aten.copy_.default(self, src, non_blocking),
        )
        yield


def _scheduled(gm: GraphModule, units: list[Any], *, buckets: bool, before: bool) -> GraphModule:
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    return schedule_overlap_bucketing(
        gm,
        compute_estimator="analytical",
        collective_bucketing=buckets,
        insert_overlap_deps=False,
        enable_fusion_regions=True,
        max_memory_increase_gb=1.0,
        bucket_mode="default",
        pre_bucketing_fsdp_collectives=before,
    )


def _manual(gm: GraphModule, units: list[Any]) -> GraphModule:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    return manual_overlap_bucketing(gm, units, module_stack_fn=module_stack, bucket_mode="default")


def module_stack(node: Node) -> list[tuple[str, type[Any]]]:
    """Return a node's modules from the outside in, for example ``layers.0.attention``; for a collective, its unit."""
    if "unit" in node.meta:
        return [(node.meta["unit"], torch.nn.Module)]
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    out = []
    for path, kind in stack.values():
        name = (
            re.sub(r"\['?(\w+)'?\]", r".\1", re.sub(r"^L\['self'\]\.?", "", path))
            .replace("__dict__.", "")
            .replace("_modules.", "")
            .strip(".")
        )
        if name:
            out.append((name, kind if isinstance(kind, type) else torch.nn.Module))
    return out


PASSES: dict[str, Callable[[GraphModule, list[Any]], GraphModule]] = {
    "torch_schedule": partial(_scheduled, buckets=False, before=False),
    "torch_schedule_bucket": partial(_scheduled, buckets=True, before=False),
    "torch_pre_bucket": partial(_scheduled, buckets=True, before=True),
    "torch_manual": _manual,
}


def mark_units(gm: GraphModule, unit_of: Callable[[int], str]) -> None:
    """Store each collective's unit in its ``meta`` for the manual plan. ``unit_of`` maps a read's index to its unit."""
    for node in gm.graph.nodes:
        if "reads" in node.meta:
            unit = unit_of(node.meta["reads"][0])
            for member in (node, *node.users):
                member.meta["unit"] = unit


def run(name: str, gm: GraphModule, units: list[Any]) -> GraphModule:
    """Run one of torch's passes on the graph. ``units`` has the module names of each bucket, for the manual plan."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    logging.getLogger("torch._inductor.fx_passes.fsdp").setLevel(logging.WARNING)  # no log line per graph
    with h100s():
        gm = PASSES[name](gm, units)
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    return gm
