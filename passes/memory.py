"""The most bytes that a lowered graph holds at once, counted from the graph itself.

Memory is counted by storage: a result lives from its node to its last use, also through views. The inputs and outputs
of a collective live until its wait. Results that fused kernels do not store take no memory, and some results take over
the memory of what their kernel reads (``cost/fusion.py``).
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.transport import ALL_REDUCES, LAUNCHES, WAIT
from compiled_fsdp.compat.autograd import storage_id
from compiled_fsdp.compat.graphs import hint, strides_of, tensors_in
from compiled_fsdp.passes.cost.fusion import computes, is_library, stored_sources, users_of
from compiled_fsdp.passes.graph import IS_SHARD, NOT_STORED, OVERWRITES, in_host_memory, is_getitem, kind_of
from compiled_fsdp.passes.views import memory_of


def peak_bytes(gm: GraphModule, *, backward: bool, shards: frozenset[str]) -> int:
    """Bytes at the peak of a graph, without the inputs named in ``shards``.

    Args:
        backward: inputs die with their last use, as those of a backward do; else the caller holds them to the end.
        shards: names of the placeholders that are not counted.
    """
    nodes = list(gm.graph.nodes)
    memory = Lifetimes(gm, _sent, backward=backward)
    live, freed = 0, [0] * (len(nodes) + 1)
    uncounted = {memory.owner[node] for node in nodes if node.name in shards}
    for node in nodes:
        if node.op == "placeholder" and node not in uncounted:
            live += memory.bytes(node)
            if backward:
                freed[memory.dies.get(node, 0)] += memory.bytes(node)
    peak = live
    for i, node in enumerate(nodes):
        if node.op == "call_function" and memory.is_stored(node):
            live += memory.bytes(node)
            freed[memory.dies.get(node, i)] += memory.bytes(node)
        peak = max(peak, live - memory.overlap(node))
        if node.op != "output":
            live -= freed[i]
    return peak


COMPUTED = "compiled_fsdp_computed"
"""Key of ``Node.meta``: forward has computed the memory of this input of a backward."""


class Lifetimes:
    """Whose memory each node of a graph uses, and where it is used last.

    A kernel that does not store a result computes it where it is read, so it reads the result's sources there, too.

    Attributes:
        owner: ``memory_of`` each node; of a backward's inputs that are views of one saved tensor, the first.
        dies: the place in the graph at which each node's memory is used last.
    """

    def __init__(self, gm: GraphModule, also_held: Callable[[Node], Iterable[Node]], *, backward: bool) -> None:
        """Find the lifetimes of a graph.

        Args:
            gm: the graph.
            also_held: nodes that a node holds beside its arguments.
            backward: whether inputs die with their last use, as those of a backward do.
        """
        nodes = list(gm.graph.nodes)
        self._inputs, first = saved_inputs(gm) if backward else ({}, {})
        self.owner = {node: first.get(of := memory_of(node), of) for node in nodes}
        self.dies: dict[Node, int] = {}
        for place in reversed(range(len(nodes))):
            node = nodes[place]
            at = self.dies.get(node, place) if NOT_STORED in node.meta else place
            for source in (*node.all_input_nodes, *also_held(node)):
                owner = self.owner[source]
                self.dies[owner] = max(self.dies.get(owner, 0), at)
        # For each node that overwrites memory: the node whose memory that was.
        self._overwritten: dict[Node, Node] = {}
        for place, node in enumerate(nodes):
            if OVERWRITES in node.meta:
                dying = (self.owner[read] for read in _read_by(node) if self.dies[self.owner[read]] == place)
                fits = (
                    owner for owner in dying if self._is_whole(owner) and _can_overwrite(node, owner, backward=backward)
                )
                if (old := next(fits, None)) is not None:
                    self._overwritten[node] = old

    def _is_whole(self, owner: Node) -> bool:
        """Whether a node is no part of larger memory that a backward was given."""
        return self._inputs.get(owner, 0) <= storage_bytes(owner)

    def is_stored(self, node: Node) -> bool:
        """Whether a node has memory of its own."""
        return self.owner[node] is node and NOT_STORED not in node.meta

    def bytes(self, node: Node) -> int:
        """Bytes of the memory that a node owns on the device; 0 for one that owns none."""
        return self._inputs.get(node, storage_bytes(node)) if self.is_stored(node) else 0

    def overlap(self, node: Node) -> int:
        """Bytes that a node's result shares with a tensor that dies there."""
        return storage_bytes(self._overwritten[node]) if node in self._overwritten else 0


