"""A region: the ordered reads of one compiled piece of the model, without compute.

A region's plan belongs to all its variants (other batch sizes) and to all ranks, so what identifies a region must be the
same for them: layouts, blocks and modes in the order of first use. Which parameters they are is looked up from the inputs
of the first call, and serves people only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp import ops
from compiled_fsdp.compat import graph_break_of, is_resumed, value_in_dynamo_graph
from compiled_fsdp.passes.graph import argument, set_argument
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state import registry
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import Unit, forward_is_in_parts

READS = (ops.unshard, ops.read_full)
FOUND = (*READS, ops.reduce_grad)
"""Calls that stand for a parameter; reductions stand in compiled autograd's graphs, which may read nothing."""


@dataclass(frozen=True, eq=False)
class Region:
    """The reads of a Dynamo graph, and who they were in the first call.

    Attributes:
        reads: by index; equal on all ranks.
        groups: by mesh label in the reads.
        slots: the slots of the parameters of the first call.
        slot_input: which of the graph's inputs is the slot of its first read; None without reads.
        kind: "training" (a forward, and with it its backward), "inference", or "backward" (compiled autograd's).
        on_cpu: whether a parameter is on the CPU.
        part: whether it is one of several pieces of a forward.
    """

    reads: tuple[Read, ...]
    groups: tuple[ShardGroup, ...]
    slots: frozenset[int]
    slot_input: int | None
    kind: str
    on_cpu: bool
    part: bool = False

    def signature(self) -> tuple[str, ...]:
        """One line a read: what has to agree between ranks."""
        return (("a part, " if self.part else "") + self.kind, *(read.signature_line() for read in self.reads))


def model_of(region: Region, group: ShardGroup) -> tuple[str, ...]:
    """The models that a region reads: of all their parameters over the ranks of ``group`` "name: what it is", sorted. The same on all
    ranks, and in any order of modules. Other parameters may differ: on a mesh of their own ranks may have experts of their own."""
    units = {unit for slot in region.slots for unit in registry.parameter_of(slot).unit.family()}
    return tuple(
        sorted(
            f"{parameter.name}: {_outline(parameter, unit)}"
            for unit in units for parameter in unit.parameters if parameter.group.ranks == group.ranks
        )
    )  # fmt: skip


def _outline(parameter: ShardedParameter, unit: Unit) -> str:
    dtype, size = str(parameter.dtype).removeprefix("torch."), list(parameter.layout.largest)
    how = "trained" if parameter.param.requires_grad else "frozen"
    return f"{dtype}{size} dim {parameter.dim}, {how}, reshard_after_forward={unit.again or unit.reshard_after_forward}"


