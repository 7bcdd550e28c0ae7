"""Bodies that AOTAutograd has traced once replace the calls of equal layers in its graph.

The Dynamo graph calls one body for several equal layers (``compiler/equal_layers.py``). AOTAutograd's joint graph then
has two calls for each of them, of two bodies:

    results = invoke_subgraph(forward_body, "fw_layer", *primals)
    gradients, results = invoke_subgraph(joint_body, "bw_layer_0", *primals, *tangents)

The joint body computes the forward again. So its forward part takes the place of the first call, and its backward part
that of the second one: as if AOTAutograd had traced each layer by itself.

More than 400 lines: all code that knows how AOTAutograd's graph calls bodies is here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.autograd import storage_id
from compiled_fsdp.compat.graphs import FakeCopies
from compiled_fsdp.compat.versions import version_of

log = logging.getLogger(__name__)

TRIED = (2, 13)
"""The version of torch whose bodies were tried."""
_STACKS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")
PLACE = "compiled_fsdp_place"
"""The key in a node's ``meta["custom"]``, which torch copies to traced nodes, for the node's place in its body."""
_TAG, _BACKWARD = "partitioner_tag", "is_backward"
_ZEROS = ("full", "full_like", "new_full", "new_zeros", "zeros", "zeros_like", "_efficientzerotensor")


class CannotBeTracedOnce(Exception):
    """Torch would not trace bodies as it traces layers, or AOTAutograd's graph does not call them as expected."""


@dataclass(frozen=True)
class EqualLayer:
    """A call of a body in a Dynamo graph.

    Attributes:
        name: of the body.
        stacks: for the modules around each of the body's nodes, which are modules of the first layer, the modules
            around the same node in this layer. Also for the stack of code lines that each node comes from.
        reads: for the given tensors that are reads inside of the layer, the places of the calls behind them.
    """

    name: str
    stacks: Mapping[Any, Any]
    reads: Mapping[int, int]


@dataclass
class EqualLayers:
    """The calls of bodies in a Dynamo graph.

    Attributes:
        calls: in the order of the graph.
        names: of the bodies, which are attributes of the Dynamo graph.
        plain: the graph as it was without calls.
        are_inlined: whether AOTAutograd has traced the graph, and the traced bodies have replaced all calls.
    """

    calls: list[EqualLayer] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    plain: torch.fx.Graph | None = None
    are_inlined: bool = False

    def take_back(self, gm: GraphModule, reason: Exception) -> None:
        """Put the graph without calls back into the Dynamo graph, because ``reason`` was raised with calls."""
        raised = "" if isinstance(reason, CannotBeTracedOnce) else f"{type(reason).__name__} was raised: "
        log.debug("equal layers are traced one by one, because %s%s", raised, reason)
        if self.plain is not None:
            gm.graph = self.plain
        for name in self.names:  # not all unused submodules: torch would also delete graphs inside of other graphs
            delattr(gm, name)
        self.calls, self.names, self.plain = [], [], None


