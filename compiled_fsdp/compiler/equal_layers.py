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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.autograd import storage_id
from compiled_fsdp.compat.graphs import copy_of, is_higher_order, is_static_fake
from compiled_fsdp.compat.region_calls import PLACE, EqualLayer, EqualLayers, gradient_counts, stacks_by_first
from compiled_fsdp.passes.forms import form_of_arguments, form_of_value
from compiled_fsdp.passes.op_schema import schema_of
from compiled_fsdp.passes.repeats import repeats

LEAST_CALLS = 12
"""The least number of calls in a body."""
LEAST_LAYERS = 3
"""The least number of equal layers. A body is traced three times: its forward, and forward and backward together."""
_FAR = 64  # calls from a tensor to its last use, about a layer
_NAME = "equal_layer_{}"
_WRITES = (operator.setitem, operator.delitem)


def call_equal_layers(gm: GraphModule) -> EqualLayers:
    """Replace equal layers by calls of one body, in place.

    Returns:
        The calls, in the order of the graph. There are none in a graph that has symbolic sizes or switches modes
        (``torch.no_grad()``, autocast), because a body might be traced in another way than the whole graph.
    """
    groups = list(_equal_runs(gm.graph)) if _fits() and _is_plain(gm.graph) else []  # all before any run is replaced
    if not groups:
        return EqualLayers()
    plain = copy_of(gm).graph
    layers: dict[Node, EqualLayer] = {}
    replaced: dict[Node, Node] = {}
    for number, (body, runs) in enumerate(groups):
        name = _NAME.format(number)
        setattr(gm, name, body)
        for run in runs:
            reads = _move_reads(run)
            read_at = {i: reads[source] for i, source in enumerate(run.given) if source in reads}
            call = _call(gm.graph, name, run, replaced)
            layers[call] = EqualLayer(name, stacks_by_first(runs[0].calls, run.calls), read_at)
            for each in reversed(run.calls):
                gm.graph.erase_node(each)
    gm.graph.lint()
    gm.recompile()
    return EqualLayers([layers[node] for node in gm.graph.nodes if node in layers], plain)


def _fits() -> bool:
    return patches.fits(patches.CAPTURE) and patches.fits(patches.BODY_SCHEMA)


@dataclass(frozen=True)
class _Run:
    """The calls of one layer, without its reads.

    Attributes:
        calls: in the order of the graph.
        given: the tensors from outside, in the order of their first use.
        results: the calls that are used outside.
        form: what makes two runs equal.
    """

    calls: tuple[Node, ...]
    given: tuple[Node, ...]
    results: tuple[Node, ...]
    form: tuple[Any, ...]


def _is_plain(graph: Graph) -> bool:
    """Whether all calls give tensors of known sizes, so that none of them switches a mode."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return False
    return all(node.op in ("output", "get_attr") or _is_known(_value(node)) for node in graph.nodes)


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _is_known(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_known, value))
    return isinstance(value, Tensor) and is_static_fake(value)


# ---- equal runs ------------------------------------------------------------------------------------------------------
def _equal_runs(graph: Graph) -> Iterator[tuple[GraphModule, list[_Run]]]:
    """Yield bodies, each with the equal runs that it is the body of. No two runs have a call in common."""
    ahead = _reads(graph)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr") and node not in ahead]
    place = {node: i for i, node in enumerate(graph.nodes)}
    blocks = _blocks(calls)
    known: dict[Any, int] = {}
    numbers = [known.setdefault(tuple(map(_key, block)), len(known)) for block in blocks]
    for repeat in repeats(numbers, [len(block) for block in blocks], LEAST_CALLS):
        by_form: dict[Any, list[_Run]] = {}
        for start in repeat.starts:
            run = _run([call for block in blocks[start : start + repeat.length] for call in block])
            if run is not None:
                by_form.setdefault(run.form, []).append(run)
        for runs in by_form.values():
            if len(runs) < LEAST_LAYERS:
                continue
            body = _body(runs[0])
            counts = gradient_counts(body, [_value(source) for source in runs[0].given])
            runs = [run for run in runs if counts is not None and not _sums_gradients_early(run, counts, place)]
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


def _run(calls: Sequence[Node]) -> _Run | None:
    """Describe a run of calls; None if its results share memory, or not all of them are tensors."""
    number = {node: i for i, node in enumerate(calls)}
    given: dict[Node, int] = {}

    def of_node(node: Node) -> Any:
        return ("call", number[node]) if node in number else ("given", given.setdefault(node, len(given)))

    forms = tuple((form_of_arguments(node, of_node), _form_of(_value(node))) for node in calls)
    results = [node for node in calls if any(user not in number for user in node.users)]
    if not given or not results or not all(isinstance(_value(node), Tensor) for node in (*given, *results)):
        return None
    memory = [storage_id(_value(node)) for node in results]
    if (
        0 in memory
        or len({*memory}) < len(memory)
        or not {*memory}.isdisjoint(storage_id(_value(node)) for node in given)
    ):
        return None
    form = forms, tuple(number[node] for node in results), tuple(_form_of(_value(node)) for node in given)
    return _Run(tuple(calls), tuple(given), tuple(results), form)


def _sums_gradients_early(run: _Run, counts: Sequence[int], place: Mapping[Node, int]) -> bool:
    """Whether a body would change the order in which the gradients of a given tensor are added up.

    Autograd adds the gradient of the last use first. A body adds its own gradients before any other one is added. So a
    tensor with two gradients in the body, and one behind it, would get the sum ``c + (b + a)`` instead of
    ``(c + b) + a``.
    """
    end = place[run.calls[-1]]
    return any(
        count > 1 and any(place[user] > end for user in given.users)
        for given, count in zip(run.given, counts, strict=True)
    )


# ---- bodies and calls ------------------------------------------------------------------------------------------------
def _body(run: _Run) -> GraphModule:
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


def _call(graph: Graph, name: str, run: _Run, replaced: dict[Node, Node]) -> Node:
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


def _move_reads(run: _Run) -> dict[Node, int]:
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
