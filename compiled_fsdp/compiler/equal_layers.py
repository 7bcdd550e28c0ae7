"""Equal layers in a Dynamo graph become calls of one body, so that AOTAutograd traces them once.

    read, read, linear, gelu, linear, read, read, linear, gelu, linear, ...
    ->  read, read, invoke_subgraph(body, x, w0, w1), read, read, invoke_subgraph(body, y, w2, w3), ...

``compat/region_calls.py`` puts the traced body in the place of each call, so that the passes see the graph that
AOTAutograd would have traced without calls.
"""

# Why: docs/design/torch.md, "Equal layers are traced once"

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.compat.autograd import storage_id
from compiled_fsdp.compat.graphs import copy_of, is_higher_order, is_static_fake, tensors_in
from compiled_fsdp.compat.region_calls import (
    PLACE,
    CannotBeTracedOnce,
    EqualLayer,
    EqualLayers,
    gradient_counts,
    stacks_by_first,
    why_bodies_do_not_fit,
)
from compiled_fsdp.passes.forms import Run, form_of_arguments, form_of_value
from compiled_fsdp.passes.op_schema import schema_of
from compiled_fsdp.passes.repeats import repeats

LEAST_CALLS = 12
"""The least number of calls in a body."""
LEAST_LAYERS = 3
"""The least number of equal layers. A body is traced three times: its forward, and forward and backward together."""
_FAR = 64  # calls from a tensor to its last use, about a layer
_NAME = "equal_layer_{}"
_WRITES = (operator.setitem, operator.delitem)
_STATISTICS = ("batch_norm", "instance_norm")  # they write to the running mean, but their names do not say so


def call_equal_layers(gm: GraphModule) -> EqualLayers:
    """Replace equal layers by calls of one body, in place.

    Returns:
        The calls, in the order of the graph. There are none in a graph that has symbolic sizes or switches modes
        (``torch.no_grad()``, autocast), because a body might be traced in another way than the whole graph.
    """
    layers = EqualLayers()
    try:
        if why := why_bodies_do_not_fit() or _why_it_may_be_traced_otherwise(gm.graph):
            raise CannotBeTracedOnce(why)
        _replace_equal_runs(gm, layers)
    except Exception as reason:
        layers.take_back(gm, reason)
    return layers


def _replace_equal_runs(gm: GraphModule, layers: EqualLayers) -> None:
    groups = list(_equal_runs(gm.graph))  # all before any run is replaced
    if not groups:
        return
    layers.plain = copy_of(gm).graph
    layer_of: dict[Node, EqualLayer] = {}
    replaced: dict[Node, Node] = {}
    for number, (body, runs) in enumerate(groups):
        name = _NAME.format(number)
        setattr(gm, name, body)
        layers.names.append(name)
        for run in runs:
            reads = _move_reads(run)
            read_at = {i: reads[source] for i, source in enumerate(run.given) if source in reads}
            call = _call(gm.graph, name, run, replaced)
            layer_of[call] = EqualLayer(name, stacks_by_first(runs[0].calls, run.calls), read_at)
            for each in reversed(run.calls):
                gm.graph.erase_node(each)
    gm.graph.lint()
    gm.recompile()
    layers.calls = [layer_of[node] for node in gm.graph.nodes if node in layer_of]


def _why_it_may_be_traced_otherwise(graph: Graph) -> str:
    """Return which call does not give tensors of known sizes, for example because it switches a mode; "" if none."""
    for node in graph.nodes:
        if node.op not in ("output", "get_attr") and not _is_known(_value(node)):
            return f"'{node.name}' in the graph is not a tensor of known sizes"
    return ""


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _is_known(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_known, value))
    return isinstance(value, Tensor) and is_static_fake(value)


# ---- equal runs ------------------------------------------------------------------------------------------------------
def _equal_runs(graph: Graph) -> Iterator[tuple[GraphModule, list[Run]]]:
    """Yield bodies, each with the equal runs that it is the body of. No two runs have a call in common."""
    ahead = _reads(graph)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr") and node not in ahead]
    uses = _Uses(graph)
    blocks = _blocks(calls)
    known: dict[Any, int] = {}
    numbers = [known.setdefault(tuple(map(_key, block)), len(known)) for block in blocks]
    for repeat in repeats(numbers, [len(block) for block in blocks], LEAST_CALLS):
        by_form: dict[Any, list[Run]] = {}
        for start in repeat.starts:
            run = _run([call for block in blocks[start : start + repeat.length] for call in block])
            if run is not None and not uses.refuse(run):
                by_form.setdefault(run.form, []).append(run)
        for runs in by_form.values():
            if len(runs) < LEAST_LAYERS:
                continue
            body = _body(runs[0])
            counts = gradient_counts(body, [_value(source) for source in runs[0].given])
            runs = [run for run in runs if counts is not None and not uses.sum_gradients_otherwise(run, counts)]
            if len(runs) >= LEAST_LAYERS:
                yield body, runs


