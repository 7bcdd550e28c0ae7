"""Graphs made by hand for the passes, and a machine that runs one graph on all ranks at once, without processes.

The machine has its own implementation of reads and reductions, so a graph after the passes can be compared with the
graph as it was.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_fsdp.ops.impl  # noqa: F401  (defines the ops)
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import Kind, ReadSpec
from compiled_fsdp.buckets.transport import ALL_GATHER, ALL_GATHER_OUT, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from compiled_fsdp.passes.context import GroupPlace, Groups, PassContext
from compiled_fsdp.passes.graph import argument, calls, is_launch, ops, spec_of
from compiled_fsdp.passes.pipeline import run_passes, through
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.choose import PlanRules

GROUP = "a group"
ALL_GATHERS = (ALL_GATHER, ALL_GATHER_OUT)  # the second on CPU
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


@dataclass(frozen=True)
class Param:
    """A parameter of a made-up region, gathered and reduced in ``dtype``, and ``stored`` in it or in another one."""

    size: tuple[int, ...]
    block_number: int = 0
    position: int = 0
    keep: bool = False
    dtype: torch.dtype = torch.float32
    world: int = 2
    stored: torch.dtype | None = None

    @property
    def shard_dtype(self) -> torch.dtype:
        return self.stored or self.dtype

    @property
    def shard_size(self) -> tuple[int, ...]:
        return -(-self.size[0] // self.world), *self.size[1:]

    @property
    def reduce_text(self) -> str:
        return str(ReduceSpec(str(self.dtype).removeprefix("torch.")))

    @property
    def read_spec(self) -> ReadSpec:
        return ReadSpec(self.size, self.world, 0, 0, self.dtype, self.reduce_text, position=self.position)

    def read(self, index: int) -> Read:
        dtype = str(self.dtype).removeprefix("torch.")
        return Read(
            index,
            f"p{index}",
            group_id=0,
            world=self.world,
            size=self.size,
            dtype=dtype,
            itemsize=self.dtype.itemsize,
            block_number=self.block_number,
            position=self.position,
            keep_for_backward=self.keep,
            trainable=True,
            shard_itemsize=self.shard_dtype.itemsize,
            grad_itemsize=self.shard_dtype.itemsize,
            reduce_text=self.reduce_text,
        )

    def unshard(self, shard: Tensor, slot: Tensor, index: int) -> Tensor:
        return ops.unshard(shard, None, slot, str(self.read_spec), self.keep, 0, index)

    def reduce(self, grad: Tensor, slot: Tensor, index: int) -> Tensor:
        return ops.reduce_grad(grad, slot, str(self.read_spec), self.shard_dtype, index)


def context(params: Sequence[Param], phase: str = "backward", **options: Any) -> PassContext:
    """Parameters over one group; any other group is on the same node."""
    options.setdefault("place_of_group", lambda name: GroupPlace(name, 2))
    reads = {i: param.read(i) for i, param in enumerate(params)}
    return PassContext(phase, reads, {0: Groups.one(GROUP)}, **with_rules(options))


def with_rules(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``PassContext`` and of its rules, by name, as fields of ``PassContext``."""
    names = {field.name for field in dataclasses.fields(PlanRules)} & options.keys()
    rules = PlanRules(**{"bucket": "module"} | {name: options[name] for name in names})
    return {"rules": rules} | {name: value for name, value in options.items() if name not in names}


def launch_sum(tensor: Tensor) -> Tensor:
    """An all-reduce of the model's own, of which nothing has waited."""
    return torch.ops._c10d_functional.all_reduce(tensor, "sum", "another group")


