"""Queries about nodes and graphs that several passes share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import host_copies, transport
from compiled_fsdp.buckets.reduction import PIECE
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec
from compiled_fsdp.compat.graphs import is_higher_order
from compiled_fsdp.passes.op_schema import schema_of

ops = torch.ops.compiled_fsdp
aten = torch.ops.aten
prims = torch.ops.prims
COMPLETION_ORDER = "compiled_fsdp_complete"
"""Key of ``Node.meta`` of nodes that depend on reductions: the number of the last of these, in order of completion."""
IS_SHARD = "compiled_fsdp_shard"
"""Key of ``Node.meta`` of inputs that hold parameters which are read without a collective: the indices of their reads.

The planner counts their memory with the shards. A hook may write to it when the gradient is published. The tuple is
empty for inputs of all-gather extensions, because no read is of such an input directly.
"""
IS_APART = "compiled_fsdp_apart"
"""Key of ``Node.meta`` of a ``retain`` call: whether its argument, the full parameter, is also an output."""
RETAINS = "compiled_fsdp_retains"
"""Key of ``Node.meta`` of the output node: whether the graph returns full parameters that stay in memory after it."""
IS_SECOND = "compiled_fsdp_second"
"""Key of ``Node.meta`` of the nodes of a second reduction: its bucket was reduced by other ranks before."""
IS_ID = "compiled_fsdp_id"
"""Key of ``Node.meta`` of nodes that cut a ``param_id`` out of its block's numbers: passes treat them as inputs."""
NOT_STORED = "compiled_fsdp_not_stored"
"""Key of ``Node.meta`` of nodes whose results Inductor's kernels do not write to memory (``cost/fusion.py``)."""
OVERWRITES = "compiled_fsdp_overwrites"
"""Key of ``Node.meta`` of nodes whose results take over the memory of a tensor that their kernel reads last."""
ENCODES = "compiled_fsdp_encodes"
"""Key of ``Node.meta`` of nodes that compute the pieces which an all-gather extension sends: they run first."""


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    """Return the calls of any of ``targets``, in graph order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def is_given(node: Node) -> bool:
    """Whether a node is available before any compute: an input, or a ``param_id`` that is cut out of an input."""
    return node.op in ("placeholder", "get_attr") or IS_ID in node.meta


def cut_ids(gm: GraphModule) -> list[Node]:
    """Return the nodes that cut one parameter's ``param_id`` out of its block's numbers."""
    ids = [argument(node, "param_id") for node in calls(gm, ops.unshard.default, ops.reduce_grad.default)]
    return list(dict.fromkeys(node for node in ids if node.op == "call_function"))


def planned_collectives(gm: GraphModule) -> list[Node]:
    """Return the gathers and reductions of compiled_fsdp in graph order, without the model's own collectives."""
    return [node for node in gm.graph.nodes if is_planned(node)]


def is_planned(node: Node) -> bool:
    """Whether a node launches a gather or a reduction of the plan."""
    if node.op != "call_function" or not node.meta.get("of_bucket"):
        return False
    return (node.target in transport.LAUNCHES or is_launch(node)) and IS_SECOND not in node.meta


def is_launch(node: Node) -> bool:
    """Whether a node calls the op ``launch``. After ``lower``, only buckets that cross the graph's edges have it."""
    return getattr(node.target, "_opname", "") == "launch" and is_ours(node.target)


def spec_of(node: Node) -> Any:
    """Parse the spec of a call of a compiled_fsdp op: a ``BucketSpec`` for a launch, otherwise a ``ReadSpec``."""
    return (BucketSpec if is_launch(node) else ReadSpec).parse(argument(node, "spec"))


def kind_of(node: Node) -> str | None:
    """What a node launches that may run beside compute; None for any other node.

    A collective's key in ``transport.KINDS``, or "offload" or "reload" for a copy to host memory or back.
    """
    return transport.kind_of(node.target) or host_copies.KINDS.get(node.target)


def is_wait(node: Node) -> bool:
    """Whether a node waits for collectives, or for a copy to host memory or back."""
    return transport.waits(node.target) or node.target is host_copies.WAIT_COPY


def waited_for(wait: Node) -> Iterator[Node]:
    """Yield the launches that a wait waits for; nothing for any other node."""
    for source in wait.all_input_nodes if is_wait(wait) else ():
        launch = source.all_input_nodes[0] if is_getitem(source) else source
        if kind_of(launch) is not None:
            yield launch


def is_ours(op: Any) -> bool:
    """Whether an op belongs to compiled_fsdp."""
    return bool(op.namespace == "compiled_fsdp")