def _blocks(calls: Sequence[Node]) -> list[Sequence[Node]]:
    """Return the calls between two places where a body may begin or end, in order.

    No tensor is used before and behind such a place, as a residual is in the middle of a layer, because a body would
    add up its gradients in another order. Tensors that many layers use do not count.
    """
    place = {call: i for i, call in enumerate(calls)}
    inside = [0] * (len(calls) + 1)  # +1 where something begins that must not be cut, -1 where it has ended
    for call, at in place.items():
        users = [place[user] for user in call.users if user in place]
        if users and max(users) - at <= _FAR:
            is_tuple = isinstance(_value(call), (tuple, list))  # its elements are taken where it is made
            inside[(at if is_tuple else min(users)) + 1] += 1
            inside[max(users) + 1] -= 1
    borders = [i for i, depth in enumerate(itertools.accumulate(inside)) if depth == 0]
    return [calls[first:end] for first, end in pairwise(borders)]


def _reads(graph: Graph) -> set[Node]:
    """Return the calls that need inputs of the graph alone: reads of parameters, and the numbers that they take."""
    found: set[Node] = set()
    for node in graph.nodes:
        target: Any = node.target
        is_read = node.op == "call_function" and (
            target is torch.narrow or (_namespace(target) == "compiled_fsdp" and not schema_of(target).written)
        )
        if is_read and all(each in found or each.op == "placeholder" for each in node.all_input_nodes):
            found.add(node)
    return found


def _namespace(target: Any) -> str:
    return str(getattr(target, "namespace", ""))


def _key(node: Node) -> Any:
    """Return a value that equal calls share: the call without its place in the graph. A border has its own value."""
    if not _may_be_inside(node):
        return node
    key = *form_of_arguments(node, lambda given: _form_of(_value(given))), _form_of(_value(node))
    try:
        hash(key)
    except TypeError:  # a constant that cannot be compared with others
        return node
    return key


