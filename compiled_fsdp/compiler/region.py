"""A region: the ordered reads of one compiled part of the model, without compute.

A region's plan belongs to all its variants (other batch sizes) and to all ranks. So the facts that identify a region
must be the same for all of them: layouts, blocks and modes of its reads, in the order of first use. The parameters
themselves are looked up from the inputs of the first call, and are not a part of its identity.
"""

# Why: docs/design/reads.md, "Graphs name no ranks and no layers"
# Why: docs/design/ranks.md, "All ranks share one plan for a region"

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.effects import accumulate_grad
from compiled_fsdp.buckets.reduction import PIECE, ReduceSpec
from compiled_fsdp.compat.autograd import in_checkpoint, running_checkpoint
from compiled_fsdp.compat.dynamo import graph_break_of, is_resume_frame, value_in_dynamo_graph
from compiled_fsdp.compat.modules import innermost_forward
from compiled_fsdp.compiler.branches import hoist_reads
from compiled_fsdp.compiler.merged_reads import READS, merge_reads
from compiled_fsdp.compiler.retained import return_retained
from compiled_fsdp.ops import schema
from compiled_fsdp.ops.autograd import attach
from compiled_fsdp.ops.pieces import hooks_failed
from compiled_fsdp.passes.graph import argument, set_argument
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.ranks.outline import outline_of
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state import registry
from compiled_fsdp.state.parameter import ShardedParameter

# Ops that take one ``param_id`` out of a block's numbers: in Dynamo's graph, and in compiled autograd's graph.
_CUTS = (torch.narrow, torch.ops.aten.slice.Tensor)
# Calls with a ``param_id``. Reductions are in compiled autograd's graphs, which may read nothing.
CALLS_OF_PARAMETERS = (*READS, schema.reduce_grad, hooks_failed)


@dataclass(frozen=True, eq=False)
class Region:
    """The reads of a Dynamo graph, and their parameters in the first call.

    Attributes:
        reads: by index; equal on all ranks.
        groups: the process groups, by their number in the reads.
        param_ids: the numbers of the parameters of the first call.
        id_places: for each read, the index of the graph's input that has its ``param_id``, and the position in this
            input. None if no input has it, as in compiled autograd's graph.
        kind: "training" (a forward, and with it its backward), "inference", or "backward" (compiled autograd's).
        on_cpu: whether it computes on the CPU. With CPUOffloadPolicy only the shards are there.
        parameters: the reads' parameters in the first call.
        on_gloo: whether gloo communicates. Gloo's reduce-scatter is an all-reduce inside.
        is_fragment: whether it is one of several graphs of a forward.
        is_broken: whether it begins or ends at a graph break.
        runs_twice: whether it is a part of a forward that an uncompiled checkpoint runs again in backward.
        shares_checkpoint: whether the same run of that checkpoint had another graph before, with other parameters.
        times: how often compiled autograd's graph gathers or reduces each read, whichever is more. For example, twice
            after two forwards.
        failed_hooks: the problem when a parameter's all-gather extensions were traced; "" if there was none.
        retained: the indices of the reads whose full parameters are the graph's last results (``retained.py``).
    """

    reads: tuple[Read, ...]
    groups: tuple[ShardGroup, ...]
    param_ids: frozenset[int]
    id_places: tuple[tuple[int, int] | None, ...]
    kind: str
    on_cpu: bool
    on_gloo: bool
    parameters: tuple[ShardedParameter, ...] = ()
    is_fragment: bool = False
    is_broken: bool = False
    runs_twice: bool = False
    shares_checkpoint: bool = False
    times: tuple[int, ...] = ()
    failed_hooks: str = ""
    retained: tuple[int, ...] = ()

    @property
    def device_kind(self) -> str:
        """The kind of device that computes: "cpu" or "cuda"."""
        return "cpu" if self.on_cpu else "cuda"

    @property
    def agreeing_group(self) -> ShardGroup | None:
        """The group whose ranks agree on the plan: the largest of several groups, which mostly contains the others.

        None if neither this code nor other code for the same forward has collectives.
        """
        trains = self.kind != "inference"
        is_local = all(registry.unit_of(p).model_communicates_nothing(trains=trains) for p in self.parameters)
        # a graph of compiled autograd reduces as its forward was told, which may be changed since
        if is_local and not (trains and any(read.is_reduced for read in self.reads)):
            return None
        has_full_reads_only = all(read.already_unsharded and not read.trainable for read in self.reads)
        if has_full_reads_only and not self.failed_hooks:  # of failed hooks all ranks must hear
            return None
        return max(self.groups, key=lambda group: len(group.ranks), default=None)

    def signature(self) -> tuple[str, ...]:
        """Return the kind and a line for each read: the facts that ranks must have in common."""
        kind = ("a part, " if self.is_fragment else "") + self.kind + (", in a checkpoint" if self.runs_twice else "")
        if max(self.times, default=1) > 1:
            kind += f", its reads gathered or reduced {self.times} times"
        return kind, *(read.signature_line(trains=self.kind != "inference") for read in self.reads)


