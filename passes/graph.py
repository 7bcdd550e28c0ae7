"""Small questions about graphs that several passes ask."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from compiled_fsdp.buckets import transport
from compiled_fsdp.buckets.reduction import PIECE
from compiled_fsdp.buckets.spec import BucketSpec, ReadSpec
from compiled_fsdp.compat import TorchDispatchMode, computed_size, expression, fake_mode_of, is_higher_order
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
    """What the text of a call of ours says: a ``BucketSpec`` of a launch, else a ``ReadSpec``."""
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


def argument(node: Node, name: str) -> Any:
    """The argument ``name`` of a call of one of our ops, its default where it was left out; or what its spec says."""
    place = schema_of(node.target).arguments.get(name)
    if place is None:
        return getattr(spec_of(node), name)
    position, default = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set the argument ``name`` of a call of one of our ops, which may have been left out; or what its spec says."""
    place = schema_of(node.target).arguments.get(name)
    if place is None:
        set_argument(node, "spec", str(replace(spec_of(node), **{name: value})))
    elif place[0] < len(node.args):
        node.update_arg(place[0], value)
    else:
        node.update_kwarg(name, value)


def value(node: Any) -> Any:
    """The fake tensor (or number) that ``node`` stands for."""
    return node.meta["val"] if isinstance(node, Node) else node


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


def show_shared_memory(gm: GraphModule) -> None:
    """Let fake values share memory where the tensors will: what an op is replaced by in the end is its input.

    AOTAutograd looks at the fake values of a forward for what only its backward holds, and gives ("donates") that to
    Inductor, which then writes to it. A full parameter that stays unsharded is saved, and an output of the graph too.
    """
    shared: set[Node] = set()
    for node in gm.graph.nodes:
        target, given = node.target, node.args
        if target in (ops.retain.default, ops.use.default):
            target, given = aten.alias.default, node.args[:1]
        elif not (is_view(node) or is_getitem(node)) or shared.isdisjoint(node.all_input_nodes):
            continue
        fakes, named = (torch.fx.map_arg(each, value) for each in (given, node.kwargs))
        with fake_mode_of(fakes):
            node.meta["val"] = target(*fakes, **named)
        shared.add(node)


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
    """What a node that stands for ``node``, an op of ours, says of itself."""
    return {"of_bucket": True, **{k: v for k, v in node.meta.items() if k in _KEEP_META}}


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


def is_view(node: Node) -> bool:
    """Whether a call's result shows memory of its inputs, and writes none of it."""
    if node.op != "call_function" or node.target is transport.WAIT:
        return False
    if node.target is aten._unsafe_view.default:  # its schema hides it
        return True
    schema = schema_of(node.target)
    return schema.aliases and not schema.is_mutable


def memory_of(node: Node) -> Node:
    """The node that made the memory which ``node`` shows: through views, in-place and out-variants, tuples, waits."""
    while node.op == "call_function":
        unseen = node.target in (transport.WAIT, aten._unsafe_view.default)  # by their schemas
        if unseen or (is_getitem(node) and is_view(node.all_input_nodes[0])):
            node = node.all_input_nodes[0]
        elif (source := _aliased(node)) is not None:
            node = source
        else:
            break
    return node


def _aliased(node: Node) -> Node | None:
    for position, name in schema_of(node.target).shown:
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        if isinstance(given, Node):
            return given
    return None


def is_mutable(node: Node) -> bool:
    """Whether a call writes to one of its inputs."""
    return schema_of(node.target).is_mutable


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
    found: set[Node] = set()
    reads = [read for read in calls(gm, ops.unshard.default) if argument(read, "reduce").startswith(PIECE)]
    stack = [argument(read, "shard") for read in reads]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _impure(node: Node) -> bool:
    if is_higher_order(node.target) or "c10d" in str(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    return is_mutable(node)