def why_bodies_do_not_fit() -> str:
    """Return why torch would not trace a body as it would trace the same calls in the whole graph; "" if it would.

    For example, it does not if ``functionalize_rng_ops`` is set, because equal layers would draw equal numbers. Nor
    does torch 2.15 with mixed precision, because it casts a body's gradients, and not those of a read.
    """
    from torch._functorch import config

    reasons = {
        f"this is torch {torch.__version__}": version_of(torch.__version__) != TRIED,
        "torch._functorch.config.functionalize_rng_ops is set": config.functionalize_rng_ops,
        "autocast is on": torch._C._is_any_autocast_enabled(),
        "torch has other functions": not (patches.fits(patches.CAPTURE) and patches.fits(patches.BODY_SCHEMA)),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def stacks_by_first(first: Sequence[Node], calls: Sequence[Node]) -> dict[Any, Any]:
    """Return ``EqualLayer.stacks`` from the calls of the first layer and the same calls of another one."""
    found: dict[Any, Any] = {}
    for key, (model, call) in itertools.product(_STACKS, zip(first, calls, strict=True)):
        if key in model.meta:
            found.setdefault(_key(model.meta[key]), call.meta.get(key))
    return found


def _key(stack: Any) -> Any:
    return stack if isinstance(stack, str) else tuple(stack.items())


def gradient_counts(body: GraphModule, inputs: Sequence[torch.Tensor]) -> list[int] | None:
    """Return for each input of a body how many gradients its backward adds up for it; tried with fake tensors.

    For example, ``rms_norm(x)`` is a square and a product, so it gives two gradients for ``x``.

    Returns:
        The numbers; None if the body writes to its inputs, or returns tensors that share memory with each other or with
        an input.
    """
    fake_mode: Any = inputs[0].fake_mode  # type: ignore[attr-defined]
    with torch.inference_mode(False), fake_mode:
        copies = FakeCopies().of(list(inputs))
        versions = [each._version for each in copies]
        with torch.no_grad():
            memory = [storage_id(each) for each in body(*copies)]
        if [each._version for each in copies] != versions:
            return None
        if len({*memory}) < len(memory) or not {0, *map(storage_id, copies)}.isdisjoint(memory):
            return None
        with torch.enable_grad():
            leaves = [each.requires_grad_(given.requires_grad) for each, given in zip(copies, inputs, strict=True)]
            edges = _edges([each.grad_fn for each in body(*leaves) if each.grad_fn is not None])
            nodes = [
                torch.autograd.graph.get_gradient_edge(each).node if each.requires_grad else None for each in leaves
            ]
    return [0 if node is None else edges[node] for node in nodes]


def _edges(roots: Sequence[Any]) -> Counter[Any]:
    """Return how many edges lead to each node of an autograd graph."""
    found: Counter[Any] = Counter()
    ahead, seen = list(roots), set(roots)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            found[node] += 1
            if node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return found


@contextlib.contextmanager
def traced_once(layers: EqualLayers) -> Iterator[None]:
    """Replace the calls of equal layers as soon as AOTAutograd has traced them.

    If an error is raised before ``layers.are_inlined``, the caller can take the calls back and compile again.
    """

    def capturing(capture: Callable[..., Any]) -> Callable[..., Any]:
        def captured(aot_state: Any, orig_flat_fn: Any) -> Any:
            result = capture(aot_state, orig_flat_fn)
            _inline(result.graph_module, layers.calls)
            layers.are_inlined = True
            return result

        return captured

    layers.are_inlined = False
    with patches.installed(patches.CAPTURE, capturing), patches.installed(patches.BODY_SCHEMA, _with_kept_schemas):
        yield


def _with_kept_schemas(gen_schema: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[str, Any] = {}

    def own_gen_schema(self: Any, subgraph: Any, identifier: str, *operands: Any) -> Any:
        if identifier is None:  # a body without a name
            return gen_schema(self, subgraph, identifier, *operands)
        if identifier not in kept:
            kept[identifier] = gen_schema(self, subgraph, identifier, *operands)
        return kept[identifier]

    return own_gen_schema


def _inline(gm: GraphModule, layers: Sequence[EqualLayer]) -> None:
    """Replace the calls of equal layers in one of AOTAutograd's graphs."""
    forwards, backwards = _calls(gm, {layer.name for layer in layers})
    if not forwards and not backwards:  # a graph that Inductor traces for itself
        return
    names = [name for _, name in forwards]
    if names != [layer.name for layer in layers]:
        raise CannotBeTracedOnce(f"of {len(layers)} calls, AOTAutograd's graph has {len(names)}")
    partner = _pairs(forwards, backwards)
    bodies = {_attribute(call) for call in (*(call for call, _ in forwards), *backwards)}
    for (call, _), layer in zip(forwards, layers, strict=True):
        _Inlining(gm, call, partner.get(call), layer).run()
    gm.graph.eliminate_dead_code()
    for name in bodies.difference(node.target for node in gm.graph.find_nodes(op="get_attr")):
        delattr(gm, name)
    gm.graph.lint()
    gm.recompile()


def _calls(gm: GraphModule, names: set[str]) -> tuple[list[tuple[Node, str]], list[Node]]:
    """Return the calls of forward bodies with their names, and the calls of joint bodies."""
    forwards: list[tuple[Node, str]] = []
    backwards: list[Node] = []
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        identifier = str(call.args[1])
        name = identifier.removeprefix("fw_").removeprefix("bw_")
        if identifier.startswith("bw_") and name.rpartition("_")[0] in names:
            backwards.append(call)
        elif name in names:
            forwards.append((call, name))
    return forwards, backwards


def _pairs(forwards: Sequence[tuple[Node, str]], backwards: Sequence[Node]) -> dict[Node, Node]:
    """Return the call of a joint body for each call of a forward body that has one."""
    count = {name: len(call.args) for call, name in forwards}
    by_primals = {(name, call.args[2:]): call for call, name in forwards}
    if len(by_primals) < len(forwards):
        raise CannotBeTracedOnce("a layer is called twice with the same inputs")
    found: dict[Node, Node] = {}
    for call in backwards:
        name = str(call.args[1]).removeprefix("bw_").rpartition("_")[0]
        forward = by_primals.get((name, call.args[2 : count[name]]))
        if forward is None or forward in found:
            raise CannotBeTracedOnce("a backward cannot be told from that of another layer")
        if any(map(_is_zeros, call.args[count[name] :])):
            raise CannotBeTracedOnce("a layer has a result whose gradient nothing computes")
        found[forward] = call
    return found


def _attribute(call: Node) -> str:
    body: Any = call.args[0]
    return str(body.target)


def _body_of(gm: GraphModule, call: Node) -> GraphModule:
    body = getattr(gm, _attribute(call))
    assert isinstance(body, GraphModule)
    return body


def _is_zeros(tangent: Any) -> bool:
    if not isinstance(tangent, Node):
        return True
    packet = getattr(tangent.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in _ZEROS


class _Inlining:
    """Replaces the calls of one layer by copies of a body's nodes.

    Attributes:
        values: the node in the outer graph for each node of the body.
        fakes: the copies' fake tensors.
        places: for each copy in forward and in backward, the place of the Dynamo node that it was traced from.
    """

    def __init__(self, gm: GraphModule, forward: Node, backward: Node | None, layer: EqualLayer) -> None:
        self.graph, self.forward, self.backward, self.layer = gm.graph, forward, backward, layer
        self.body = _body_of(gm, forward if backward is None else backward)
        self.result_count = len(_results(_body_of(gm, forward)))
        self.values: dict[Node, Any] = {}
        self.fakes = FakeCopies()
        self.places: tuple[dict[Node, int], dict[Node, int]] = {}, {}

    def run(self) -> None:
        given = (self.backward or self.forward).args[2:]
        for placeholder, value in zip(self.body.graph.find_nodes(op="placeholder"), given, strict=True):
            self.values[placeholder] = value
            if isinstance(placeholder.meta.get("val"), torch.Tensor) and isinstance(value, Node):
                self.fakes.same_memory(placeholder.meta["val"], value.meta["val"])
        clones = {} if self.backward is None else _clones_of_inputs(self.body)
        for node in self.body.graph.nodes:
            if node in clones:
                self.values[node] = self.values[clones[node]]
            elif node.op == "call_function":
                self.values[node] = self._copy(node)
            elif node.op not in ("placeholder", "output"):
                raise CannotBeTracedOnce(f"a body has a node of the kind {node.op}")
        results = _results(self.body)
        self._move_reads()
        if self.backward is not None:
            self._move_uses_of_gradients(results)
        self._replace(self.forward, results[len(results) - self.result_count :])
        if self.backward is not None:
            self._replace(self.backward, results)

    def _copy(self, node: Node) -> Node:
        is_late = self.backward is not None and node.meta.get(_TAG) == _BACKWARD
        before = self.backward if self.backward is not None and is_late else self.forward
        with self.graph.inserting_before(before):
            copied = self.graph.node_copy(node, self.values.__getitem__)
        copied.meta["val"] = self.fakes.of(node.meta.get("val"))
        for key in _STACKS:
            if (stack := node.meta.get(key)) is not None:
                copied.meta[key] = self.layer.stacks.get(_key(stack), stack)
        custom = dict(node.meta.get("custom", ()))
        if (place := custom.pop(PLACE, None)) is not None:
            self.places[is_late][copied] = place
            copied.meta["custom"] = custom
            if not custom:
                del copied.meta["custom"]
        return copied

    def _replace(self, call: Node, results: Sequence[Any]) -> None:
        """Replace the results of a call by the copies of the body's results."""
        for user in list(call.users):
            if user.target is not operator.getitem:
                raise CannotBeTracedOnce("a call's results are not taken one by one")
            result = results[user.args[1]]  # type: ignore[index]
            if user.users:
                if result is None:
                    raise CannotBeTracedOnce("a gradient is missing")
                user.replace_all_uses_with(self.values[result])
            self.graph.erase_node(user)
        self.graph.erase_node(call)

    # The reads of a layer are in front of its call. Their places in the whole graph are in the middle of it.
    def _move_reads(self) -> None:
        """Move each read in front of the first copy that comes after it in the Dynamo graph."""
        for index, place in self.layer.reads.items():
            read: Any = self.forward.args[2 + index]
            target = next((copied for copied, at in self.places[0].items() if at >= place), None)
            if isinstance(read, Node) and read.op == "call_function" and target is not None and read < target:
                for source in read.all_input_nodes:
                    if source.op == "call_function" and not any(user < read for user in source.users):
                        target.prepend(source)
                target.prepend(read)

    def _move_uses_of_gradients(self, results: Sequence[Any]) -> None:
        """Move reductions and sums of gradients right behind the node that completes the gradient, as autograd does."""
        assert self.backward is not None
        for user in sorted(self.backward.users, key=lambda user: int(str(user.args[1])), reverse=True):
            index: Any = user.args[1]
            if index < len(results) - self.result_count and results[index] is not None:
                self._move_users(user, self.values[results[index]], index)

    def _move_users(self, gradient: Node, made: Any, index: int) -> None:
        for user in list(gradient.users):
            target: Node | None
            if user.meta.get("is_gradient_acc", False):
                target = _behind(made)
            elif getattr(user.target, "namespace", "") == "compiled_fsdp" and index in self.layer.reads:
                place = self.layer.reads[index]
                target = next((copied for copied, at in self.places[1].items() if at < place), None)
            else:
                continue
            others = [each for each in user.all_input_nodes if each is not gradient]
            if target is None or not all(each < target for each in (made, *others)):
                continue
            user.replace_input_with(gradient, made)
            target.prepend(user)
            self._move_users(user, user, index)


def _behind(made: Node) -> Node:
    """Return the first node behind a gradient and the other gradients that the same autograd node makes."""
    node: Any = made.next
    while node.meta.get("seq_nr") == made.meta.get("seq_nr") and not node.meta.get("is_gradient_acc", False):
        node = node.next
    return node


def _results(body: GraphModule) -> Sequence[Any]:
    results: Any = body.graph.output_node().args[0]
    return list(results)


def _clones_of_inputs(body: GraphModule) -> dict[Node, Node]:
    """Return the clones at a joint body's end, each with the node that it copies.

    Torch adds them for gradients that share memory with an input, because a body must not return such a tensor.
    """
    output = body.graph.output_node()
    memory = {_memory(node) for node in body.graph.find_nodes(op="placeholder")} - {0}
    found: dict[Node, Node] = {}
    node = output.prev
    while node.target is torch.ops.aten.clone.default and set(node.users) == {output} and not node.kwargs:
        source = node.all_input_nodes[0]
        if _memory(source) in memory:
            found[node] = source
        node = node.prev
    return found


def _memory(node: Node) -> int:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, torch.Tensor) else 0