def _form_of(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    return form_of_value(value), value.storage_offset(), value.requires_grad


def _may_be_inside(node: Node) -> bool:
    """Whether a call may be inside of a body: a function of torch that writes to no tensor and takes no graph."""
    target: Any = node.target
    if any(_value(given) is None for given in node.all_input_nodes) or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return not target.endswith("_")
    if node.op != "call_function" or is_higher_order(target) or _namespace(target) == "compiled_fsdp":
        return False
    if schema_of(target).written or target in _WRITES:
        return False
    name, module = getattr(target, "__name__", "_"), getattr(target, "__module__", None) or "torch"
    is_in_place = name.endswith("_") or (module == "_operator" and name.startswith("i") and name[1:] in dir(operator))
    return not is_in_place and module.partition(".")[0] in ("torch", "_operator", "builtins")


def _run(calls: Sequence[Node]) -> Run | None:
    """Describe a run of calls; None if a body with these results would be another one for torch.

    That is so if results share memory, if not all of them are tensors, or if a result of real numbers is detached:
    torch 2.11 would let it require a gradient.
    """
    number = {node: i for i, node in enumerate(calls)}
    given: dict[Node, int] = {}

    def of_node(node: Node) -> Any:
        return ("call", number[node]) if node in number else ("given", given.setdefault(node, len(given)))

    forms = tuple((form_of_arguments(node, of_node), _form_of(_value(node))) for node in calls)
    results = [node for node in calls if any(user not in number for user in node.users)]
    if not given or not results or not all(isinstance(_value(node), Tensor) for node in (*given, *results)):
        return None
    if torch.is_grad_enabled() and any(map(_needs_gradient, given)) and any(map(_is_detached, results)):
        return None
    memory = [storage_id(_value(node)) for node in results]
    if (
        0 in memory
        or len({*memory}) < len(memory)
        or not {*memory}.isdisjoint(storage_id(_value(node)) for node in given)
    ):
        return None
    form = forms, tuple(number[node] for node in results), tuple(_form_of(_value(node)) for node in given)
    return Run(tuple(calls), tuple(given), tuple(results), form)


def _needs_gradient(node: Node) -> bool:
    return bool(_value(node).requires_grad)


def _is_detached(node: Node) -> bool:
    value = _value(node)
    return not value.requires_grad and (value.is_floating_point() or value.is_complex())


class _Uses:
    """Facts about all calls of a graph that decide whether a run of them may become a body."""

    def __init__(self, graph: Graph) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._written: set[int] = set()  # the memory that calls may write to
        # The nodes whose values may be one tensor. For example, ``x.float()`` returns ``x`` if that has float32.
        self._same: dict[Any, list[Node]] = {}
        for node in graph.nodes:
            values = [each for source in _written_by(node) for each in tensors_in(_value(source))]
            # Dynamo has run the calls with fake tensors, so functions with ``inplace=True`` have changed the version.
            values += [each for each in tensors_in(_value(node)) if each._version > 0]
            self._written |= {*map(storage_id, values)}
            if isinstance(_value(node), Tensor):
                self._same.setdefault(_identity(node), []).append(node)

    def refuse(self, run: Run) -> bool:
        """Whether a given tensor is written to anywhere, or two given tensors may be one.

        Autograd saves a body's given tensors, and raises an error if one was written to since.
        """
        memory = {storage_id(_value(given)) for given in run.given}
        return not memory.isdisjoint(self._written) or len({*map(_identity, run.given)}) < len(run.given)

    def sum_gradients_otherwise(self, run: Run, counts: Sequence[int]) -> bool:
        """Whether the gradients of a given tensor would be other ones, or added up in another order.

        A tensor without a gradient, for example a parameter that is only used detached, would get one of zeros.

        Autograd adds the gradient of the last use first. A body adds its own gradients before any other one is added.
        So a tensor with two gradients in the body, and one behind it, would get the sum ``c + (b + a)`` instead of
        ``(c + b) + a``.
        """
        end = self._place[run.calls[-1]]
        for given, count in zip(run.given, counts, strict=True):
            if count == 0 and _needs_gradient(given):
                return True
            users = [user for node in self._same[_identity(given)] for user in node.users]
            if count > 1 and any(self._place[user] > end for user in users):
                return True
        return False


def _identity(node: Node) -> Any:
    value = _value(node)
    return storage_id(value), value.storage_offset(), tuple(value.shape), value.stride()


def _written_by(node: Node) -> Sequence[Node]:
    """Return the nodes whose tensors a call may write to."""
    if node.op in ("placeholder", "output", "get_attr"):
        return ()
    if getattr(node.target, "_schema", None) is not None:
        written = schema_of(node.target).written
        given = [node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in written]
        return [source for source in node.all_input_nodes if source in given]
    is_known = _may_be_inside(node) and getattr(node.target, "__name__", "") not in _STATISTICS
    return () if is_known else node.all_input_nodes


# ---- bodies and calls ------------------------------------------------------------------------------------------------
def _body(run: Run) -> GraphModule:
    """Return a run as a graph of its own."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for source in run.given:
        copies[source] = placeholder = graph.placeholder(f"given_{len(copies)}")
        placeholder.meta["val"] = placeholder.meta["example_value"] = _value(source)
    for place, call in enumerate(run.calls):
        copies[call] = copied = graph.node_copy(call, copies.__getitem__)
        copied.meta["val"] = _value(call)
        copied.meta["custom"] = {**call.meta.get("custom", {}), PLACE: place}
    graph.output(tuple(copies[result] for result in run.results))
    return GraphModule({}, graph)


def _call(graph: Graph, name: str, run: Run, replaced: dict[Node, Node]) -> Node:
    """Insert a call of the body with this name in front of a run, whose results it replaces.

    Args:
        replaced: the results of runs that were replaced before, each with the node that has its place now.
    """
    with graph.inserting_before(run.calls[0]):
        body = graph.get_attr(name)
        given = [replaced.get(source, source) for source in run.given]
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, name, *given))
        call.meta = {
            key: run.calls[0].meta[key] for key in ("nn_module_stack", "stack_trace") if key in run.calls[0].meta
        }
        call.meta["example_value"] = tuple(map(_value, run.results))
        for i, result in enumerate(run.results):
            replaced[result] = element = graph.call_function(operator.getitem, (call, i))
            element.meta = dict(result.meta)
            result.replace_all_uses_with(element, lambda user: user not in run.calls)
    return call


def _move_reads(run: Run) -> dict[Node, int]:
    """Move the reads between a run's calls in front of it; return for each the place of the call behind it."""
    place = {call: i for i, call in enumerate(run.calls)}
    moved: dict[Node, int] = {}
    waiting: list[Node] = []
    node, last = run.calls[0], run.calls[-1]
    while True:
        if node in place:
            moved |= dict.fromkeys(waiting, place[node])
            waiting.clear()
        else:
            waiting.append(node)
        if node is last:
            break
        node = node.next
    for read in moved:
        run.calls[0].prepend(read)
    return moved
