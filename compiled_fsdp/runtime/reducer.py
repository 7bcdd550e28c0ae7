"""Gradients on their way from compiled backwards to ``.grad``.

A backward graph that is one of several leaves its last reductions in flight when it ends (``leave``), and returns zeros
without memory in place of their results. Gates then find the results here, and publish them once the next graph's
reductions are launched; the last ones at the end of backward. What no gate asks for (``torch.autograd.grad``) is dropped there.

Hooks that want a bucket's parameters together (``register_post_backward_hook``) are called when the bucket's last one is published;
where a whole graph returns all gradients at once, at the end of backward.

One backward may run inside of another: a reentrant checkpoint's, one of a custom Function or of a hook. What such a one has in flight ends
with it. What is to be done once for a model (reducing what waits, the hooks of a parameter that the other one brings gradients to
as well) is left to the outermost of those that the model has a part in.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.comm.reduction import ALL, Reduction
from compiled_fsdp.compat import (
    at_end_of_backward,
    backward_id,
    engine_runs,
    never_a_frame_of_its_own,
    never_compiled,
    running_node,
    tree_flatten,
)
from compiled_fsdp.runtime.accumulation import accumulate, accumulate_scattered, reduce_accumulated, reduced, tell
from compiled_fsdp.runtime.reduce_scatter import NOT_LAUNCHED, Left
from compiled_fsdp.state import registry

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter
    from compiled_fsdp.state.unit import Unit

PUBLISHED, WAITS, SCATTERED = "published", "waits", "scattered"
"""What becomes of a gradient at its gate: it is the parameter's ``.grad``; it has been added to the full ones that wait; it is added to
those that are reduced over the shards and wait for the replicas."""

log = logging.getLogger(__name__)
_warned_too_late = False


@dataclass(frozen=True)
class _Piece:
    """One gradient in a bucket."""

    left: Left
    offset: int
    parameter: ShardedParameter

    def gradient(self) -> Tensor:
        return self.left.shard(self.offset, self.parameter)


@dataclass(eq=False)
class Expected:
    """How many gradients eager code's reads of a block will bring in backward, unless some are not used."""

    gradients: int = 0


@dataclass(eq=False)
class _Collecting:
    """The gradients of a block that eager code has read, so far. ``added``: how many, some to one another."""

    expected: Expected
    left: Left
    grads: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    added: int = 0

    @property
    def numel(self) -> int:
        return sum(parameter.shard.numel() for parameter in self.grads)

    def add(self, parameter: ShardedParameter, grad: Tensor) -> None:
        self.added += 1
        self.grads[parameter] = self.grads[parameter] + grad if parameter in self.grads else grad


@dataclass(eq=False)
class _Backward:
    """What one backward has in flight.

    Attributes:
        found: by slot, what graphs have left and no gate has asked for.
        queue: what gates have asked for, in order: slot, what came through the graph, what was left, and the gate's kind.
        buckets: those in flight. collecting: those of eager code, by block.
        graph: how many graphs have left something. node: the autograd node of the last one.
        published: what grouped hooks are to be told of.
        waits: slots whose gradients were added to what waits. late: reduced ones that are published at the end, with what waited.
        units: of models that accumulate without communication, those whose gradients came.
        held: slots of parameters to which more may come: their hooks are run at the end.
        roots: the outermost units of the models that have a part in it. runs: whether it still does, or has failed.
    """

    runs: Callable[[], object] = bool

    found: dict[int, list[_Piece]] = field(default_factory=dict)
    queue: list[tuple[int, Tensor, list[_Piece], str]] = field(default_factory=list)
    buckets: list[Left] = field(default_factory=list)
    collecting: dict[int, _Collecting] = field(default_factory=dict)
    graph: int = 0
    node: Any = None
    published: list[ShardedParameter] = field(default_factory=list)
    waits: set[int] = field(default_factory=set)
    late: dict[int, Tensor] = field(default_factory=dict)
    units: dict[Unit, None] = field(default_factory=dict)
    held: dict[int, None] = field(default_factory=dict)
    roots: dict[Unit, None] = field(default_factory=dict)


