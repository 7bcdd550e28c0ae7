"""Small questions about graphs that several passes ask."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets import transport
from compiled_fsdp.buckets.reduction import PIECE
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec
from compiled_fsdp.compat.graphs import is_higher_order
from compiled_fsdp.passes.op_schema import schema_of

ops = torch.ops.compiled_fsdp
aten = torch.ops.aten
prims = torch.ops.prims
COMPLETION_ORDER = "compiled_fsdp_complete"
"""Key of ``Node.meta`` of what depends on reduced gradients: the last one's number in the order of completion."""
IS_SHARD = "compiled_fsdp_shard"
"""Key of ``Node.meta`` of inputs that are parameters read without a collective, with the indices of their reads.

Their memory counts as shards', and an optimizer writes to it when the gradient is handed out.
"""
IS_APART = "compiled_fsdp_apart"
"""Key of ``Node.meta`` of a ``retain``: whether the code that was compiled gives the full parameter itself, too."""
RETAINS = "compiled_fsdp_retains"
"""Key of ``Node.meta`` of a graph's output: whether a full parameter in it stays when the graph is over."""
IS_ID = "compiled_fsdp_id"
"""Key of ``Node.meta`` of a parameter's number that is cut out of its block's: as good as an input."""
ENCODES = "compiled_fsdp_encodes"
"""Key of ``Node.meta`` of what makes the pieces that are gathered of a shard: it runs before everything else."""


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    """Calls of any of ``targets``, in graph order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def is_given(node: Node) -> bool:
    """Whether a node is there before anything is computed: an input, or the number of a parameter cut out of one."""
    return node.op in ("placeholder", "get_attr") or IS_ID in node.meta


def cut_ids(gm: GraphModule) -> list[Node]:
    """What takes the number of one parameter out of its block's."""
    ids = [argument(node, "param_id") for node in calls(gm, ops.unshard.default, ops.reduce_grad.default)]
    return list(dict.fromkeys(node for node in ids if node.op == "call_function"))


def planned_collectives(gm: GraphModule) -> list[Node]:
    """The gathers and reductions that our lowering made, in graph order; a model may have others of its own."""
    return [node for node in gm.graph.nodes if is_planned(node)]


def is_planned(node: Node) -> bool:
    """Whether a node launches what the plan has."""
    if node.op != "call_function" or not node.meta.get("of_bucket"):
        return False
    return node.target in transport.LAUNCHES or is_launch(node)


def is_launch(node: Node) -> bool:
    """Whether a call is our own launch of a bucket; in a lowered graph only buckets at its edges have one."""
    return getattr(node.target, "_opname", "") == "launch" and is_ours(node.target)


def spec_of(node: Node) -> Any:
    """The spec that a call of one of our ops has as text: a ``BucketSpec`` for a launch, else a ``ReadSpec``."""
    return (BucketSpec if is_launch(node) else ReadSpec).parse(argument(node, "spec"))


def kind_of(node: Node) -> str | None:
    """Which of ``transport.KINDS`` a call is; None for any other node."""
    return transport.kind_of(node.target)


def is_wait(node: Node) -> bool:
    """Whether a call waits for collectives."""
    return transport.waits(node.target)


def waited_for(wait: Node) -> Iterator[Node]:
    """The launches that a wait is for; none of any other node."""
    for source in wait.all_input_nodes if is_wait(wait) else ():
        launch = source.all_input_nodes[0] if is_getitem(source) else source
        if kind_of(launch) is not None:
            yield launch


def is_ours(op: Any) -> bool:
    """Whether an op is one of this library's."""
    return bool(op.namespace == "compiled_fsdp")


def keeps_order(op: Any) -> bool:
    """Whether calls of an op stay in a graph's order whatever becomes of the rest: collectives and effects outside."""
    effects = ("accumulate", "add_accumulated", "accumulate_grad", "end_backward", "launch")
    return transport.is_functional(op) or op in [getattr(ops, name).default for name in effects]


def is_gather(node: Node) -> bool:
    """Whether a lowered collective gathers."""
    return node.target in transport.GATHERS or (is_launch(node) and spec_of(node).kind.supplies)


def crosses_graph(node: Node) -> bool:
    """Whether a launch is in flight before the graph, or after it."""
    return is_launch(node) and spec_of(node).crosses_graph


def is_deferred_reduction(node: Node) -> bool:
    """Whether a launch is of a reduction that is waited for after the graph."""
    return is_launch(node) and spec_of(node).edge is not None and not spec_of(node).kind.supplies


def returns_several(launch: Node) -> bool:
    """Whether a lowered launch returns a list of tensors, each with its own wait."""
    return launch.target in transport.GROUPED or is_launch(launch)


def waits_of(launch: Node) -> list[Node]:
    """The waits for a launch, lowered or not; of a coalesced one, one for each tensor."""
    users = [user for user in launch.users for user in (user.users if is_getitem(user) else [user])]
    return [user for user in users if user.target is transport.WAIT]


def is_getitem(node: Node) -> bool:
    """Whether a call takes an element of a tuple or list."""
    return node.op == "call_function" and node.target is operator.getitem


@functools.cache
def _arguments(target: Any) -> Mapping[str, tuple[int, Any]]:
    """By name: an argument's place, and its default; of an op, or of a function that stands in Dynamo's graph."""
    if hasattr(target, "_schema"):
        return schema_of(target).arguments
    formals = enumerate(inspect.signature(target).parameters.values())
    return {formal.name: (place, formal.default) for place, formal in formals}


def argument(node: Node, name: str) -> Any:
    """The argument ``name`` of a call of one of our ops, its default where it was left out; or what its spec says."""
    place = _arguments(node.target).get(name)
    if place is None:
        return getattr(spec_of(node), name)
    position, default = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set the argument ``name`` of a call of one of our ops, which may have been left out; or what its spec says."""
    place = _arguments(node.target).get(name)
    if place is None:
        set_argument(node, "spec", str(replace(spec_of(node), **{name: value})))
    elif place[0] < len(node.args):
        node.update_arg(place[0], value)
    else:
        node.update_kwarg(name, value)


def value(node: Any) -> Any:
    """The fake tensor (or number) that ``node`` stands for."""
    return node.meta["val"] if isinstance(node, Node) else node


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """All that depends on one of ``nodes``, but for the output."""
    found: set[Node] = set()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack += list(node.users)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """``nodes``, and all that they are computed from."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def computed_from_parameters(gm: GraphModule, sources: Callable[[Node], bool]) -> dict[Node, None]:
    """Nodes computed from parameters and constants alone: ``sources`` and what follows from nothing else, in order.

    Random operations and everything with a side effect are left out.
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
    """What makes the pieces that are gathered of parameters with all-gather extensions, and what that is made of."""
    reads = [read for read in calls(gm, ops.unshard.default) if argument(read, "reduce").startswith(PIECE)]
    return ancestors(argument(read, "shard") for read in reads)


def _impure(node: Node) -> bool:
    if is_higher_order(node.target) or "c10d" in str(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    return bool(schema_of(node.target).written)
