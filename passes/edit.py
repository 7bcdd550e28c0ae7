"""Functions that change graphs: they add calls, and replace calls by others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from compiled_fsdp.compat.graphs import (
    TorchDispatchMode,
    call_on_fake,
    computed_size,
    expression,
    fake_mode_of,
    is_static_fake,
)
from compiled_fsdp.passes.graph import aten, prims, value
from compiled_fsdp.passes.views import memory_of


def add_call(graph: Graph, target: Any, *args: Any) -> Node:
    """Add a call, with its fake value, at the graph's insertion point; return the new node."""
    node = graph.call_function(target, args)
    fakes = torch.fx.map_arg(args, value)
    with fake_mode_of(fakes):
        node.meta["val"] = target(*fakes)
    return node


def inline(node: Node, function: Callable[..., Any], tensors: Sequence[Node]) -> list[Node]:
    """Replace ``node``, or the elements that are taken from it, by the ATen calls of ``function(*tensors)``.

    The function runs once with fake tensors, and its calls are recorded into the graph, but not views that change
    nothing or that only another view needs. Returns the new nodes.
    """
    graph = node.graph
    with graph.inserting_before(node), fake_mode_of([value(t) for t in tensors]):
        fakes = [value(t).detach() if i else value(t) for i, t in enumerate(tensors)]  # nodes may share a value
        recorder = _Recorder(graph, zip(fakes, tensors, strict=True))
        with recorder:
            result = function(*fakes)
    for added in recorder.added:
        added.meta |= keep_meta(node)
    if isinstance(result, (list, tuple)):
        for element in list(node.users):
            place: Any = element.args[1]
            element.replace_all_uses_with(recorder.node_of(result[place]))
            graph.erase_node(element)
    else:
        node.replace_all_uses_with(recorder.node_of(result))
    graph.erase_node(node)
    for added in reversed(recorder.added):
        if not added.users and added.target is aten.view.default:
            graph.erase_node(added)
            recorder.added.remove(added)
    return recorder.added


_VIEWS_AND_COPIES = {
    aten.view.default, aten.slice.Tensor, aten.select.int, aten.clone.default, aten._unsafe_view.default,
}  # fmt: skip


class _Recorder(TorchDispatchMode):
    """Records the calls that run into a graph, at its insertion point.

    ``make_fx`` records into a graph of its own, and takes ten times as long.
    """

    def __init__(self, graph: Graph, known: Iterable[tuple[torch.Tensor, Node]]) -> None:
        super().__init__()
        self.graph = graph
        self.added: list[Node] = []
        # Holds the tensors, because the id of one that is freed could be given to another.
        self._known = {id(tensor): (tensor, node) for tensor, node in known}
        self._viewed: dict[int, torch.Tensor] = {}  # for the result of a view, the contiguous tensor that it views

    def node_of(self, tensor: Any) -> Any:
        """The node of a tensor or of a symbolic size; anything else is returned unchanged."""
        if isinstance(tensor, torch.SymInt):
            return self._size(tensor)
        return self._known[id(tensor)][1] if isinstance(tensor, torch.Tensor) else tensor

    def _size(self, size: Any) -> Any:
        """A node that computes a symbolic size from sizes of known tensors, because code cannot contain a symbol."""
        known = [(t, node) for t, node in self._known.values() if isinstance(t, torch.Tensor)]
        sizes = {expression(own): (own, (node, dim)) for t, node in known for dim, own in enumerate(t.shape)}
        return computed_size(size, sizes, lambda own, place: self._add(aten.sym_size.int, own, place, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:  # Inductor has no lowering for it
            return self._cast(args[0], **(kwargs or {}))
        is_view, changes_nothing = func is aten.view.default, False
        if is_view:
            args = self._viewed.get(id(args[0]), args[0]), *args[1:]
        call = partial(call_on_fake, func) if func in _VIEWS_AND_COPIES and is_static_fake(args[0]) else func
        out = call(*args, **(kwargs or {}))
        if is_view or func is aten.slice.Tensor:
            changes_nothing = _have_same_layout(args[0], out)
            if (is_view or changes_nothing) and is_static_fake(args[0]) and args[0].is_contiguous():
                self._viewed[id(out)] = self._viewed.get(id(args[0]), args[0])
        if changes_nothing:
            self._known[id(out)] = out, self.node_of(args[0])
            return out
        if not isinstance(out, (torch.Tensor, list, tuple)) and not func._schema.is_mutable:  # such as a device query
            return out
        node = self._add(func, out, map_aggregate(args, self.node_of), map_aggregate(kwargs or {}, self.node_of))
        if isinstance(out, (list, tuple)):
            for i, element in enumerate(out):
                self._add(operator.getitem, element, (node, i), {})
        return out

    def _cast(self, tensor: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        if device is not None and device != tensor.device:
            tensor = self.__torch_dispatch__(prims.device_put.default, (), (tensor, device, non_blocking))
        if dtype is not None and dtype != tensor.dtype:
            tensor = self.__torch_dispatch__(prims.convert_element_type.default, (), (tensor, dtype))
        return tensor

    def _add(self, target: Any, out: Any, args: Any, kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = out
        self.added.append(node)
        self._known[id(out)] = out, node
        return node


def _have_same_layout(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view of ``tensor`` begins where ``tensor`` does and has its sizes and strides."""
    if not (is_static_fake(tensor) and is_static_fake(view)) or tensor.storage_offset() != view.storage_offset():
        return False
    return (tensor.shape, tensor.stride()) == (view.shape, view.stride())


# the source location of a node, which profilers and logs show
_KEEP_META = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


def keep_meta(node: Node) -> dict[str, Any]:
    """The metadata of ``node``, a call of a compiled_fsdp op, that the nodes which replace it inherit."""
    return {"of_bucket": True, **{k: v for k, v in node.meta.items() if k in _KEEP_META}}


def replace_by_input(node: Node) -> None:
    """Replace a call by its first argument.

    If the call is an output of the graph, and the argument is an input or another output, it is replaced by a copy.
    """
    tensor: Any = node.args[0]
    if any(user.op == "output" and _is_callers(tensor, user) for user in node.users):
        with node.graph.inserting_before(node):
            tensor = add_call(node.graph, torch.ops.aten.clone.default, tensor)
    node.replace_all_uses_with(tensor)
    node.graph.erase_node(node)


def _is_callers(tensor: Node, output: Node) -> bool:
    """Whether the graph's caller has the memory of ``tensor`` already, or gets it as another output of the graph."""
    memory = memory_of(tensor)
    return memory.op != "call_function" or any(memory_of(other) is memory for other in output.all_input_nodes)
