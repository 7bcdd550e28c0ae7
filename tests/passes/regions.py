"""Random graphs as large models have them: several meshes, replicas, other dimensions, gradients of any layout, the
model's own collectives over our links, fragments, gradients that are published.

Nodes are written down, not traced, which takes a third of the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, map_arg

from compiled_fsdp.buckets.collectives import by_rank
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.buckets.transport import ALL_GATHER, ALL_GATHER_COALESCED, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from compiled_fsdp.passes.context import GroupPlace, Groups, PassContext
from compiled_fsdp.passes.graph import ops
from compiled_fsdp.passes.plan import Read
from tests.passes.graphs import Param, eighths, with_rules

aten = torch.ops.aten
FAKE = FakeTensorMode()
MODELS = "the model's"
"""A group of all ranks in which no parameter is communicated."""


@dataclass(frozen=True)
class Mesh:
    """Ranks as replicas of groups that shard: rank r has shard r % shards in replica r // shards."""

    number: int
    shards: int
    replicas: int = 1
    # Whether reductions run in a group of their own.
    reduces_apart: bool = False
    # How many neighbours may reduce gradients first, as with a working copy in each node; 0: none.
    within: int = 0

    @property
    def number_of_parts(self) -> int:
        """The number of the groups that reduce first and then."""
        return 10 + self.number

    @property
    def groups_of_parts(self) -> Groups:
        return Groups(f"part {self.number}", f"part {self.number}", f"across {self.number}")

    @property
    def groups(self) -> Groups:
        gather, reduce = f"gather {self.number}", f"reduce {self.number}"
        over = f"replicas {self.number}" if self.replicas > 1 else None
        if over is not None and self.shards == 1:  # as `replicate` has it: no group gathers
            return Groups("", "", over)
        return Groups(gather, reduce if self.reduces_apart else gather, over)

    def members(self, name: str) -> list[list[int]] | None:
        """The ranks of each group of this name; None for a name of another mesh."""
        ranks = range(self.shards * self.replicas)
        if name in (self.groups.all_gather, self.groups.reduce_scatter):
            return [list(ranks[i : i + self.shards]) for i in ranks[:: self.shards]]
        if name == self.groups_of_parts.all_gather:
            return [list(ranks[i : i + self.within]) for i in ranks[:: self.within]]
        if name == self.groups_of_parts.replicate:
            return [list(ranks[i :: self.within]) for i in range(self.within)]
        return [list(ranks[i :: self.shards]) for i in range(self.shards)] if name == self.groups.replicate else None


