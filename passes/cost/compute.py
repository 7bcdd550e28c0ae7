"""The time of a graph's compute: a roofline for each kernel, with Inductor's fusion taken into account.

A node takes ``max(operations / rate, bytes / rate)``. Operations are torch's own count (``torch.utils.flop_counter``),
of which causal attention skips half. Matrix products have a rate that depends on their shape, and fused attention has
rates of its own. Only bytes that reach memory count. Pointwise operations and reductions that depend on each other,
with no matrix product or other library kernel in between, become one kernel, and their intermediate results are not
written.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from compiled_fsdp.compat.graphs import expression, hint, strides_of, tensors_in
from compiled_fsdp.compat.modules import tree_map
from compiled_fsdp.passes.cost.fusion import COUNTED_AS, Fusion, base_of, call_of, computes, is_library
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.graph import value

aten = torch.ops.aten
log = logging.getLogger(__name__)

# Matrix products whose output is divided into tiles, each with the places of its two factors among its arguments.
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2), aten._scaled_mm: (0, 1)}
_TILE = 128
"""Rows and columns of an output tile of a matrix product. Usual tiles of cuBLAS are 128 x 128 or larger."""
_LEAST_SPLIT = 1024
"""The least length of the inner dimension for which a tile is split."""


@dataclass(frozen=True)
class Cost:
    """One node's work."""

    # Floating-point operations: a number, or a sympy expression.
    flops: Any
    # Bytes that reach memory: a number, or a sympy expression.
    bytes: Any
    # How many kernels are launched.
    kernels: int
    # The dtype of its result, as "float32".
    dtype: str
    # The kind of kernel: "product", "attention", "attention_backward" or "memory".
    kind: str = "memory"
    # Of a matrix product: its number of output tiles, and into how many parts each can be split; else (0, 0).
    tiles: tuple[int, int] = (0, 0)
    # Of a library kernel with known sizes: ``kernel_key`` of its call; else "".
    key: str = ""

    def seconds(self, hardware: Hardware) -> Any:
        """The node's time on ``hardware``: a number, or a sympy expression of the symbolic sizes."""
        if self.key in hardware.kernels:
            return hardware.kernels[self.key]
        symbolic = isinstance(self.flops, sympy.Basic) or isinstance(self.bytes, sympy.Basic)
        rate = hardware.matmul(self.dtype) * hardware.share_of_multiprocessors(*self.tiles)
        if self.kind.startswith("attention"):
            rate *= hardware.attention[self.kind == "attention_backward"]
        at_work, at_memory = self.flops / rate, self.bytes / hardware.copy
        larger = sympy.Max(at_work, at_memory) if symbolic else max(at_work, at_memory)
        return larger + self.kernels * hardware.kernel

    def contention(self, hardware: Hardware) -> float:
        """The share by which the node takes longer beside a collective."""
        return hardware.contention.of(self.kind)


@dataclass(frozen=True)
class LibraryKernel:
    """The calls of one library kernel in a graph, as the plan prices them."""

    # Its name and shapes (``kernel_key``).
    key: str
    # ``Cost.kind`` and ``Cost.dtype``.
    kind: str
    dtype: str
    # How often the graph calls it, and the planned seconds of each call.
    count: int
    seconds: float


NO_COST = Cost(0, 0, 0, "float32")


def node_costs(
    gm: GraphModule, *, fused: bool, symbolic: bool = False, fusion: Fusion | None = None
) -> dict[Node, Cost]:
    """Return the cost of each node of a graph.

    Args:
        fused: whether Inductor generates the code and fuses nodes; else every node is a kernel.
        symbolic: whether costs are expressions of symbolic sizes; else numbers, with the hints of those sizes.
        fusion: the graph's kernels, if they are known already.
    """
    size = expression if symbolic else hint
    fusion = (fusion or Fusion(gm)) if fused else None
    costs: dict[Node, Cost] = {}
    read: set[tuple[Node, int]] = set()
    failed: dict[str, Exception] = {}
    for node in gm.graph.nodes:
        if not computes(node):
            costs[node] = NO_COST
            continue
        library = is_library(node)
        if fusion is None:
            stored, sources = True, list(dict.fromkeys(map(base_of, node.all_input_nodes)))
        else:
            stored, sources = node not in fusion.unstored, fusion.sources(node)
        moved = _bytes_of(node, size) if stored else 0
        for source in sources:
            if fusion is not None and not library:
                level = fusion.levels[node]
                inside = computes(source) and not is_library(source) and fusion.levels[source] == level
                if inside or (source, level) in read:
                    continue
                read.add((source, level))
            moved += _bytes_of(source, size)
        costs[node] = Cost(
            _counted(node, size, failed),
            moved,
            int(stored),
            _dtype(node),
            _kind(node),
            (0, 0) if symbolic else _tiles(node),
            "" if symbolic or not library else _key(node),
        )
    for op, error in failed.items():
        log.warning("no operations counted for %s: %r", op, error)
    return costs


def total_seconds(costs: Mapping[Node, Cost], hardware: Hardware) -> Any:
    """The sum of the times of all nodes: a number, or a sympy expression."""
    alike = Counter(costs.values())  # sympy takes milliseconds for each cost, and equal layers have equal costs
    return sum(count * cost.seconds(hardware) for cost, count in alike.items())


