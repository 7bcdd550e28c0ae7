"""FX graphs, symbolic sizes, fake tensors, and torch's partitioner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # torch has no other public name for it

UNKNOWN_SIZE = 8192  # for sizes that are known only at run time; as Inductor's unbacked_symint_fallback


def hint(size: Any) -> int:
    """Return a number for a size: itself, or the value that a symbolic size had when it was traced.

    A symbolic size without such a value gives ``UNKNOWN_SIZE``.
    """
    if isinstance(size, torch.SymInt):
        known = size.node.hint if size.node.has_hint() else None
        return UNKNOWN_SIZE if known is None else int(known)
    return int(size)


def expression(size: Any) -> Any:
    """Return a symbolic size as a sympy expression; a number as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def computed_size(size: torch.SymInt, sizes: dict[Any, tuple[Any, Any]], node_of: Callable[..., torch.fx.Node]) -> Any:
    """Return a node that computes a symbolic size at the graph's insertion point.

    If one of the size's symbols is not known, the size itself is returned.

    Args:
        size: an expression, like 4 - s0.
        sizes: for the expression of each known size, the size and its place.
        node_of: takes ``(size, place)``, returns a node.
    """
    from torch.fx.proxy import GraphAppendingTracer
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

    wanted = size.node.expr
    if wanted in sizes:
        return node_of(*sizes[wanted])
    if not wanted.free_symbols <= sizes.keys():
        return size
    nodes = {symbol: node_of(*sizes[symbol]) for symbol in wanted.free_symbols}
    tracer = GraphAppendingTracer(next(iter(nodes.values())).graph)
    symbols = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    node: torch.fx.Node = sympy_interp(OptimizedPythonReferenceAnalysis, symbols, wanted).node
    _add_values(node)
    return node


def _add_values(node: torch.fx.Node) -> None:
    """Set ``meta["val"]`` of a node that computes a number, and of the nodes that it is computed from."""
    if "val" not in node.meta:
        for each in node.all_input_nodes:
            _add_values(each)
        assert callable(node.target)
        node.meta["val"] = node.target(*torch.fx.map_arg(node.args, lambda each: each.meta["val"]))


def hints_of(value: Any) -> dict[Any, int]:
    """Return the symbols in the shapes of fake tensors, each with the value that it had when it was traced."""
    found: dict[Any, int] = {}
    for tensor in tensors_in(value):
        for size in tensor.shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = hint(size)
    return found


def strides_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's strides; ones for a sparse tensor, which has none.

    A sparse tensor counts as a dense one, because that is the most memory that it can hold.
    """
    return tensor.stride() if tensor.layout is torch.strided else (1,) * tensor.dim()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a pytree."""
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def fake_mode_of(values: Any) -> Any:
    """Return the fake mode of the fake tensors among ``values``; a null context if there are none."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    return detect_fake_mode(tree_leaves(values)) or contextlib.nullcontext()


def new_fake_mode() -> Any:
    """Return a context in which new tensors have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def fake_mode_is_active() -> bool:
    """Whether new tensors are fake, without memory, because a ``FakeTensorMode`` is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def needs_values(error: BaseException | None) -> bool:
    """Whether ``error`` says that code needs the values of tensors that have no memory."""
    from torch._subclasses import fake_tensor

    return isinstance(
        error,
        (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedFakeTensorException,
        ),
    )


def is_static_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, strided, no subclass, and without symbolic sizes."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
        return False
    return not any(
        isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    )


def call_on_fake(op: Any, fake: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call an op that views or copies ``fake``, a tensor for which ``is_static_fake`` holds.

    A fourth of the time of the same call in a ``FakeTensorMode``, which looks in a cache for every call.
    """
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(fake.fake_mode):  # type: ignore[attr-defined]
        result = op(fake, *args, **kwargs)
    return FakeTensor(fake.fake_mode, result, fake.fake_device)  # type: ignore[attr-defined]


class FakeCopies:
    """Copies of fake tensors that share memory with each other as the originals do, and with nothing else."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self._kept: list[torch.Tensor] = []  # because a storage's number is free again once the storage is gone

    def same_memory(self, original: torch.Tensor, other: torch.Tensor) -> None:
        """Let copies share the memory of ``other`` if the tensors that they are made of share that of ``original``."""
        self._kept.append(original)
        self._storages[original.untyped_storage()._cdata] = other.untyped_storage()

    def of(self, value: Any) -> Any:
        """Return a copy of a fake tensor, or of a tuple or list of them; other values as they are."""
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(value, (tuple, list)):
            return type(value)(map(self.of, value))
        if type(value) is not FakeTensor:
            return value
        self._kept.append(value)
        storage = value.untyped_storage()
        with torch.utils._python_dispatch._disable_current_modes(), torch._C._DisableTorchDispatch():
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
            copied = torch.empty(0, dtype=value.dtype, device="meta")
            copied.set_(self._storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
            return FakeTensor(value.fake_mode, copied, value.fake_device)


def is_higher_order(target: Any) -> bool:
    """Whether a call target takes graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def call_without_grad(graph: torch.fx.Graph, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
    """Insert a call in ``torch.no_grad()`` into a Dynamo graph, at a place where gradients are enabled."""
    graph.call_function(torch._C._set_grad_enabled, (False,))
    node = graph.call_function(target, args)
    graph.call_function(torch._C._set_grad_enabled, (True,))
    return node


def stable_topological_sort(graph: torch.fx.Graph) -> None:
    """Move nodes after their inputs; all other nodes keep their places."""
    from torch._inductor.pattern_matcher import stable_topological_sort as sort

    sort(graph)


def reorder(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Put all nodes of ``graph`` into the given order."""
    for node in order:
        graph._root.prepend(node)


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph module with a graph of its own; the nodes' meta values and Dynamo's sources are shared."""
    from torch.fx._lazy_graph_module import _make_graph_module  # without Python code, until it is called

    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    value, node = output
    for original, copy in copies.items():
        if hasattr(original, "_dynamo_source"):  # AOTAutograd asks for it
            copy._dynamo_source = original._dynamo_source  # type: ignore[attr-defined]
    copied = graph.output(value)
    copied.meta = dict(node.meta)
    out = _make_graph_module(gm, graph)
    out.meta = dict(gm.meta)
    return out


def activation_memory_budget() -> float:
    """torch's own setting: the share of the activations that its partitioner may save. 1.0 if nobody has set it."""
    from torch._functorch import config

    return float(config.activation_memory_budget)


def min_cut_partition(joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """Cut a joint graph with torch's partitioner, which honours recompute marks."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