def keeps_order(op: Any) -> bool:
    """Whether calls of an op keep their order in a graph: collectives, and ops with effects outside of the graph."""
    effects = (
        "accumulate", "add_accumulated", "accumulate_grad", "end_backward", "launch", "start_offload", "start_reload",
        "wait_copy",
    )  # fmt: skip
    return transport.is_functional(op) or op in [getattr(ops, name).default for name in effects]


def is_gather(node: Node) -> bool:
    """Whether a collective of a lowered graph is a gather."""
    return node.target in transport.GATHERS or (is_launch(node) and spec_of(node).kind.supplies)


def crosses_graph(node: Node) -> bool:
    """Whether a node launches a collective that may be in flight before the graph runs or after it."""
    return is_launch(node) and spec_of(node).crosses_graph


def is_deferred_reduction(node: Node) -> bool:
    """Whether a node launches a reduction that is waited for after the graph."""
    return is_launch(node) and spec_of(node).edge is not None and not spec_of(node).kind.supplies


def in_host_memory(node: Node) -> bool:
    """Whether a node's result is in host memory because an activation was copied there."""
    if node.target in (host_copies.OFFLOAD, host_copies.START_OFFLOAD):
        return True
    return any(user.target in (host_copies.RELOAD, host_copies.START_RELOAD) for user in node.users)


def returns_several(launch: Node) -> bool:
    """Whether a launch in a lowered graph returns a list of tensors, each with its own wait."""
    return launch.target in transport.GROUPED or is_launch(launch)


def waits_of(launch: Node) -> list[Node]:
    """Return the waits for a launch, lowered or not: one, or one for each tensor of a coalesced bucket."""
    users = [user for user in launch.users for user in (user.users if is_getitem(user) else [user])]
    return [user for user in users if user.target is transport.WAIT]


def draws_numbers(node: Node) -> bool:
    """Whether a call draws random numbers. Attention may, but not without dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return "dropout_p" not in _arguments(node.target) or argument(node, "dropout_p") != 0


def is_getitem(node: Node) -> bool:
    """Whether a node takes an element of a tuple or list."""
    return node.op == "call_function" and node.target is operator.getitem


@functools.cache
def _arguments(target: Any) -> Mapping[str, tuple[int, Any]]:
    """Map argument names to (position, default), for an op or for a Python function in Dynamo's graph."""
    if hasattr(target, "_schema"):
        return schema_of(target).arguments
    formals = enumerate(inspect.signature(target).parameters.values())
    return {formal.name: (place, formal.default) for place, formal in formals}


def argument(node: Node, name: str) -> Any:
    """The argument ``name`` of a call of a compiled_fsdp op, or its default; or the field ``name`` of the call's spec.

    For example, ``argument(node, "world")`` of an ``unshard`` call is the number of shards, which its ``ReadSpec`` has.
    """
    place = _arguments(node.target).get(name)
    if place is None:
        return getattr(spec_of(node), name)
    position, default = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set the argument ``name`` of a call of a compiled_fsdp op, or the field ``name`` of the call's spec."""
    place = _arguments(node.target).get(name)
    if place is None:
        set_argument(node, "spec", str(replace(spec_of(node), **{name: value})))
    elif place[0] < len(node.args):
        node.update_arg(place[0], value)
    else:
        node.update_kwarg(name, value)


def value(node: Any) -> Any:
    """The fake tensor or number of ``node``; anything but a node is returned unchanged."""
    return node.meta["val"] if isinstance(node, Node) else node


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """All nodes that depend on one of ``nodes``, without the output."""
    found: set[Node] = set()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack += list(node.users)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """``nodes``, and all nodes that they are computed from."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def computed_from_parameters(gm: GraphModule, sources: Callable[[Node], bool]) -> dict[Node, None]:
    """Nodes that are computed from parameters and constants alone, in graph order.

    These are the calls for which ``sources`` is true, and the calls that depend on nothing but them and constants.
    Random operations and calls with side effects are left out.
    """
    constants = encoders(gm)
    derived: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if sources(node):
            derived[node] = None
            continue
        if node in constants or _impure(node):
            continue
        inputs = node.all_input_nodes
        if all(i in constants for i in inputs):
            constants.add(node)
        elif all(i in constants or i in derived for i in inputs):
            derived[node] = None
    return derived


def encoders(gm: GraphModule) -> set[Node]:
    """The nodes that compute the pieces which all-gather extensions send, with the inputs of that computation."""
    reads = [read for read in calls(gm, ops.unshard.default) if argument(read, "reduce").startswith(PIECE)]
    return ancestors(argument(read, "shard") for read in reads)


def _impure(node: Node) -> bool:
    if is_higher_order(node.target) or "c10d" in str(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    return bool(schema_of(node.target).written)
