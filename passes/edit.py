"""Changes of graphs: calls that are added, and calls that others take the place of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from compiled_fsdp.compat.graphs import TorchDispatchMode, computed_size, expression, fake_mode_of
from compiled_fsdp.passes.graph import aten, prims, value
from compiled_fsdp.passes.views import memory_of


def add_call(graph: Graph, target: Any, *args: Any) -> Node:
    """Append a call with its fake value, at the graph's insertion point."""
    node = graph.call_function(target, args)
    fakes = torch.fx.map_arg(args, value)
    with fake_mode_of(fakes):
        node.meta["val"] = target(*fakes)
    return node


def inline(node: Node, function: Callable[..., Any], tensors: Sequence[Node]) -> list[Node]:
    """Replace ``node``, or the elements that are taken from it, by what ``function(*tensors)`` does.

    That is recorded at ATen's level. Returns the new nodes.
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
    return recorder.added


class _Recorder(TorchDispatchMode):
    """Writes what runs into a graph, at its insertion point.

    That is what ``make_fx`` does in a graph of its own, in a tenth of the time.
    """

    def __init__(self, graph: Graph, known: Iterable[tuple[torch.Tensor, Node]]) -> None:
        super().__init__()
        self.graph = graph
        self.added: list[Node] = []
        self._known = {id(tensor): (tensor, node) for tensor, node in known}  # alive, or another could get its id

    def node_of(self, tensor: Any) -> Any:
        """The node that made a tensor, or one that is a symbolic size; anything else as it is."""
        if isinstance(tensor, torch.SymInt):
            return self._size(tensor)
        return self._known[id(tensor)][1] if isinstance(tensor, torch.Tensor) else tensor

    def _size(self, size: Any) -> Any:
        """A node for a symbolic size, from those of known tensors: a number in code it could not be."""
        known = [(t, node) for t, node in self._known.values() if isinstance(t, torch.Tensor)]
        sizes = {expression(own): (own, (node, dim)) for t, node in known for dim, own in enumerate(t.shape)}
        return computed_size(size, sizes, lambda own, place: self._add(aten.sym_size.int, own, place, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:  # Inductor has no lowering for it
            return self._cast(args[0], **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, (torch.Tensor, list, tuple)) and not func._schema.is_mutable:  # asks for a device
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


# what profilers and logs show of the line that a node came from
_KEEP_META = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


def keep_meta(node: Node) -> dict[str, Any]:
    """The metadata that a node inherits when it takes the place of ``node``, a call of one of our ops."""
    return {"of_bucket": True, **{k: v for k, v in node.meta.items() if k in _KEEP_META}}


def replace_by_input(node: Node) -> None:
    """Replace a call by its first argument.

    Where the call is an output, which must be neither an input nor another output, a copy takes its place.
    """
    tensor: Any = node.args[0]
    if any(user.op == "output" and _is_callers(tensor, user) for user in node.users):
        with node.graph.inserting_before(node):
            tensor = add_call(node.graph, torch.ops.aten.clone.default, tensor)
    node.replace_all_uses_with(tensor)
    node.graph.erase_node(node)


def _is_callers(tensor: Node, output: Node) -> bool:
    """Whether the caller has ``tensor``, or will have it as one of the graph's outputs."""
    memory = memory_of(tensor)
    return memory.op != "call_function" or any(memory_of(other) is memory for other in output.all_input_nodes)