def saved_inputs(gm: GraphModule) -> tuple[dict[Node, int], dict[Node, Node]]:
    """Return the bytes that each input of a backward keeps alive, and for each view the first input of its memory.

    An input may be a view of a larger tensor that forward has computed, for example one of three parts of a product.
    All of that tensor's memory is held until the last of its views dies. Only inputs that ``mark_computed`` has marked
    are returned, because the caller holds the others anyway.
    """
    held: dict[Node, int] = {}
    first: dict[int, Node] = {}
    owner: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        tensor = node.meta.get("val")
        if COMPUTED not in node.meta or in_host_memory(node) or not isinstance(tensor, torch.Tensor):
            continue
        if memory := storage_id(tensor):
            owner[node] = first.setdefault(memory, node)
            if owner[node] is node:
                held[node] = max(tensor_bytes(tensor), hint(tensor.untyped_storage().nbytes()))
    return held, owner


def mark_computed(forward: GraphModule, backward: GraphModule) -> None:
    """Mark the inputs of a backward whose memory forward has computed: see ``saved_inputs``."""
    computed = {node.name for node in forward.graph.nodes if memory_of(node).op == "call_function"}
    for node in backward.graph.nodes:
        if node.op == "placeholder" and node.name in computed:
            node.meta[COMPUTED] = True


def _read_by(node: Node) -> list[Node]:
    """The stored tensors that a node's kernel reads and may overwrite; of a library's kernel the first argument."""
    if is_library(node):
        return node.all_input_nodes[:1]
    return stored_sources(node, lambda source: NOT_STORED in source.meta)


def _can_overwrite(node: Node, owner: Node, *, backward: bool) -> bool:
    """Whether a node's result may take the memory of a tensor that it reads last: it belongs to compute and fits."""
    belongs = computes(owner) or (backward and owner.op == "placeholder" and IS_SHARD not in owner.meta)
    if not belongs or not all(map(computes, users_of(owner))):  # a gradient may still be being sent
        return False
    result, old = (tensors_in(each.meta.get("val")) for each in (node, owner))
    alike = len(result) == len(old) == 1 and result[0].dtype == old[0].dtype
    return alike and tensor_bytes(result[0]) == tensor_bytes(old[0])


def _sent(wait: Node) -> Sequence[Node]:
    """The inputs of the collective that a node waits for, which live until then."""
    if wait.target is not WAIT:
        return ()
    launch = wait.all_input_nodes[0]
    launch = launch.all_input_nodes[0] if is_getitem(launch) else launch
    of_model = kind_of(launch) is not None and not launch.meta.get("of_bucket")
    if launch.target in ALL_REDUCES and not of_model and "reads" not in launch.meta:  # of shards, over the replicas
        return ()
    return launch.all_input_nodes if launch.target in LAUNCHES or of_model else ()


def storage_bytes(node: Node) -> int:
    """Bytes of the tensors that a node returns, on the device.

    A tuple whose elements are taken has none, because those count.
    """
    if in_host_memory(node) or (node.op == "call_function" and any(is_getitem(user) for user in node.users)):
        return 0
    return sum(tensor_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; expanded dimensions count once."""
    numel = 1
    for size, stride in zip(tensor.shape, strides_of(tensor), strict=True):
        if not (isinstance(stride, int) and stride == 0):
            numel *= hint(size)
    return numel * tensor.element_size()
