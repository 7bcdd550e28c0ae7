"""What one backward has in flight, as data."""

# Why: docs/design.md, note N14

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.buckets.spec import BucketSpec
from compiled_fsdp.runtime.frozen_reads import FrozenReads
from compiled_fsdp.runtime.reduce_scatter import FLAT_REDUCTION, PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit


@dataclass(frozen=True)
class BucketPiece:
    """One gradient in a bucket."""

    pending: PendingReduceScatter
    parameter: ShardedParameter
    # Of several gradients of the parameter in the bucket, which one.
    which: int = 0

    def gradient(self) -> Tensor:
        """The shard's reduced gradient; waits for it."""
        return self.pending.shard(self.parameter, self.which)


@dataclass(eq=False)
class ExpectedGrads:
    """The gradients that eager code's reads of a block will bring in backward, unless some are not used."""

    # Holds the block's full parameters in backward, as long as anything that autograd has saved refers to them.
    handle: weakref.ref[Any]
    # Whether the block was resharded after forward, and not before: backward gathers it again.
    resharded: bool
    count: int = 0
    # The number of the last backward that has brought one.
    backward: int = -1


@dataclass(eq=False)
class EagerBucket:
    """The gradients of a block that eager code has read, so far."""

    expected: ExpectedGrads
    pending: PendingReduceScatter
    grads: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    # How many have come, some of them added to one another.
    added: int = 0

    def add(self, parameter: ShardedParameter, grad: Tensor) -> None:
        """Another full gradient."""
        self.added += 1
        self.grads[parameter] = self.grads[parameter] + grad if parameter in self.grads else grad

    def members(self) -> list[ShardedParameter]:
        """The parameters whose gradients have come, in registration order.

        Not in the order of their coming, because that depends on this rank's code. For example, a rank that uses a
        layer's output twice may get the gradient of its bias before that of its weight.
        """
        return sorted(self.grads, key=lambda parameter: parameter.index)


@dataclass(frozen=True)
class QueuedGrad:
    """A gradient that a gate has asked for, and that is still being reduced."""

    parameter: ShardedParameter
    # What came through the autograd graph: the zero that stands for what is deferred, or with it something else.
    through_graph: Tensor
    pieces: list[BucketPiece]
    sync: GradSync

    def total(self) -> Tensor:
        """The whole gradient; waits for it."""
        grads = [piece.gradient() for piece in self.pieces]
        if self.through_graph.numel() <= 1 or any(self.through_graph.stride()):  # else it is an expanded zero
            grads.insert(0, self.through_graph)
        return functools.reduce(operator.add, grads)

    @property
    def due(self) -> int:
        """The number of the graph at whose end the last of the pieces is waited for."""
        return max(piece.pending.due for piece in self.pieces)


@dataclass(eq=False)
class BackwardState:
    """What one backward has in flight, or compiled autograd's graph, which runs in the place of one.

    A graph that follows a plan has results that are still to be launched: ``deferred`` and ``queue``.
    """

    number: int
    # Whether it still runs; else it has failed.
    runs: Callable[[], object] = bool
    # By ``param_id``, what graphs have deferred and no gate has asked for.
    deferred: dict[int, list[BucketPiece]] = field(default_factory=dict)
    # What gates have asked for, in order.
    queue: list[QueuedGrad] = field(default_factory=list)
    # Buckets in flight.
    buckets: list[PendingReduceScatter] = field(default_factory=list)
    # Those of eager code that are not complete, by the id of their ``ExpectedGrads``.
    eager_buckets: dict[int, EagerBucket] = field(default_factory=dict)
    # Blocks without gradients that it has not come to.
    frozen: FrozenReads = field(default_factory=FrozenReads)
    # How many graphs have deferred something, and the autograd node of the last one.
    graph: int = 0
    node: Any = None
    # What grouped hooks are to be told of.
    accumulated: list[ShardedParameter] = field(default_factory=list)
    # ``param_id``s whose gradients were added to what waits.
    waiting: set[int] = field(default_factory=set)
    # Reduced gradients that are accumulated at the end, with what waited, by ``param_id``.
    late: dict[int, Tensor] = field(default_factory=dict)
    # Of models that accumulate without communication (in compiled autograd's graph of all), the units whose gradients
    # came.
    units: dict[Unit, None] = field(default_factory=dict)
    # ``param_id``s of parameters to which more may come: their hooks are run at the end.
    hooks_held: dict[int, None] = field(default_factory=dict)
    # The outermost units of the models that have a part in it.
    roots: dict[Unit, None] = field(default_factory=dict)
    # Units of them whose gradients came.
    taking_part: set[Unit] = field(default_factory=set)

    def begin_graph(self, node: Any) -> None:
        """Another graph, or eager code's bucket (no ``node``), is about to launch reductions."""
        self.node, self.graph = node, self.graph + 1

    def launch(
        self, pending: PendingReduceScatter, parameters: Sequence[ShardedParameter], grads: Sequence[Tensor],
        how: BucketSpec | AgreedBucket = FLAT_REDUCTION,
    ) -> None:  # fmt: skip
        """Launch a bucket of the graph that has begun last."""
        self.advance()
        pending.launch(parameters, grads, self.graph, how)
        self.buckets.append(pending)

    def advance(self) -> None:
        """On with the reductions over replicas."""
        for pending in self.buckets:
            pending.advance()

    def defer(self, parameter: ShardedParameter, pending: PendingReduceScatter, which: int = 0) -> None:
        """The parameter's gradient comes, in part, of ``pending``."""
        self.deferred.setdefault(parameter.param_id, []).append(BucketPiece(pending, parameter, which))

    def only_adds(self, unit: Unit) -> bool:
        """Whether a reduced gradient of the unit is just added to ``.grad``, where no other backward runs.

        It is so for nearly all, and takes a third of the time that the other questions take.
        """
        return (
            unit in self.taking_part
            and unit.state is ShardState.SHARDED
            and not (self.queue or self.deferred or self.hooks_held)
            and not (unit.accumulation.enabled or unit.eager.may_run_again or unit.post_backward_hooks)
            and not torch.is_grad_enabled()
        )
