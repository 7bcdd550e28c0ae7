"""Share: compute that equal layers repeat becomes one function, which Inductor generates once and the graph calls.

    mm, relu, mm, launch, mm, relu, mm, wait  ->  repeated_0(..), launch, repeated_0(..), wait

Launches and waits stay where the plan has them, outside of these functions. Two runs of calls share a function if they
call the same ops with the same constants on tensors of the same sizes, strides and types, connected in the same way,
and if the graph needs the same of their results. Inductor fuses nothing across the border of a function, so borders are
where nothing would be fused, and short runs stay as they are.

These graphs stay as they are: with symbolic sizes; with convolutions, whose layouts Inductor chooses for the graph as a
whole; and under a memory budget, because a function cannot write its results over tensors that it is given.
"""

# Why: docs/design/torch.md, "Inductor generates repeated compute once"

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.passes.cost.fusion import mark_memory, users_of
from compiled_fsdp.passes.forms import Run, form_of_arguments, form_of_value
from compiled_fsdp.passes.graph import NOT_STORED, aten, calls, draws_numbers, is_getitem, prims
from compiled_fsdp.passes.memory import storage_bytes
from compiled_fsdp.passes.op_schema import schema_of
from compiled_fsdp.passes.repeats import repeats
from compiled_fsdp.passes.views import is_view

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

LEAST = 12
"""The least number of calls in a function, without views."""
_NAME = "repeated_{}"
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# Ops that Inductor replaces by their input where they change nothing (``noop_registry`` of its post_grad passes).
_COPIES = {
    aten.cat, aten.clone, aten.repeat, aten._to_copy, aten.constant_pad_nd, aten.copy, aten.slice_scatter, aten.pow,
    aten.ceil, aten.floor, aten.round, aten.trunc, prims.convert_element_type, prims.device_put,
}  # fmt: skip
_FAR = 64  # calls from a result to its first use, about a layer
_SMALL = 8  # a tensor is small beside one that is so many times as large


