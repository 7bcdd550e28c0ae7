"""Whether Inductor may capture a graph in CUDA graphs (``mode="reduce-overhead"`` and the like).

A graph with collectives of compiled_fsdp may be captured if all of it becomes one capture, because a replay then runs
launches, waits and compute in the plan's order. An op that has to run outside of a capture cuts the graph in two, and a
collective would be in flight across the cut.
"""

# Why: docs/design/torch.md, "CUDA graphs capture a graph as a whole, or not at all"

from __future__ import annotations

import logging

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.base.logs import speaks_for_all, warn_once
from compiled_fsdp.compat.graphs import is_higher_order, tensors_in
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.graph import RETAINS

log = logging.getLogger(__name__)
speaks_for_all(log)


def may_be_captured(gm: GraphModule, region: Region) -> bool:
    """Whether a rewritten graph may be captured; logs one warning for each reason against it."""
    if not region.reads or region.on_cpu or (reason := _obstacle(gm, region)) is None:
        return True
    warn_once(log, ("cuda graphs", reason), "no CUDA graphs: %s", reason)
    return False


def _obstacle(gm: GraphModule, region: Region) -> str | None:
    if region.is_fragment:
        return "the forward has graph breaks, and collectives are in flight between its graphs."
    if gm.graph.output_node().meta.get(RETAINS):
        return "set_reshard_after_backward(False) keeps parameters that a replay would overwrite."
    for node in gm.graph.nodes:
        if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
            name = str(node.target).removesuffix(".default")
            way_out = ' Leave copies to Inductor with options={"kernels": False}.' if "pack" in name else ""
            return f"{name} cannot be captured, and collectives would be in flight where the graph is cut.{way_out}"
        if node.op == "call_function" and (is_higher_order(node.target) or _is_on_cpu(node)):
            return f"{node.target} is not of the GPU alone, and collectives would be in flight where the graph is cut."
    return None


def _is_on_cpu(node: Node) -> bool:
    """Whether a node computes on the CPU or copies from there, for example because parameters are offloaded.

    Tensors without dimensions do not count.
    """
    values = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
    return any(tensor.device.type == "cpu" and tensor.dim() > 0 for tensor in tensors_in(values))
