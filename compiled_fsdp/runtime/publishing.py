"""Gradients on their way from compiled backwards to ``.grad``.

A backward graph that is one of several leaves its last reductions in flight when it ends (``leave``), and returns zeros
without memory in place of their results. Gates then find the results here, and publish them once the next graph's
reductions are launched; the last ones at the end of backward. What no gate asks for (``torch.autograd.grad``) is dropped there.

Hooks that want a bucket's parameters together (``register_post_backward_hook``) are called when the bucket's last one is published;
where a whole graph returns all gradients at once, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compiled_fsdp import slots
from compiled_fsdp.compat import at_end_of_backward, backward_id, never_compiled, running_node
from compiled_fsdp.passes import expand
from compiled_fsdp.runtime.boundary import BOUNDARY

if TYPE_CHECKING:
    from compiled_fsdp.group import ShardGroup
    from compiled_fsdp.parameter import ShardedParameter


NOT_LAUNCHED = 1 << 62
"""Above the number of any graph."""


class Left:
    """A bucket of reductions that goes beyond its graph: in flight once ``launch`` was called."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._bucket: Tensor | None = None
        self._parts = 1
        self._done = False
        self.graph = NOT_LAUNCHED

    def launch(self, grads: Sequence[Tensor], numels: Sequence[int], graph: int, exchange: bool = False) -> None:
        """Start the reduction of full gradients; ``graph`` is the number of the graph that they are of."""
        world = self._group.size
        self.graph, self._parts = graph, world if exchange else 1
        self._bucket = expand.launch_reduce(grads, numels, world, self._group.name, exchange)

    @property
    def in_flight(self) -> bool:
        return self._bucket is not None and not self._done

    def shard(self, offset: int, size: Sequence[int]) -> Tensor:
        """One reduced gradient, once the collective is done."""
        self.wait()
        assert self._bucket is not None
        return expand.unpack_reduce(self._bucket, offset, size, self._parts, self._group.rank)

    def wait(self) -> None:
        if self.in_flight:
            assert self._bucket is not None
            self._done = True
            expand.wait(self._bucket)


@dataclass(frozen=True)
class _Piece:
    """One gradient in a bucket."""

    left: Left
    offset: int
    size: tuple[int, ...]

    def gradient(self) -> Tensor:
        return self.left.shard(self.offset, self.size)


@dataclass(eq=False)
class Expected:
    """How many gradients eager code's reads of a block will bring in backward, unless some are not used."""

    gradients: int = 0


@dataclass(eq=False)
class _Collecting:
    """The gradients of a block that eager code has read, by slot, so far. ``added``: how many, some to one another."""

    expected: Expected
    left: Left
    grads: dict[int, Tensor] = field(default_factory=dict)
    numels: list[int] = field(default_factory=list)
    added: int = 0

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def add(self, slot: int, grad: Tensor, numel: int) -> None:
        self.added += 1
        if slot in self.grads:
            self.grads[slot] = self.grads[slot] + grad
        else:
            self.grads[slot] = grad
            self.numels.append(numel)


@dataclass(eq=False)
class _Backward:
    """What one backward has in flight.

    Attributes:
        found: by slot, what graphs have left and no gate has asked for.
        queue: what gates have asked for, in order: slot, what came through the graph, and what was left.
        buckets: those in flight. collecting: those of eager code, by block.
        graph: how many graphs have left something. node: the autograd node of the last one.
        published: what grouped hooks are to be told of.
    """

    found: dict[int, list[_Piece]] = field(default_factory=dict)
    queue: list[tuple[int, Tensor, list[_Piece]]] = field(default_factory=list)
    buckets: list[Left] = field(default_factory=list)
    collecting: dict[int, _Collecting] = field(default_factory=dict)
    graph: int = 0
    node: Any = None
    published: list[ShardedParameter] = field(default_factory=list)