def _of_piece(read: Read, node: Node) -> Read:
    """Return the read of one piece of a parameter that has all-gather extensions (``ops/pieces.py``)."""
    dtype, text = argument(node, "dtype"), argument(node, "reduce")
    return replace(
        read,
        size=tuple(argument(node, "size")),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        dim=0,
        shard_itemsize=dtype.itemsize,
        reduce_text="",
        piece=text,
    )


def model_of(region: Region, group: ShardGroup) -> tuple[str, ...]:
    """Return the outline of the models that a region reads."""
    touched = {registry.unit_of(registry.parameter_of(param_id)) for param_id in region.param_ids}
    return outline_of({unit for some in touched for unit in some.tree_units()}, group)


class _GroupNumbers:
    """Numbers of process groups, by first use in the region.

    Attributes:
        widest: by number. If several meshes have these groups in common, it is the mesh with the most ranks, all of
            which must agree. For example, parameters without tensor parallelism may share the groups of those with it,
            but know nothing of the larger mesh.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self.widest: list[ShardGroup] = []

    def number(self, group: ShardGroup) -> int:
        number = self._numbers.setdefault(group.names, len(self.widest))
        if number == len(self.widest):
            self.widest.append(group)
        elif len(group.ranks) > len(self.widest[number].ranks):
            self.widest[number] = group
        return number


class _Numbering:
    """The reads of a region, their groups and their blocks, each numbered by first use.

    Attributes:
        reads: by index.
        parameters: the reads' parameters in the first call.
        groups: the numbers of the parameters' process groups.
        blocks: the numbers of blocks, by the unit's key and the block.
        indices: the indices of reads, by ``param_id``, whether it is trained, whether it is unsharded already, and the
            piece that is read ("" for a whole parameter).
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.parameters: list[ShardedParameter] = []
        self.groups = _GroupNumbers()
        self.blocks: dict[tuple[int, int], int] = {}
        self.indices: dict[tuple[int, bool, bool, str], int] = {}
        self.calls: Counter[tuple[int, Any]] = Counter()  # how often each op gathers or reduces each read

    def add(self, node: Node, parameter: ShardedParameter) -> None:
        """Number the read or reduction that a node calls, in the node's arguments, too."""
        reduces, full = node.target is schema.reduce_grad, node.target is attach
        trainable = reduces or argument(node, "gate") is not None
        piece = argument(node, "reduce") if node.target is schema.unshard else ""
        key = (parameter.param_id, trainable, full, piece if piece.startswith(PIECE) else "")
        group = self.groups.number(parameter.group)
        gathers_pieces = node.target is not attach and argument(node, "world") != parameter.world
        part = self.part(parameter, argument(node, "world")) if gathers_pieces else None
        if trainable and (reduction := ReduceSpec.parse(argument(node, "reduce"))).within is not None:
            number, ranks = self.part(parameter, reduction.within[0])
            set_argument(node, "reduce", str(replace(reduction, within=(ranks, number))))
        if key not in self.indices:
            self.indices[key] = len(self.reads)
            keep = reduces or full or bool(argument(node, "keep"))
            read = self._read(node, parameter, group, keep=keep, trainable=trainable, full=full)
            if part is not None and not reduces:
                read = replace(read, backward_group=part)
            if key[-1]:
                read = _of_piece(read, node)
            self.reads.append(read)
            self.parameters.append(parameter)
        # A read over fewer ranks (``part``) gathers parts that earlier microbatches have left. In compiled
        # autograd's graph it may also be from a backward compiled before.
        set_argument(node, "group_id", group if part is None else part[0])
        set_argument(node, "read", self.indices[key])
        self.calls[self.indices[key], node.target] += 1

    def part(self, parameter: ShardedParameter, ranks: int) -> tuple[int, int]:
        """Return the number and the size of the group of ``ranks`` neighbours that gathers parts of a parameter."""
        return self.groups.number(parameter.group.part_of(ranks)), ranks

    def _read(
        self, node: Node, parameter: ShardedParameter, group: int, *, keep: bool, trainable: bool, full: bool
    ) -> Read:
        unit = registry.unit_of(parameter)
        assert unit.key is not None
        block = self.blocks.setdefault((unit.key, parameter.block), len(self.blocks))
        ranks = argument(node, "post_forward_world_size") if node.target is schema.unshard else 0
        regather = self.part(parameter, ranks) if ranks and trainable and not keep else None
        return Read(
            index=len(self.reads),
            name=parameter.name,
            group_id=group,
            world=parameter.world,
            size=parameter.layout.largest,
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize=parameter.dtype.itemsize,
            block_number=block,
            position=parameter.read_spec.position,
            keep_for_backward=keep,
            trainable=trainable,
            already_unsharded=full,
            dim=parameter.dim,
            shard_itemsize=parameter.shard.dtype.itemsize,
            grad_itemsize=parameter.gate_dtype.itemsize,
            reduce_text=argument(node, "reduce"),
            replicas=parameter.group.replicas,
            backward_group=regather,
            in_host_memory=parameter.in_host_memory,
            codec=argument(node, "codec") if node.target is schema.unshard else "",
        )

    def add_prefetch_lists(self, node: Node, parameter: ShardedParameter) -> None:
        """Note the blocks that the unit's prefetch lists gather ahead, once all blocks have numbers."""
        lists = registry.unit_of(parameter).prefetch_lists
        if lists.key:
            index = argument(node, "read")
            self.reads[index] = replace(self.reads[index], prefetch_blocks=lists.buckets(self.blocks))