@dataclass(frozen=True)
class MeshParam(Param):
    """A parameter on one of several meshes."""

    mesh: Mesh = Mesh(0, 2)
    dim: int = 0
    spec: ReduceSpec = ReduceSpec()  # noqa: RUF009  frozen
    prefetch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def shard_size(self) -> tuple[int, ...]:
        return tuple(-(-n // self.mesh.shards) if i == self.dim else n for i, n in enumerate(self.size))

    @property
    def reduce_text(self) -> str:
        return str(self.spec)

    @property
    def read_spec(self) -> ReadSpec:
        return replace(super().read_spec, world=self.mesh.shards, group_id=self.mesh.number, dim=self.dim)

    @property
    def reduction_spec(self) -> ReadSpec:
        return self.read_spec if self.spec.within is None else self.read_spec.reduced_within

    @property
    def reduces_in(self) -> Groups:
        """The groups that reduce its gradients first and then."""
        return self.mesh.groups if self.spec.within is None else self.mesh.groups_of_parts

    def read(self, index: int) -> Read:
        return replace(
            super().read(index), group_id=self.mesh.number, world=self.mesh.shards, dim=self.dim,
            replicas=self.mesh.replicas, prefetch_blocks=self.prefetch,
        )  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A random graph. Its steps take and leave a list of vectors, at first the input alone:

    ("compute", a, b)        a new value from two others, and from all that was left for it
    ("read", i, a)           a new value from parameter i and another
    ("alone", i, view)       something computed from parameter i alone, or a view of it, left for the next "compute"
    ("own", kind, group, a)  a collective of the model's own, left likewise; ``group``: a mesh's number, or -1
    ("retain", i)            parameter i stays full, as an output
    ("reduce", i, a, kind)   a gradient of parameter i, of a kind of memory
    """

    ranks: int
    params: tuple[MeshParam, ...]
    steps: tuple[tuple[Any, ...], ...]
    # Whether gradients are published in the graph, as compiled autograd's do.
    publishes: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether gradients are views of larger memory."""
        return any(kind == "reduce" and of[-1] == "view" for kind, *of in self.steps)

    @property
    def meshes(self) -> dict[int, Mesh]:
        return {param.mesh.number: param.mesh for param in self.params}

    @property
    def groups(self) -> dict[int, Groups]:
        meshes = self.meshes.values()
        parts = {mesh.number_of_parts: mesh.groups_of_parts for mesh in meshes if mesh.within}
        return {mesh.number: mesh.groups for mesh in meshes} | parts

    def context(self, phase: str, **options: Any) -> PassContext:
        reads = {i: param.read(i) for i, param in enumerate(self.params)}
        return PassContext(
            phase,
            reads,
            self.groups,
            place_of_group=lambda name: GroupPlace(name, len(self.members(name)[0])),
            **with_rules(
                {"replicates": any(m.within or (m.replicas > 1 and m.shards > 1) for m in self.meshes.values())}
                | options
            ),
        )

    def members(self, name: str) -> list[list[int]]:
        """The ranks of each group of a name."""
        found = [mesh.members(name) for mesh in self.meshes.values()]
        return next((groups for groups in found if groups is not None), [list(range(self.ranks))])

    def graph(self, length: int = 3) -> GraphModule:
        """The graph, for an input of ``length`` numbers; its inputs: shards, ids of parameters, the input."""
        return _Writer(self, length).write()

    def inputs(self, length: int = 3) -> list[list[Tensor]]:
        """Inputs for each rank; replicas have the same shards."""
        generator = torch.Generator().manual_seed(0)
        inputs: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for param in self.params:
            full = eighths(param.size, generator).to(param.shard_dtype)
            pieces = by_rank(full, math.prod(param.shard_size), param.mesh.shards, param.dim)
            for rank, given in enumerate(inputs):
                given.append(pieces[rank % param.mesh.shards].reshape(param.shard_size).clone())
        for rank, given in enumerate(inputs):
            given += [torch.tensor([i]) for i in range(len(self.params))]
            given.append(torch.linspace(-0.2, 0.3, length) * (rank + 1))
        return inputs


class _Writer:
    """Writes a region's graph node by node."""

    def __init__(self, region: Region, length: int) -> None:
        self.region, self.length, self.graph = region, length, Graph()
        self.shards, self.ids = [], []
        for i, param in enumerate(region.params):
            self.shards.append(self.input(f"shard{i}", param.shard_size, param.shard_dtype))
        for i in range(len(region.params)):
            self.ids.append(self.input(f"slot{i}", (1,), torch.int64))
        self.values = [self.input("x0", (length,), torch.float32)]
        # what the next "compute" takes in, and what of it has to be waited for
        self.left: list[Node] = []
        self.flying: list[Node] = []

    def input(self, name: str, size: Sequence[int], dtype: torch.dtype) -> Node:
        return self._with_value(self.graph.placeholder(name), size, dtype)

    def _with_value(self, node: Node, size: Sequence[int], dtype: torch.dtype) -> Node:
        with FAKE:
            node.meta["val"] = torch.empty(size, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        of, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with FAKE:
            node.meta["val"] = target(*of, **named)
        return node

    def total(self, value: Node) -> Node:
        found = self.call(aten.sum.default, value)
        narrow = value.meta["val"].dtype != torch.float32
        return self.call(aten._to_copy.default, found, dtype=torch.float32) if narrow else found

    def unshard(self, i: int) -> Node:
        p = self.region.params[i]
        args = self.shards[i], None, self.ids[i], str(p.read_spec), p.keep, 0, i
        return self._with_value(self.graph.call_function(ops.unshard.default, args), p.size, p.dtype)

    def reduce(self, i: int, grad: Node) -> Node:
        p = self.region.params[i]
        spec = p.reduction_spec
        if p.spec.within is not None:
            grad = self.by_parts(grad, p)
        node = self.graph.call_function(ops.reduce_grad.default, (grad, self.ids[i], str(spec), p.shard_dtype, i))
        return self._with_value(node, spec.reduced_size, p.shard_dtype)

    def by_parts(self, grad: Node, p: MeshParam) -> Node:
        """As ``collectives.by_parts`` has it."""
        (*before, rows), *after = p.size[: p.dim + 1], *p.size[p.dim + 1 :]
        ranks, world = p.mesh.within, p.mesh.shards
        shard = -(-rows // world)
        grad = self.call(aten.clone.default, grad, memory_format=torch.contiguous_format)
        if shard * world > rows:
            grad = self.call(aten.constant_pad_nd.default, grad, [0, 0] * len(after) + [0, shard * world - rows])
        parts = self.call(aten.view.default, grad, [*before, world // ranks, ranks, shard, *after])
        rest = [n for n in range(len(p.size) + 2) if n not in (p.dim, p.dim + 1)]
        moved = self.call(aten.permute.default, parts, [p.dim + 1, p.dim, *rest])
        moved = self.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, moved, [world, *before, shard, *after])

    def gradient(self, i: int, value: Node, kind: str) -> Node:
        """Of ones place by place, transposed, expanded, or a view of a larger tensor."""
        p, total = self.region.params[i], self.call(aten.sum.default, value)
        count = math.prod(p.size)
        if kind == "expanded":
            grad = self.call(aten.expand.default, total, list(p.size))
        else:
            larger = kind == "view"
            places = self.call(aten.arange.default, count + 2 * larger, dtype=torch.float32)
            flat = self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, places, 1.5), total)
            if larger:
                flat = self.call(aten.slice.Tensor, flat, 0, 1, count + 1)
            transposed = kind == "transposed" and len(p.size) > 1
            grad = self.call(aten.view.default, flat, list(reversed(p.size)) if transposed else list(p.size))
            if transposed:
                grad = self.call(aten.permute.default, grad, list(reversed(range(len(p.size)))))
        return grad if p.dtype is torch.float32 else self.call(aten._to_copy.default, grad, dtype=p.dtype)

    def own(self, kind: str, group: int, value: Node) -> None:
        """A collective of the model's own; what it gives is left, as vectors of any length."""
        c10d, length = torch.ops._c10d_functional, self.length
        groups = self.region.meshes[group].groups if group in self.region.meshes else None
        name = MODELS if groups is None else groups.all_gather or groups.replicate
        world = len(self.region.members(name)[0])
        if kind == "sum":
            self.flying.append(self.call(c10d.all_reduce.default, value, "sum", name))
        elif kind == "gather":
            self.flying.append(self.call(ALL_GATHER, value, world, name))
        elif kind == "gathers":
            both = self.call(ALL_GATHER_COALESCED, [value, self.call(aten.mul.Tensor, value, 2)], world, name)
            self.flying += [self.call(operator.getitem, both, i) for i in range(2)]
        else:
            large = self.call(aten.repeat.default, value, [world])
            if kind == "scatter":
                self.flying.append(self.call(REDUCE_SCATTER, large, "sum", world, name))
            else:
                self.flying.append(self.call(ALL_TO_ALL, large, [length] * world, [length] * world, name))

    def landed(self) -> list[Node]:
        """All that was left, waited for."""
        found = [*self.left, *(self.call(WAIT, node) for node in self.flying)]
        self.left, self.flying = [], []
        return found

    def write(self) -> GraphModule:
        retained: list[Node] = []
        reduced: dict[int, Node] = {}
        for kind, *of in self.region.steps:
            at = [self.values[j % len(self.values)] for j in of[:2] if isinstance(j, int)]
            if kind == "compute":
                found = self.call(aten.add.Tensor, at[0], self.call(aten.mul.Tensor, at[1], 2))
                for left in self.landed():
                    found = self.call(aten.add.Tensor, found, self.total(left))
                self.values.append(self.call(aten.tanh.default, found))
            elif kind == "read":
                scale = self.call(aten.sin.default, self.total(self.unshard(of[0])))
                self.values.append(self.call(aten.mul.Tensor, at[1], scale))
            elif kind == "alone":
                full = self.unshard(of[0])
                order = list(reversed(range(len(self.region.params[of[0]].size))))
                view = self.call(aten.permute.default, full, order)
                self.left.append(view if of[1] else self.call(aten.abs.default, self.call(aten.mul.Tensor, view, 2)))
            elif kind == "own":
                self.own(of[0], of[1], self.values[of[2] % len(self.values)])
            elif kind == "retain":
                full = self.unshard(of[0])
                retained.append(self.call(aten.clone.default, full) if self.region.publishes else self.retain(full))
            else:
                grad = self.reduce(of[0], self.gradient(of[0], self.values[of[1] % len(self.values)], of[2]))
                earlier = reduced.get(of[0])
                reduced[of[0]] = grad if earlier is None else self.call(aten.add.Tensor, earlier, grad)
        # copies, since a graph's output is not the view of a parameter
        rest = [self.call(aten.clone.default, left) for left in self.landed()]
        last = self.values[-1] if len(self.values) > 1 else self.call(aten.clone.default, self.values[-1])
        if self.region.publishes:
            gradients = [self.publish(i, grad) for i, grad in reduced.items()]
        else:
            gradients = list(reduced.values())
        self.graph.output((last, *rest, *retained, *gradients))
        gm = GraphModule(torch.nn.Module(), self.graph)
        gm.graph.lint()
        return gm

    def retain(self, full: Node) -> Node:
        node = self.graph.call_function(ops.retain.default, (full,))
        return self._with_value(node, full.meta["val"].shape, full.meta["val"].dtype)

    def publish(self, i: int, grad: Node) -> Node:
        node = self.graph.call_function(ops.accumulate_grad.default, (i, grad, "all", i))
        return self._with_value(node, (), torch.float32)


# ---- at random -------------------------------------------------------------------------------------------------------
MESHES: dict[int, list[tuple[int, int]]] = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}
"""By the number of ranks: shards and replicas of a mesh."""


@st.composite
def regions(draw: Any, *, publishes: bool = False, in_parts: bool = False) -> Region:
    """``in_parts``: all gradients are reduced by a part of the ranks first."""
    ranks = draw(st.sampled_from([4, 8] if in_parts else [2, 2, 3, 4, 4]))
    if in_parts:
        MESH = [(ranks, 1)]
    elif draw(st.integers(0, 19)) == 0:
        ranks, MESH = 1, [(1, 1)]
    else:
        MESH = MESHES[ranks]
    first, *others = (
        Mesh(
            number, *draw(st.sampled_from(MESH)), draw(st.booleans()),
            draw(st.sampled_from([2, ranks // 2])) if in_parts else 0,
        )
        for number in range(draw(st.sampled_from([1, 1, 2])))
    )  # fmt: skip
    meshes = [first, first, *others]
    blocks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    positions = draw(st.permutations(range(len(blocks))))
    specs = {mesh: draw(_specs(mesh)) for mesh in meshes}
    params = []
    for block, position in zip(blocks, positions, strict=True):
        mesh = draw(st.sampled_from(meshes))
        size = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(size) - 1)) if draw(st.integers(0, 3)) == 0 else 0
        if dim > 0:  # evenly
            size[dim] = mesh.shards * draw(st.integers(1, 2))
        dtype = draw(st.sampled_from([torch.float32] * 3 + [torch.bfloat16, torch.float64]))
        spec = specs[mesh] if in_parts or draw(st.booleans()) else ReduceSpec(str(dtype).removeprefix("torch."))
        lists = st.one_of(st.just(()), st.just(()), st.lists(st.sampled_from(blocks), max_size=2).map(tuple))
        stored = draw(st.sampled_from([None, None, torch.float32]))
        params.append(
            MeshParam(
                tuple(size), block, position, draw(st.booleans()), dtype, mesh.shards, stored,
                mesh, dim, spec, (draw(lists), draw(lists)),
            )
        )  # fmt: skip
    param, value = st.integers(0, len(params) - 1), st.integers(0, 30)
    kinds = st.sampled_from(["places", "places", "transposed", "expanded", "view"])
    own = st.sampled_from(["sum", "sum", "gather", "gathers", "scatter", "exchange"])
    reduce = st.tuples(st.just("reduce"), param, value, kinds)
    step = st.one_of(
        st.tuples(st.just("compute"), value, value),
        st.tuples(st.just("read"), param, value),
        st.tuples(st.just("alone"), param, st.booleans()),
        st.tuples(st.just("own"), own, st.sampled_from([-1, 0, 1]), value),
        *[reduce] * (8 if in_parts else 2),
        st.tuples(st.just("retain"), param),
    )
    steps = draw(st.lists(step, min_size=6 if in_parts else 1, max_size=14))
    return Region(ranks, tuple(params), tuple(steps), publishes)


def _specs(mesh: Mesh) -> st.SearchStrategy[ReduceSpec]:
    divisors = st.sampled_from([None, None, (1.0, 3.0), (2.0, 2.0)])
    twice = bool(mesh.within) or (mesh.replicas > 1 and mesh.shards > 1)
    syncs = st.sampled_from([GradSync.ALL] * 3 + [GradSync.SHARDS_ONLY] * twice)
    within = st.just((mesh.within, mesh.number_of_parts) if mesh.within else None)
    dtypes = st.sampled_from(["float32", "float32", "bfloat16", "float64"])
    return st.builds(ReduceSpec, dtypes, divisors, syncs, within=within)