class _Groups:
    """Labels of process groups, by first use. ``widest``: of the meshes that have them in common the one with the most ranks, all of
    which have to agree: plain parameters know nothing of the tensor parallelism of others."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, ...], int] = {}
        self.widest: list[ShardGroup] = []

    def label(self, group: ShardGroup) -> int:
        label = self._labels.setdefault(group.names, len(self.widest))
        if label == len(self.widest):
            self.widest.append(group)
        elif len(group.ranks) > len(self.widest[label].ranks):
            self.widest[label] = group
        return label


def find_region(gm: GraphModule, inputs: list[Any]) -> Region:
    """Number the reads of a Dynamo graph in place, merge equal ones, and describe them.

    Reads of one parameter in one grad mode become one node, so that its gradients are summed before they are reduced.
    """
    merge_reads(gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found = list(_found(gm, dict(zip(placeholders, inputs, strict=True))))
    outside = {node for node in gm.graph.nodes if node.target in FOUND}
    reads: list[Read] = []
    groups = _Groups()
    buckets: dict[tuple[int, int], int] = {}
    indices: dict[tuple[int, bool, bool], int] = {}
    for node, parameter in found:
        reduces, full = node.target is ops.reduce_grad, node.target is ops.read_full
        trainable = reduces or argument(node, "gate") is not None
        key = (parameter.slot_number, trainable, full)
        label = groups.label(parameter.group)
        if key not in indices:
            indices[key] = len(reads)
            bucket = buckets.setdefault((id(parameter.unit), parameter.block), len(buckets))
            keep = reduces or full or bool(argument(node, "keep"))
            read = _read(len(reads), node, parameter, label, bucket, keep, trainable, full, groups)
            reads.append(replace(read, nested=node not in outside))
        set_argument(node, "mesh", label)
        set_argument(node, "read", indices[key])
    for node, parameter in found:
        lists = parameter.unit.prefetch_lists
        if lists.key:
            index = argument(node, "read")
            reads[index] = replace(reads[index], prefetch_blocks=lists.buckets(buckets))
    publishes = _number_publishes(gm, indices)
    gm.recompile()
    on_cpu = any(parameter.shard.device.type == "cpu" for _, parameter in found)
    slots_read = frozenset(parameter.slot_number for _, parameter in found)
    slot_input = next((i for _, first in found[:1] for i, value in enumerate(inputs) if value is first.slot), None)
    kind = "backward" if publishes else "training" if torch.is_grad_enabled() else "inference"
    part = not publishes and (graph_break_of(gm) is not None or is_resumed() or forward_is_in_parts())
    return Region(tuple(reads), tuple(groups.widest), slots_read, slot_input, kind, on_cpu, part)


def _read(index: int, node: Node, parameter: ShardedParameter, label: int, bucket: int, keep: bool, trainable: bool, full: bool,
          groups: _Groups) -> Read:  # fmt: skip
    dtype, again = parameter.dtype, None
    if node.target is ops.unshard and argument(node, "again") and trainable and not keep:
        group = parameter.unit.again_group
        assert group is not None
        again = groups.label(group), group.size
    return Read(
        index, parameter.name, label, parameter.world, parameter.layout.largest, str(dtype).removeprefix("torch."), dtype.itemsize, bucket,
        parameter.position, keep, trainable, full, parameter.dim, parameter.shard.dtype.itemsize, argument(node, "reduction"),
        parameter.group.replicas, again,
    )  # fmt: skip


def merge_reads(gm: GraphModule) -> None:
    """Reads of one parameter in one graph and grad mode become one node."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        grad, inference = True, 0
        first: dict[Any, Node] = {}
        for node in list(module.graph.nodes):
            if node.op != "call_function":
                continue
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                grad = bool(node.args[0])
            elif name in ("_enter_inference_mode", "_exit_inference_mode"):
                inference += 1 if name.startswith("_enter") else -1
            elif node.target in READS:
                key = (grad, inference, node.args)
                if not node.users:  # listed and not used, as in next(self.parameters()).dtype
                    module.graph.erase_node(node)
                elif key in first:
                    node.replace_all_uses_with(first[key])
                    module.graph.erase_node(node)
                else:
                    first[key] = node
        module.recompile()


def _found(gm: GraphModule, env: dict[Node, Any]) -> Iterator[tuple[Node, ShardedParameter]]:
    """Reads and reductions in order, inside checkpointed and other nested graphs too, each with its parameter."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in FOUND:
            yield node, registry.parameter_of(value_in_dynamo_graph(argument(node, "slot"), env))
            continue
        operands: list[Node] = []
        torch.fx.map_arg((node.args, node.kwargs), operands.append)
        for body in [n for n in operands if n.op == "get_attr"]:
            inner = getattr(gm, str(body.target), None)
            if isinstance(inner, GraphModule):
                outer = [value_in_dynamo_graph(n, env) for n in operands if n.op != "get_attr"]
                placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
                yield from _found(inner, dict(zip(placeholders, outer, strict=False)))


def _number_publishes(gm: GraphModule, indices: dict[tuple[int, bool, bool], int]) -> int:
    """Tell each ``publish`` of a compiled-autograd graph which read it is of; returns how many there are."""
    publishes = [node for node in gm.graph.nodes if node.target is ops.publish]
    for node in publishes:
        slot = argument(node, "slot")
        found = [index for (number, trainable, _), index in indices.items() if number == slot and trainable]
        set_argument(node, "read", found[0] if found else -1)
    return len(publishes)