@dataclass
class _InGraph:
    """What compiled autograd's graph has published since the last bucket, and the units whose gradients came."""

    backward: int
    published: list[ShardedParameter] = field(default_factory=list)
    units: dict[Unit, None] = field(default_factory=dict)


@dataclass(frozen=True)
class _TakePart:
    """A hook of an output. It has no reference to the unit, which the output must not keep alive."""

    unit: weakref.ref[Unit]

    def __call__(self, grad: Tensor) -> None:
        unit = self.unit()
        if unit is not None and not torch.compiler.is_compiling() and backward_id() != -1:  # else compiled autograd
            PUBLISHING.take_part(unit)


never_a_frame_of_its_own(_TakePart.__call__)


class Publishing:
    """What backwards have in flight, by backward: one may run inside of another."""

    def __init__(self) -> None:
        self._backwards: dict[int, _Backward] = {}
        self._in_graph: _InGraph | None = None

    def leave(self, grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype,
              how: Reduction, exchange: bool) -> Tensor:  # fmt: skip
        """Launch the reduction of full gradients, of one kind; returns a zero, ``[]`` of ``dtype``, to stand for each.

        Args:
            numbers: the parameters' slots. numels: of their padded shards. exchange: as an all-to-all that is averaged here.
        """
        backward = self._running()
        node = running_node()
        if node is not backward.node:
            backward.node, backward.graph = node, backward.graph + 1
        parameters = [registry.parameter_of(slot) for slot in numbers]
        if len(grads) == 1 and grads[0].numel() == parameters[0].world * numels[0]:
            # neither packed nor padded, it is the graph's memory, which the graph may use again while the collective still reads it
            grads = [grads[0].clone()]
        self._advance(backward)
        left = Left(how)
        left.launch(parameters, grads, backward.graph, exchange)
        backward.buckets.append(left)
        offset = 0
        for parameter, numel in zip(parameters, numels, strict=True):
            backward.found.setdefault(parameter.slot_number, []).append(_Piece(left, offset, parameter))
            offset += numel
        return grads[0].new_zeros((), dtype=dtype)

    @never_compiled
    def collect(self, grad: Tensor, parameter: ShardedParameter, how: Reduction, expected: Expected) -> Tensor:
        """Put an eager read's full gradient into its block's bucket, which is launched with its last one, and return a zero."""
        backward = self._running()
        bucket = backward.collecting.get(id(expected))
        if bucket is None:
            bucket = backward.collecting[id(expected)] = _Collecting(expected, Left(how))
        if parameter not in bucket.grads:
            piece = _Piece(bucket.left, bucket.numel, parameter)
            backward.found.setdefault(parameter.slot_number, []).append(piece)
        bucket.add(parameter, grad)
        if bucket.added == expected.gradients:
            self._launch(backward, bucket)
        dtype = parameter.shard.dtype if how.sync == ALL else parameter.reduce_dtype
        return grad.new_zeros((), dtype=dtype).expand(tuple(parameter.shard.shape))

    def _launch(self, backward: _Backward, bucket: _Collecting) -> None:
        del backward.collecting[id(bucket.expected)]
        backward.node, backward.graph = None, backward.graph + 1
        self._advance(backward)
        bucket.left.launch(list(bucket.grads), list(bucket.grads.values()), backward.graph)
        backward.buckets.append(bucket.left)

    def _advance(self, backward: _Backward) -> None:
        for left in backward.buckets:
            left.advance()

    # ---- gradients that wait -----------------------------------------------------------------------------------------
    def accumulate(self, grad: Tensor, parameter: ShardedParameter) -> None:
        """Add a full gradient to what waits, if the running backward is one that brings gradients to parameters."""
        assert parameter.waiting_gate is not None
        if backward_id() == -1 or engine_runs(parameter.waiting_gate.grad_fn):
            accumulate(parameter, grad)

    def _waits(self, parameter: ShardedParameter) -> None:
        """All gradients of a parameter that wait have come."""
        self._of(parameter)
        self._running().waits.add(parameter.slot_number)
        parameter.unit.after_backward(parameter)

    def _of(self, parameter: ShardedParameter) -> _Backward:
        """The backward at whose end what waits on the parameter's model is reduced."""
        backward = self._end_of(parameter.unit)
        backward.units[parameter.unit] = None
        return backward

    def _is_late(self, parameter: ShardedParameter) -> bool:
        """Whether what waits on a parameter, whose reduced gradient is here, came behind the reduction or is still to come."""
        if not parameter.unit.accumulates or backward_id() == -1:
            return False
        backward = self._of(parameter)
        if not parameter.unit.requires_sync:
            _warn_too_late(parameter.name)
        if parameter.waiting is not None or parameter.slot_number in backward.late:
            return True
        gate = parameter.waiting_gate
        return gate is not None and parameter.slot_number not in self._running().waits and engine_runs(gate.grad_fn)

    def _reduce_what_waits(self, backward: _Backward) -> None:
        """At the end of a backward: reduce what it did not reach, of all units of the models that it ran through."""
        units = list(dict.fromkeys(unit for touched in backward.units for unit in touched.family()))
        total = backward.late
        for parameter, grad in reduced(unit for unit in units if unit.reduces):
            slot = parameter.slot_number
            total[slot] = total[slot] + grad if slot in total else grad
        order = {parameter.slot_number: None for unit in units for parameter in unit.parameters}
        for slot in [slot for slot in order if slot in total]:
            registry.parameter_of(slot).add(total[slot], owned=True)
            backward.held[slot] = None
        backward.late = {}

    # ---- backwards inside of one another -----------------------------------------------------------------------------
    def take_part(self, unit: Unit) -> None:
        """The unit's model has a part in the running backward."""
        self._running().roots[unit.root] = None

    @never_compiled
    def watch(self, unit: Unit, output: Any) -> None:
        """The unit's model has a part in every backward that comes to ``output`` (a pytree), whatever parameters it brings gradients to."""
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_TakePart(weakref.ref(unit)))

    def _end_of(self, unit: Unit, behind: int = -1) -> _Backward:
        """The outermost of the running backwards that the unit's model has a part in; only of those behind number ``behind``."""
        running, root = self._running(), unit.root
        running.roots[root] = None
        for number in sorted(self._backwards):  # a backward has a higher number than the one that it runs inside of
            backward = self._backwards[number]
            if number > behind and root in backward.roots and backward.runs():
                return backward
        return running

    # ---- publishing --------------------------------------------------------------------------------------------------
    @never_compiled
    def gradient(self, slot: int, grad: Tensor, kind: str = PUBLISHED, owned: bool = False) -> None:
        """A gate's gradient is complete. Publish it, or let it wait: for its reduction while the next graph runs, or for a backward
        that communicates (``kind``). ``owned``: nothing else holds it, so that it can be kept without a copy."""
        if kind == WAITS:
            self._waits(registry.parameter_of(slot))
            return
        backward = self._backwards.get(backward_id())
        pieces: list[_Piece] = []
        if backward is not None:
            self._publish(backward, before=backward.graph)
            pieces = backward.found.pop(slot, [])
        if backward is not None and pieces:
            backward.roots[registry.parameter_of(slot).unit.root] = None
            backward.queue.append((slot, grad, pieces, kind))
        else:
            self._publish_one(slot, grad, kind, owned)

    def publish(self, slot: int, grad: Tensor, kind: str = PUBLISHED, *, last: bool = False, end: bool = False) -> None:
        """Publish a gradient at once, in compiled autograd's graph, whose end calls nothing back.

        Args:
            last: of its bucket. end: of the graph.
        """
        if self._in_graph is None or self._in_graph.backward != backward_id():  # the last one failed
            self._in_graph = _InGraph(backward_id())
        running, parameter = self._in_graph, registry.parameter_of(slot)
        running.units[parameter.unit] = None
        if kind == SCATTERED:
            accumulate_scattered(parameter, grad)
        elif kind == PUBLISHED:
            parameter.publish(grad)
            running.published.append(parameter)
        if last:
            published, running.published = running.published, []
            tell(published)
        if end:
            self._in_graph = None
            units = dict.fromkeys(unit for touched in running.units if touched.accumulates for unit in touched.family())
            reduce_accumulated(unit for unit in units if unit.reduces)

    def close_failed(self) -> None:
        """Drop what backwards that ended by an exception have left. Nothing inside of a backward."""
        if self._backwards and backward_id() == -1:
            for backward in self._backwards.values():
                self._end(backward)
            self._backwards.clear()

    def _running(self) -> _Backward:
        number = backward_id()
        if number not in self._backwards:
            backward = self._backwards[number] = _Backward()
            backward.runs = at_end_of_backward(self._end_backward)
        return self._backwards[number]

    def _end_backward(self) -> None:
        backward = self._backwards.get(backward_id())
        if backward is not None:
            for bucket in list(backward.collecting.values()):  # reads that the loss does not depend on have no gradient
                self._launch(backward, bucket)
            self._publish(backward, before=NOT_LAUNCHED)
            if backward.units:
                self._reduce_what_waits(backward)
            held, backward.held = backward.held, {}
            for slot in held:
                parameter = registry.parameter_of(slot)
                parameter.run_hooks()
                backward.published.append(parameter)
            self._tell_of(backward)
            self._end(self._backwards.pop(backward_id()))

    def _publish(self, backward: _Backward, before: int) -> None:
        """Publish what is queued of graphs before the one with this number, bucket by bucket."""
        ready = [entry for entry in backward.queue if _graph_of(entry[2]) < before]
        backward.queue = [entry for entry in backward.queue if _graph_of(entry[2]) >= before]
        for number, (slot, grad, pieces, kind) in enumerate(ready, start=1):
            total = None if _is_placeholder(grad) else grad
            left = pieces[-1].left
            for piece in pieces:
                reduced = piece.gradient()
                total = reduced if total is None else total + reduced
            assert total is not None
            self._publish_one(slot, total, kind, owned=True)
            pieces.clear()
            if number == len(ready) or ready[number][2][-1].left is not left:
                self._tell_of(backward)
        backward.buckets = [left for left in backward.buckets if left.in_flight]

    def _publish_one(self, slot: int, grad: Tensor, kind: str, owned: bool = False) -> None:
        parameter = registry.parameter_of(slot)
        if kind == SCATTERED:
            self._of(parameter)
            accumulate_scattered(parameter, grad)
            parameter.unit.after_backward(parameter)
            return
        if self._is_late(parameter):
            late = self._running().late
            late[slot] = late[slot] + grad if slot in late else grad if owned else grad.clone()
            return
        if backward_id() != -1:
            unit, running = parameter.unit, self._running()
            end = self._end_of(unit, behind=unit.forward_in)
            if slot in end.held or unit.perhaps_again or (unit.in_parts and end is not running):
                parameter.add(grad, owned)
                end.held[slot] = None
                return
        parameter.publish(grad, owned)
        if parameter.unit.post_backward_hooks:
            self._running().published.append(parameter)

    def _tell_of(self, backward: _Backward) -> None:
        published, backward.published = backward.published, []
        tell(published)

    def _end(self, backward: _Backward) -> None:
        for left in backward.buckets:
            left.wait()  # nobody reads it, but it has to end


def _graph_of(pieces: list[_Piece]) -> int:
    """The last graph that left one of them."""
    return max(piece.left.graph for piece in pieces)


def _is_placeholder(grad: Tensor) -> bool:
    """Whether a gate's gradient is nothing but the zero that ``leave`` returned, expanded."""
    return grad.numel() > 1 and not any(grad.stride())


def _warn_too_late(name: str) -> None:
    global _warned_too_late
    if not _warned_too_late:
        _warned_too_late = True
        log.warning(
            "gradient sync was turned off between a forward and its backward, which reduces the gradient of %r all the same: compiled code has "
            "the reduction in it. The result is right, only more is communicated; call set_requires_gradient_sync(False) before the forward.",
            name,
        )


PUBLISHING = Publishing()
