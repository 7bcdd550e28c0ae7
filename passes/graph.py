"""Small questions about graphs that several passes ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_fsdp.compat import fake_mode_of, is_higher_order

ops = torch.ops.compiled_fsdp
WAIT = torch.ops._c10d_functional.wait_tensor.default
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
GATHER_OUT = torch.ops._c10d_functional.all_gather_into_tensor_out.default
REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    """Calls of any of ``targets``, in graph order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def planned_collectives(gm: GraphModule) -> list[Node]:
    """The gathers and reductions that our lowering made, in graph order; a model may have others of its own."""
    return [node for node in calls(gm, GATHER, GATHER_OUT, REDUCE) if node.meta.get("of_bucket")]


def argument(node: Node, name: str) -> Any:
    """The argument ``name`` of a call of one of our ops, its default where it was left out."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, arg in enumerate(schema.arguments):
        if arg.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, arg.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}")


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set the argument ``name`` of a call of one of our ops, which may have been left out."""
    schema = node.target._schema  # type: ignore[union-attr]
    position = next(i for i, arg in enumerate(schema.arguments) if arg.name == name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def value(node: Any) -> Any:
    """The fake tensor (or number) that ``node`` stands for."""
    return node.meta["val"] if isinstance(node, Node) else node


def take_full(gm: GraphModule) -> int:
    """Replace the reads of parameters that are full already by the full tensors; returns how many there were."""
    reads = calls(gm, ops.read_full.default)
    for read in reads:
        replace_by_input(read)
    return len(reads)


def replace_by_input(node: Node) -> None:
    """Replace a call by its first argument; by a copy where it is an output, which must not be an input."""
    tensor: Any = node.args[0]
    if any(user.op == "output" for user in node.users):
        with node.graph.inserting_before(node):
            tensor = add_call(node.graph, torch.ops.aten.clone.default, tensor)
    node.replace_all_uses_with(tensor)
    node.graph.erase_node(node)


def add_call(graph: Graph, target: Any, *args: Any) -> Node:
    """Append a call with its fake value, at the graph's insertion point."""
    node = graph.call_function(target, args)
    fakes = torch.fx.map_arg(args, value)
    with fake_mode_of(fakes):
        node.meta["val"] = target(*fakes)
    return node


def inline(node: Node, function: Callable[..., Any], tensors: Sequence[Node]) -> list[Node]:
    """Replace ``node`` by what ``function(*tensors)`` does, recorded at ATen's level; returns the new nodes."""
    fakes = [value(t) for t in tensors]
    with fake_mode_of(fakes):
        traced = make_fx(function)(*fakes)
    graph = node.graph
    env: dict[Node, Any] = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), tensors, strict=True))
    added = []
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
                env[inner].meta = {
                    "val": inner.meta["val"],
                    "of_bucket": True,
                    **{k: v for k, v in node.meta.items() if k in _KEEP_META},
                }
                added.append(env[inner])
    (result,) = next(iter(reversed(traced.graph.nodes))).args
    node.replace_all_uses_with(env[result])
    graph.erase_node(node)
    return added


# what profilers and logs show of the line that a node came from
_KEEP_META = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


def from_parameters_alone(gm: GraphModule, sources: Callable[[Node], bool]) -> dict[Node, None]:
    """Nodes computed from parameters and constants alone: ``sources`` and what follows from nothing else, in order.

    Random operations and everything with a side effect are left out.
    """
    constants: set[Node] = set()
    derived: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if sources(node):
            derived[node] = None
            continue
        if _impure(node):
            continue
        inputs = node.all_input_nodes
        if all(i in constants for i in inputs):
            constants.add(node)
        elif all(i in constants or i in derived for i in inputs):
            derived[node] = None
    return derived


def _impure(node: Node) -> bool:
    if is_higher_order(node.target) or "c10d" in str(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