def find_region(gm: GraphModule, inputs: list[Any]) -> Region:
    """Number the reads of a Dynamo graph in place, merge equal reads, and describe them.

    Reads of one parameter in one grad mode become one node, so that its gradients are summed before they are reduced.
    """
    hoist_reads(gm, READS)
    merge_reads(gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    calls = list(_calls_with_parameters(gm, dict(zip(placeholders, inputs, strict=True))))
    found = [(node, parameter) for node, parameter in calls if node.target is not hooks_failed]
    failed = [(node, parameter) for node, parameter in calls if node.target is hooks_failed]
    numbering = _Numbering()
    for node, parameter in found:
        numbering.add(node, parameter)
    for _, parameter in failed:  # its ranks must hear of the failure
        numbering.groups.number(parameter.group)
    for node, parameter in found:
        numbering.add_prefetch_lists(node, parameter)
    publishes = _number_publishes(gm, numbering.indices)
    on_cpu = any(parameter.device.type == "cpu" for _, parameter in found)
    is_broken = graph_break_of(gm) is not None or is_resume_frame()
    is_fragment = not publishes and (is_broken or _eager_code_is_between())
    checkpoint = running_checkpoint() if is_fragment else None
    id_places = tuple(_place_of_id(parameter, inputs) for parameter in numbering.parameters)
    # A checkpoint in eager code runs the graph again, and gathers both times.
    retained = () if in_checkpoint() or None in id_places else return_retained(gm, dict(found))
    _number_parts(gm, numbering)
    gm.recompile()
    return Region(
        reads=tuple(numbering.reads),
        groups=tuple(numbering.groups.widest),
        param_ids=frozenset(parameter.param_id for _, parameter in found),
        parameters=tuple(numbering.parameters),
        id_places=id_places,
        kind="backward" if publishes else "training" if torch.is_grad_enabled() else "inference",
        on_cpu=on_cpu,
        on_gloo=on_cpu and all(group.backend_of("cpu") in ("gloo", "fake") for group in numbering.groups.widest),
        failed_hooks=next((argument(node, "problem") for node, _ in failed), ""),
        runs_twice=checkpoint is not None,
        times=tuple(
            max(numbering.calls[read, schema.unshard], numbering.calls[read, schema.reduce_grad])
            for read in range(len(numbering.reads))
        ),
        shares_checkpoint=_shares_checkpoint(checkpoint, {parameter.param_id for _, parameter in found}),
        is_fragment=is_fragment,
        is_broken=is_broken,
        retained=retained,
    )


_read_in: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""For each run of a checkpoint: the parameters of the graphs that were compiled in it."""


def _shares_checkpoint(checkpoint: Any, param_ids: set[int]) -> bool:
    if checkpoint is None:
        return False
    before = _read_in.setdefault(checkpoint, set())
    shares = not before <= param_ids  # the same graph may be compiled again
    before |= param_ids
    return shares


def _place_of_id(parameter: ShardedParameter, inputs: list[Any]) -> tuple[int, int] | None:
    for i, value in enumerate(inputs):
        if value is parameter.block_ids:
            return i, parameter.read_spec.position if value.numel() > 1 else 0
        if value is parameter.id_tensor:
            return i, 0
    return None


def _eager_code_is_between() -> bool:
    """Whether a unit's forward is running, with eager code between its frame and the code that Dynamo compiles.

    Also true in a backward that runs a part of a forward again, because the next forward may run the code that is
    compiled there.
    """
    if recomputes():
        return True
    module = innermost_forward()
    return any(all(module is not own for own in unit.modules) for unit in registry.running_units())


def _calls_with_parameters(gm: GraphModule, env: dict[Node, Any]) -> Iterator[tuple[Node, ShardedParameter]]:
    """Yield reads and reductions in order, each with its parameter, from nested graphs (checkpoints) too."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in CALLS_OF_PARAMETERS:
            yield node, registry.parameter_of(_id_in_dynamo_graph(argument(node, "param_id"), env))
            continue
        operands: list[Node] = []
        torch.fx.map_arg((node.args, node.kwargs), operands.append)
        for body in [n for n in operands if n.op == "get_attr"]:
            inner = getattr(gm, str(body.target), None)
            if isinstance(inner, GraphModule):
                outer = [value_in_dynamo_graph(n, env) for n in operands if n.op != "get_attr"]
                placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
                yield from _calls_with_parameters(inner, dict(zip(placeholders, outer, strict=False)))


def _id_in_dynamo_graph(node: Any, env: dict[Node, Any]) -> Any:
    if node.target not in _CUTS:
        return value_in_dynamo_graph(node, env)
    ids, *where = node.args
    return node.target(_id_in_dynamo_graph(ids, env), *where)


def _number_parts(gm: GraphModule, numbering: _Numbering) -> None:
    """Set the number of the group in each ``retain`` that leaves a part of a full parameter."""
    for node in gm.graph.nodes:
        if node.target is schema.retain and argument(node, "spec"):
            groups = {parameter.group.part_of(argument(node, "world")) for parameter in numbering.parameters}
            group = next(group for group in groups if group.group_id == argument(node, "group_id"))
            set_argument(node, "group_id", numbering.groups.number(group))


def _number_publishes(gm: GraphModule, indices: dict[tuple[int, bool, bool, str], int]) -> int:
    """Set the index of the read in each ``accumulate_grad`` of compiled autograd's graph; return how many there are."""
    publishes = [node for node in gm.graph.nodes if node.target is accumulate_grad]
    for node in publishes:
        slot = argument(node, "param_id")
        found = [index for (number, trainable, *_), index in indices.items() if number == slot and trainable]
        set_argument(node, "read", found[0] if found else -1)
    return len(publishes)