def wait(tensor: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def trace(function: Callable[..., Any], params: Sequence[Param], *others: Tensor) -> GraphModule:
    """The graph of `function(shards, slots, *others)`, with fake values; its inputs in that order."""
    with FakeTensorMode():
        shards = [torch.empty(param.shard_size, dtype=param.shard_dtype) for param in params]
        slots = [torch.zeros((), dtype=torch.int64) for _ in params]
        fakes = [torch.empty(other.shape, dtype=other.dtype) for other in others]
        n = len(params)
        gm = make_fx(lambda *a: function(a[:n], a[n : 2 * n], *a[2 * n :]))(*shards, *slots, *fakes)
    names = [f"shard{i}" for i in range(n)] + [f"slot{i}" for i in range(n)] + [f"x{i}" for i in range(len(others))]
    for node, name in zip(list(gm.graph.nodes), names, strict=False):
        node._rename(name)
    gm.recompile()
    return gm


def eighths(size: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers from -2 to 2 whose sums are exact: the same in any order, and so in any layout of memory."""
    return torch.randint(-16, 17, tuple(size), generator=generator) / 8


def inputs_of(params: Sequence[Param], *others: Tensor) -> list[list[Tensor]]:
    """Inputs of a traced graph for each rank: shards of random parameters, zero-padded; `others` times rank + 1."""
    generator = torch.Generator().manual_seed(0)
    world = params[0].world
    by_rank: list[list[Tensor]] = [[] for _ in range(world)]
    for param in params:
        full = pad(eighths(param.size, generator).to(param.shard_dtype), world * param.shard_size[0])
        for inputs, shard in zip(by_rank, full.chunk(world), strict=True):
            inputs.append(shard.clone())
    for rank, inputs in enumerate(by_rank):
        inputs += [torch.tensor(0)] * len(params) + [other * (rank + 1) for other in others]
    return by_rank


def planned(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """The graph after all passes but `lower` and `verify`."""
    return run_passes(through("schedule"), gm, ctx)


def bucketed(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """The graph with the plan's buckets, before launches and waits are moved to their places."""
    return run_passes(through("bucket"), gm, ctx)


def gathers(gm: GraphModule) -> list[Node]:
    return calls(gm, *ALL_GATHERS)


def reductions(gm: GraphModule) -> list[Node]:
    return calls(gm, REDUCE_SCATTER)


def text(gm: GraphModule) -> str:
    """One line a call, in order: `name = op(inputs)`, with lists in brackets and without numbers. For expecttest."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            shown = [_shown(arg) for arg in node.args if _shown(arg)]
            shown += [spec_of(node).transport] if is_launch(node) else []
            lines.append(
                f"{_shown(node)} = {getattr(node.target, '_opname', node.target.__name__)}({', '.join(shown)})"
            )
        elif node.op == "output":
            lines.append(f"return {_shown(node.args[0])}")
    return "\n".join(lines)


def launched(gm: GraphModule, kind: Kind | None = None, *, crossing: bool | None = None) -> list[Node]:
    """Launches of buckets, before they are lowered, in order.

    ``kind``: of this one; ``crossing``: whether of those at the graph's edges; None for all.
    """
    return [
        node
        for node in calls(gm, ops.launch.default)
        if (spec := spec_of(node)).transport != "all_reduce_shards"
        and kind in (None, spec.kind)
        and crossing in (None, spec.edge is not None)
    ]


def _shown(arg: Any) -> str:
    if isinstance(arg, Node):
        return "" if arg.name.startswith("slot") else arg.name.replace("_default", "").replace("_tensor", "")
    if isinstance(arg, (list, tuple)) and any(isinstance(a, Node) for a in arg):
        shown = [text for text in map(_shown, arg) if text]
        return f"[{', '.join(shown)}]" if shown else ""
    return ""


# ---- the machine -----------------------------------------------------------------------------------------------------
def pad(tensor: Tensor, rows: int) -> Tensor:
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows - tensor.shape[0]])


@dataclass
class InFlight:
    """What a launch returns: nothing but a wait can use it."""

    kind: str
    tensor: Tensor


@dataclass
class Machine:
    """Runs a graph, lowered or not, on all ranks in step.

    Attributes:
        launches: the kinds of the collectives, in order, without the model's own.
        most: by kind, how many were in flight at a time.
    """

    launches: list[str] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=lambda: {"gather": 0, "reduce": 0})

    def run(self, gm: GraphModule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The outputs of each rank."""
        envs: list[dict[Node, Any]] = [{} for _ in inputs]
        feeds = [iter(given) for given in inputs]
        flying = {"gather": 0, "reduce": 0, "model": 0}
        for node in gm.graph.nodes:
            args = [torch.fx.map_arg((node.args, node.kwargs), lambda n, env=env: env[n]) for env in envs]
            if node.op == "output":
                assert not any(flying.values()), f"never waited for: {flying}"
                return [list(a[0][0]) for a in args]
            if node.op == "placeholder":
                results: list[Any] = [next(feed) for feed in feeds]
            elif node.target is ALL_TO_ALL:
                assert all(a[0][-1] == GROUP for a in args)
                results = [InFlight("reduce", t) for t in _collective("exchange", [a[0][0] for a in args])]
                self.launches.append("reduce")
                flying["reduce"] += 1
                self.most["reduce"] = max(self.most["reduce"], flying["reduce"])
            elif node.target in (*ALL_GATHERS, REDUCE_SCATTER):
                kind = "gather" if node.target in ALL_GATHERS else "reduce"
                assert all(a[0][-2:] == (len(envs), GROUP) for a in args)
                results = [InFlight(kind, t) for t in _collective(kind, [a[0][0] for a in args])]
                self.launches.append(kind)
                flying[kind] += 1
                self.most[kind] = max(self.most[kind], flying[kind])
            elif node.target is ALL_REDUCE:
                total = torch.stack([a[0][0] for a in args]).sum(0)
                results = [InFlight("model", total.clone()) for _ in args]
                flying["model"] += 1
            elif node.target is WAIT:
                flights = [a[0][0] for a in args]
                assert all(isinstance(flight, InFlight) for flight in flights), f"{node} waits for no launch"
                flying[flights[0].kind] -= 1
                results = [flight.tensor for flight in flights]
            elif node.target is ops.unshard.default:
                sent = [a[0][0].to(argument(node, "dtype")) for a in args]
                rows = argument(node, "size")[0]
                results = [t[:rows] for t in _collective("gather", sent)]
            elif node.target is ops.reduce_grad.default:
                shape = argument(node, "shard_size")
                grads = [pad(a[0][0], shape[0] * len(envs)) for a in args]
                results = [t.view(shape).to(argument(node, "dtype")) for t in _collective("reduce", grads)]
            else:
                results = [node.target(*a, **k) for a, k in args]
            for env, result in zip(envs, results, strict=True):
                env[node] = result
        raise AssertionError("no output")


def _collective(kind: str, tensors: list[Tensor]) -> list[Tensor]:
    if kind == "gather":
        return [torch.cat(tensors).clone() for _ in tensors]
    if kind == "exchange":
        return [torch.cat(parts).clone() for parts in zip(*(t.chunk(len(tensors)) for t in tensors), strict=True)]
    total = torch.stack(tensors).sum(0) / len(tensors)
    return [piece.clone() for piece in total.chunk(len(tensors))]


# ---- a backward ------------------------------------------------------------------------------------------------------
def backward_of_layers(layers: int = 3, dim: int = 4, **of_param: Any) -> tuple[GraphModule, list[Param], list[Tensor]]:
    """A backward as AOTAutograd would cut it.

    It has `layers` blocks of weight and bias and a root, whose parameter (an embedding) comes last. Returns the graph,
    its parameters (weight and bias by layer, then the root's) and its other inputs: the gradient of the output, each
    layer's input.
    """
    params = [
        Param(size, i // 2, i % 2, **of_param) for i in range(2 * layers) for size in [((dim, dim), (dim,))[i % 2]]
    ]
    params.append(Param((5, dim), layers, 0, **of_param))

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], grad: Tensor, *saved: Tensor) -> list[Tensor]:
        out = []
        for layer in reversed(range(layers)):
            w, b = 2 * layer, 2 * layer + 1
            full = params[w].unshard(shards[w], slots[w], w)
            bias = params[b].unshard(shards[b], slots[b], b)
            grad = grad * torch.cos(saved[layer] @ full.t() + bias)
            out.append(params[w].reduce(grad.t() @ saved[layer], slots[w], w))
            out.append(params[b].reduce(grad.sum(0), slots[b], b))
            grad = grad @ full
        root = grad.new_zeros(5, dim).index_add(0, torch.arange(grad.shape[0]) % 5, grad)
        return [*out, params[-1].reduce(root, slots[-1], len(params) - 1)]

    others = [torch.linspace(-1, 1, 6 * dim).reshape(6, dim) * (i + 1) for i in range(layers + 1)]
    return trace(function, params, *others), params, others