class Publishing:
    """What backwards have in flight, by backward: one may run inside of another."""

    def __init__(self) -> None:
        self._backwards: dict[int, _Backward] = {}
        self._in_graph: list[ShardedParameter] = []

    def leave(
        self, grads: Sequence[Tensor], numbers: Sequence[Tensor], numels: Sequence[int], exchange: bool
    ) -> Tensor:
        """Launch the reduction of full gradients and return a zero to stand for them."""
        backward = self._running()
        node = running_node()
        if node is not backward.node:
            backward.node, backward.graph = node, backward.graph + 1
        parameters = [slots.parameter_of(slot) for slot in numbers]
        if len(grads) == 1 and grads[0].numel() == parameters[0].world * numels[0]:
            # neither packed nor padded, it is the graph's memory, which the graph may use again while the collective still reads it
            grads = [grads[0].clone()]
        left = Left(parameters[0].group)
        left.launch(grads, numels, backward.graph, exchange)
        backward.buckets.append(left)
        offset = 0
        for parameter, numel in zip(parameters, numels, strict=True):
            pieces = backward.found.setdefault(parameter.slot_number, [])
            pieces.append(_Piece(left, offset, tuple(parameter.shard.shape)))
            offset += numel
        return grads[0].new_zeros(())

    @never_compiled
    def collect(self, grad: Tensor, parameter: ShardedParameter, expected: Expected) -> Tensor:
        """Put an eager read's full gradient into its block's bucket, which is launched with its last one, and return a zero."""
        backward = self._running()
        bucket = backward.collecting.get(id(expected))
        if bucket is None:
            bucket = backward.collecting[id(expected)] = _Collecting(expected, Left(parameter.group))
        shape = tuple(parameter.shard.shape)
        if parameter.slot_number not in bucket.grads:
            backward.found.setdefault(parameter.slot_number, []).append(_Piece(bucket.left, bucket.numel, shape))
        bucket.add(parameter.slot_number, grad, parameter.shard.numel())
        if bucket.added == expected.gradients:
            self._launch(backward, bucket)
        return grad.new_zeros(()).expand(shape)

    def _launch(self, backward: _Backward, bucket: _Collecting) -> None:
        del backward.collecting[id(bucket.expected)]
        backward.node, backward.graph = None, backward.graph + 1
        bucket.left.launch(list(bucket.grads.values()), bucket.numels, backward.graph)
        backward.buckets.append(bucket.left)

    @never_compiled
    def gradient(self, slot: int, grad: Tensor) -> None:
        """A gate's gradient is complete. Publish it, or let it wait for its reduction while the next graph runs."""
        backward = self._backwards.get(backward_id())
        pieces: list[_Piece] = []
        if backward is not None:
            self._publish(backward, before=backward.graph)
            pieces = backward.found.pop(slot, [])
        if backward is not None and pieces:
            backward.queue.append((slot, grad, pieces))
        else:
            self._publish_one(slot, grad)

    def publish(self, slot: int, grad: Tensor, *, last: bool) -> None:
        """Publish a gradient at once, in compiled autograd's graph, whose end calls nothing back; ``last``: of its bucket."""
        parameter = slots.parameter_of(slot)
        parameter.publish(grad)
        self._in_graph.append(parameter)
        if last:
            published, self._in_graph = self._in_graph, []
            _tell(published)

    def close_failed(self) -> None:
        """Drop what backwards that ended by an exception have left. Nothing inside of a backward."""
        if self._backwards and backward_id() == -1:
            for backward in self._backwards.values():
                self._end(backward)
            self._backwards.clear()

    def _running(self) -> _Backward:
        number = backward_id()
        if number not in self._backwards:
            self._backwards[number] = _Backward()
            at_end_of_backward(self._end_backward)
        return self._backwards[number]

    def _end_backward(self) -> None:
        backward = self._backwards.get(backward_id())
        if backward is not None:
            for bucket in list(backward.collecting.values()):  # reads that the loss does not depend on have no gradient
                self._launch(backward, bucket)
            self._publish(backward, before=NOT_LAUNCHED)
            self._tell_of(backward)
            self._end(self._backwards.pop(backward_id()))

    def _publish(self, backward: _Backward, before: int) -> None:
        """Publish what is queued of graphs before the one with this number, bucket by bucket."""
        ready = [entry for entry in backward.queue if _graph_of(entry[2]) < before]
        backward.queue = [entry for entry in backward.queue if _graph_of(entry[2]) >= before]
        for number, (slot, grad, pieces) in enumerate(ready, start=1):
            total = None if _is_placeholder(grad) else grad
            left = pieces[-1].left
            for piece in pieces:
                reduced = piece.gradient()
                total = reduced if total is None else total + reduced
            assert total is not None
            self._publish_one(slot, total, owned=True)
            pieces.clear()
            if number == len(ready) or ready[number][2][-1].left is not left:
                self._tell_of(backward)
        backward.buckets = [left for left in backward.buckets if left.in_flight]

    def _publish_one(self, slot: int, grad: Tensor, owned: bool = False) -> None:
        parameter = slots.parameter_of(slot)
        parameter.publish(grad, owned)
        if parameter.unit.post_backward_hooks:
            self._running().published.append(parameter)

    def _tell_of(self, backward: _Backward) -> None:
        published, backward.published = backward.published, []
        _tell(published)

    def _end(self, backward: _Backward) -> None:
        for left in backward.buckets:
            left.wait()  # nobody reads it, but it has to end


def _tell(published: Sequence[ShardedParameter]) -> None:
    """Call the grouped hooks of these parameters' units, each once with all of its parameters."""
    hooks = dict.fromkeys(hook for parameter in published for hook in parameter.unit.post_backward_hooks.values())
    for hook in hooks:
        params = [p.param for p in published if hook in p.unit.post_backward_hooks.values()]
        BOUNDARY.drop(params)  # it may update them
        hook(params)


def _graph_of(pieces: list[_Piece]) -> int:
    """The last graph that left one of them."""
    return max(piece.left.graph for piece in pieces)


def _is_placeholder(grad: Tensor) -> bool:
    """Whether a gate's gradient is nothing but the zero that ``leave`` returned, expanded."""
    return grad.numel() > 1 and not any(grad.stride())


PUBLISHING = Publishing()