def share(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace repeated runs of compute by calls of functions."""
    if ctx.rules.budget is not None or calls(gm, *_CONVOLUTIONS):
        return gm
    groups = list(_equal_runs(gm))
    for number, (first, *_) in enumerate(groups):  # all of them before any run is replaced
        setattr(gm, _NAME.format(number), _function(first))
    replaced: dict[Node, Node] = {}
    for number, runs in enumerate(groups):
        for run in runs:
            _call(gm, _NAME.format(number), run, replaced)
    if groups:
        gm.graph.lint()
        gm.recompile()
        ctx.changed("share", f"{sum(map(len, groups))} parts of the graph call {len(groups)} functions")
    return gm


def _equal_runs(gm: GraphModule) -> Iterator[list[Run]]:
    """Yield lists of equal runs, which have no call in common."""
    sequence = [node for node in gm.graph.nodes if node.op == "call_function" and not _is_passed_through(node)]
    if not any(NOT_STORED in node.meta for node in sequence):  # no plan was made
        mark_memory(gm)
    blocks = list(_blocks(sequence))
    known: dict[Any, int] = {}
    numbers = [known.setdefault(key, len(known)) for key, _ in blocks]
    for repeat in repeats(numbers, [len(block) for _, block in blocks], LEAST):
        by_form: dict[Any, list[Run]] = {}
        for start in repeat.starts:
            run = _run([call for _, block in blocks[start : start + repeat.length] for call in block])
            if run is not None:
                by_form.setdefault(run.form, []).append(run)
        yield from (runs for runs in by_form.values() if len(runs) > 1)


def _blocks(sequence: Sequence[Node]) -> Iterator[tuple[Any, Sequence[Node]]]:
    """Yield the calls between two places where a function may begin or end, with a key that equal blocks share."""
    is_border, apart = _borders(sequence)
    for first, end in pairwise(place for place, may in enumerate(is_border) if may):
        block = sequence[first:end]
        if all(_is_compute(call) and call not in apart for call in block):
            yield tuple(map(_form_of_call, block)), block
        else:
            yield first, block


def _borders(sequence: Sequence[Node]) -> tuple[list[bool], set[Node]]:
    """Return for each place in front of a call, and for the end, whether a function may begin or end there.

    No kernel may be fused across it, but for the sake of small tensors, as the statistics of a norm. Nor may the result
    of a copy pass it: Inductor removes copies that do nothing, and a function must not return a tensor that it was
    given, or one tensor twice.

    Also return the calls that no function may contain, because Inductor computes them where they are read, far away.
    """
    place = {node: i for i, node in enumerate(sequence)}
    inside = [0] * (len(sequence) + 1)  # +1 where something begins that must not be cut, -1 where it has ended
    apart: set[Node] = set()
    for node, at in place.items():
        users = {place[user]: user for user in users_of(node) if user in place}
        if not users or not (NOT_STORED in node.meta or _may_copy(node)):
            continue
        if not _may_copy(node) and _SMALL * storage_bytes(node) <= max(map(storage_bytes, users.values())):
            continue
        if min(users) - at > _FAR:
            apart.add(node)
            continue
        inside[at + 1] += 1
        inside[max(users) + 1] -= 1
    return [depth == 0 for depth in itertools.accumulate(inside)], apart


def _may_copy(node: Node) -> bool:
    """Whether Inductor may remove a call that changes nothing: its result looks like a tensor that it is given."""
    if getattr(node.target, "overloadpacket", None) not in _COPIES:
        return False
    given = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(each, Tensor) and _look_equal(each, node.meta["val"]) for each in given)


def _look_equal(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device) == (b.dtype, b.device) and a.shape == b.shape


def _is_passed_through(node: Node) -> bool:
    """Whether a node computes nothing: a view, or an element of a tuple."""
    return (is_view(node) or is_getitem(node)) and len(node.all_input_nodes) == 1


def _is_compute(node: Node) -> bool:
    """Whether a call may be in a function: an op of torch without effects, random numbers and symbolic sizes."""
    if getattr(node.target, "namespace", "") not in ("aten", "prims") or is_view(node):
        return False
    if schema_of(node.target).written or draws_numbers(node):
        return False
    if _may_copy(node) and not all(user.op == "call_function" for user in users_of(node)):
        return False  # it would be a result of a function
    return _is_static(node.meta.get("val")) and all(map(_comes_from_static, node.all_input_nodes))


def _comes_from_static(node: Node) -> bool:
    """Whether a tensor, and what it is a view of, have no symbolic size."""
    if not _is_static(node.meta.get("val")):
        return False
    return not _is_passed_through(node) or all(map(_comes_from_static, node.all_input_nodes))


def _is_static(value: Any) -> bool:
    """Whether a value is a tensor, or several results with at least one, none of them with a symbolic size."""
    if isinstance(value, (tuple, list)):
        tensors = [each for each in value if isinstance(each, Tensor)]
        return bool(tensors) and all(map(_is_static, tensors)) and not any(isinstance(v, torch.SymInt) for v in value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride(), value.storage_offset()))


def _form_of_call(node: Node) -> tuple[Any, ...]:
    """Return the op, its constants, and the sizes and types of its tensors."""
    return _form(node, lambda source: form_of_value(source.meta["val"]))


def _form(node: Node, of_source: Callable[[Node], Any]) -> tuple[Any, ...]:
    """Return a call as plain data, in which ``of_source`` describes the tensors that are computed elsewhere."""

    def of_node(argument: Node) -> Any:
        return of_source(argument) if _is_source(argument) else _form(argument, of_source)

    return *form_of_arguments(node, of_node), form_of_value(node.meta["val"])


def _is_source(node: Node) -> bool:
    """Whether a node is where a tensor comes from: a call, or one of its several results; not a view of them."""
    return not _is_passed_through(node) or (is_getitem(node) and not _is_passed_through(node.all_input_nodes[0]))


def _run(nodes: Sequence[Node]) -> Run | None:
    """Describe a run of calls; None if it needs no tensor, or its results are not all tensors."""
    number = {node: i for i, node in enumerate(nodes)}
    given: dict[Node, int] = {}

    def of_source(source: Node) -> Any:
        if source in number:
            return "call", number[source]
        if is_getitem(source) and source.all_input_nodes[0] in number:
            return "call", *_element(source, number)
        return "given", given.setdefault(source, len(given)), form_of_value(source.meta["val"])

    forms = tuple(_form(node, of_source) for node in nodes)
    results = [result for node in nodes for result in _used_outside(node, number.keys())]
    if not given or not results or not all(isinstance(each.meta["val"], Tensor) for each in (*given, *results)):
        return None
    places = tuple((number[each] if each in number else _element(each, number)) for each in results)
    return Run(tuple(nodes), tuple(given), tuple(results), (forms, places))


def _element(node: Node, number: dict[Node, int]) -> tuple[int, Any]:
    return number[node.all_input_nodes[0]], node.args[1]


def _used_outside(node: Node, inside: Any) -> Iterator[Node]:
    """Yield a call, or the elements of its results, if anything outside of the run uses it or a view of it."""
    if isinstance(node.meta["val"], (tuple, list)):
        for element in node.users:
            if not is_getitem(element) or _leaves(element, inside):
                yield element if is_getitem(element) else node
    elif _leaves(node, inside):
        yield node


def _leaves(node: Node, inside: Any) -> bool:
    return any(_leaves(user, inside) if _is_passed_through(user) else user not in inside for user in node.users)


def _function(run: Run) -> GraphModule:
    """Return a run as a graph of its own."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for source in run.given:
        copies[source] = placeholder = graph.placeholder(f"given_{len(copies)}")
        placeholder.meta["val"] = source.meta["val"]

    def copied(node: Node) -> Node:
        if node not in copies:
            for each in node.all_input_nodes:
                copied(each)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in run.calls:
        copied(node)
    output = graph.output(tuple(copied(result) for result in run.results))
    # as torch marks the results of its own nested regions, whose strides the caller depends on
    output.meta["user_visible_output_idxs"] = list(range(len(run.results)))
    return GraphModule({}, graph)


def _call(gm: GraphModule, name: str, run: Run, replaced: dict[Node, Node]) -> None:
    """Replace a run by a call of the function with this name.

    Args:
        replaced: the results of runs that were replaced before, each with the node that has its place now.
    """
    graph, first = gm.graph, run.calls[0]
    given = [replaced.get(source, source) for source in run.given]
    for source in given:
        if first < source:  # an element of results that are there already
            first.prepend(source)
    with graph.inserting_before(first):
        function = graph.get_attr(name)
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (function, name, *given))
        call.meta = {key: first.meta[key] for key in ("nn_module_stack", "seq_nr") if key in first.meta}
        call.meta["val"] = tuple(result.meta["val"] for result in run.results)
        for i, result in enumerate(run.results):
            replaced[result] = element = graph.call_function(operator.getitem, (call, i))
            element.meta = {**result.meta}
            result.replace_all_uses_with(element)
    for node in reversed(run.calls):
        _erase(node)


def _erase(node: Node) -> None:
    """Erase a call, and the views before and behind it that nothing uses any more."""
    for user in list(node.users):
        assert _is_passed_through(user), f"{user} uses {node}, which is in a function now"
        _erase(user)
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if _is_passed_through(source) and not source.users:
            _erase(source)