def library_kernels(costs: Mapping[Node, Cost], hardware: Hardware) -> tuple[LibraryKernel, ...]:
    """Return the library kernels of a graph whose shapes are known, in the order of their first calls."""
    alike = Counter(cost for cost in costs.values() if cost.key)
    return tuple(
        LibraryKernel(cost.key, cost.kind, cost.dtype, count, float(cost.seconds(hardware)))
        for cost, count in alike.items()
    )


def kernel_key(op: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """The name under which a library kernel's measured time is known: "mm 512x1024 1024x4096 bfloat16".

    A product with an added bias has the name of the product alone, because Inductor may add the bias elsewhere.

    Args:
        op: the op's name without its namespace, "addmm".
        shapes: of its arguments, in the schema's order; () for an argument that is no tensor.
        dtype: of the first tensor.
    """
    packet: Any = getattr(aten, op, None)
    places = _PRODUCTS.get(packet, range(len(shapes)))
    name = {"addmm": "mm", "baddbmm": "bmm"}.get(op, op)
    sizes = ["x".join(map(str, shapes[place])) for place in places if place < len(shapes) and shapes[place]]
    return " ".join([name, *sizes, dtype])


def _key(node: Node) -> str:
    op, args, kwargs = call_of(node)
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ""
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
    ]
    tensors = [argument.meta.get("val") if isinstance(argument, Node) else None for argument in given]
    shapes = [tuple(map(hint, t.shape)) if isinstance(t, torch.Tensor) else () for t in tensors]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, torch.Tensor)]
    return kernel_key(op.overloadpacket.__name__, shapes, dtypes[0] if dtypes else "")


def _kind(node: Node) -> str:
    op = call_of(node)[0]
    packet = getattr(op, "overloadpacket", op)
    name = getattr(packet, "__name__", "")
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    return "product" if packet in _PRODUCTS or "convolution" in name else "memory"


def _tiles(node: Node) -> tuple[int, int]:
    """The number of output tiles of a matrix product, and into how many parts each can be split."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    places = _PRODUCTS.get(packet)
    factors = [node.args[place] for place in places or () if place < len(node.args)]
    values = [factor.meta.get("val") for factor in factors if isinstance(factor, Node)]
    shapes = [tensor.shape for tensor in tensors_in(values)]
    if len(shapes) != 2:
        return 0, 0
    *batch, rows, inner = map(hint, shapes[0])
    tiles = math.prod(batch) * -(-rows // _TILE) * -(-hint(shapes[1][-1]) // _TILE)
    return tiles, max(1, inner // _LEAST_SPLIT)


def _bytes_of(node: Node, size: Any) -> Any:
    return sum(_numel(tensor, size) * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))


def _numel(tensor: torch.Tensor, size: Any) -> Any:
    total: Any = 1
    for length, stride in zip(tensor.shape, strides_of(tensor), strict=True):
        if not (isinstance(stride, int) and stride == 0):  # expanded: stored once
            total = total * size(length)
    return total


def _counted(node: Node, size: Any, failed: dict[str, Exception]) -> Any:
    """Floating-point operations of a node, from symbolic sizes if asked for.

    Torch's formulas may refuse symbols, because they compare sizes, and symbols may be equal without showing it. Then
    the hints are used. If the formulas refuse those, too, the count is 0, and the error goes into ``failed``. Counts
    that differ between ranks do no harm, because all ranks use one rank's plan.
    """
    for attempt in [size] if size is hint else [size, hint]:
        try:
            return _flops(node, attempt)
        except Exception as error:  # whatever a formula raises, because an estimate must not end a training run
            refused = error
    failed.setdefault(str(node.target), refused)
    return 0


def _flops(node: Node, size: Any) -> Any:
    op, op_args, op_kwargs = call_of(node)
    packet = getattr(op, "overloadpacket", None)
    packet = COUNTED_AS.get(getattr(packet, "__name__", ""), packet)
    count = flop_registry.get(packet)
    if count is None or ("val" not in node.meta and op is node.target) or not hasattr(count, "__wrapped__"):
        return 0  # formulas that are not wrapped need tensors: attention over sequences of different lengths

    def counted(size: Any) -> Any:
        def shape(node: Node) -> Any:  # the formulas take shapes, here as plain numbers, so that they add no guards
            return tree_map(lambda v: tuple(map(size, v.shape)) if isinstance(v, torch.Tensor) else v, value(node))

        args, kwargs = torch.fx.map_arg(op_args, shape), torch.fx.map_arg(op_kwargs, shape)
        operations = count(*args, **kwargs, out_val=shape(node) if "val" in node.meta else None)
        return operations / 2 if _is_causal(node) else operations

    try:
        return counted(size)
    except AssertionError:
        if size is hint:
            raise
        # The formulas compare expressions. Compiled autograd has its own symbols for saved tensors, so that one size
        # has several expressions. Here sizes that were equal when traced count as one.
        written: dict[int, Any] = {}
        return counted(lambda length: written.setdefault(hint(length), size(length)))


def _is_causal(node: Node) -> bool:
    """Whether a fused attention skips the operations above the diagonal, which torch's formulas count."""
    op, args, kwargs = call_of(node)
    schema = getattr(op, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
    return False


def _dtype(node: Node) -> str:
    arguments = (argument for argument in call_of(node)[1] if isinstance(argument, Node))
    tensors = tensors_in(node.meta["val"] if "val" in node.meta else [of.meta.get("val") for of in arguments])
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
