"""The collectives and gradients that one backward has in flight, as data."""

# Why: docs/design/gradients.md, "Nested backwards"

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
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit


@dataclass(frozen=True)
class BucketPiece:
    """One gradient in a bucket."""

    pending: PendingReduceScatter
    parameter: ShardedParameter
    # The index among the parameter's gradients in the bucket, if it has several.
    which: int = 0

    def gradient(self) -> Tensor:
        """Wait for the shard's reduced gradient and return it."""
        return self.pending.shard(self.parameter, self.which)


@dataclass(eq=False)
class ExpectedGrads:
    """The gradients that backward will bring for eager code's reads of a block, unless the loss does not use some."""

    # The ``BlockHandle``: holds the full parameters in backward, as long as a saved tensor refers to them.
    handle: weakref.ref[Any]
    # Whether forward gathered the block and resharded it afterwards, so that backward gathers it again.
    resharded: bool
    count: int = 0
    # The number of the last backward that brought one of them.
    backward: int = -1


@dataclass(eq=False)
class EagerBucket:
    """The bucket of a block that eager code has read, with the gradients that have come so far."""

    expected: ExpectedGrads
    pending: PendingReduceScatter
    grads: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    # How many gradients have come. Several gradients of one parameter are one sum in ``grads``.
    added: int = 0

    def add(self, parameter: ShardedParameter, grad: Tensor) -> None:
        """Add another full gradient."""
        self.added += 1
        self.grads[parameter] = self.grads[parameter] + grad if parameter in self.grads else grad

    def members(self) -> list[ShardedParameter]:
        """The parameters whose gradients have come, in registration order.

        The order in which the gradients came depends on this rank's code. For example, a rank that uses a layer's
        output twice may get the gradient of its bias before that of its weight.
        """
        return sorted(self.grads, key=lambda parameter: parameter.index)


@dataclass(frozen=True)
class QueuedGrad:
    """A gradient that has reached its gate while its reduction is still in flight."""

    parameter: ShardedParameter
    # The gradient from autograd: the zero that stands for deferred gradients, plus gradients that are not deferred.
    through_graph: Tensor
    pieces: list[BucketPiece]
    sync: GradSync

    def total(self) -> Tensor:
        """Wait for all pieces, and return the whole gradient."""
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
    """The state of one backward, or of compiled autograd's graph, which replaces the backward's nodes.

    Compiled autograd's graph uses ``deferred`` and ``queue`` only if it follows a plan, because then its gradients
    reach gates before their buckets are launched.
    """

    number: int
    # Returns true while the backward runs. A backward that is still listed and does not run has failed.
    runs: Callable[[], object] = bool
    # The deferred gradients that have not reached their gate, by ``param_id``.
    deferred: dict[int, list[BucketPiece]] = field(default_factory=dict)
    # The gradients that have reached their gate and are still being reduced, in order.
    queue: list[QueuedGrad] = field(default_factory=list)
    # The buckets in flight.
    buckets: list[PendingReduceScatter] = field(default_factory=list)
    # The buckets of eager code that are not complete, by the id of their ``ExpectedGrads``.
    eager_buckets: dict[int, EagerBucket] = field(default_factory=dict)
    # The frozen blocks that the backward has not passed yet.
    frozen: FrozenReads = field(default_factory=FrozenReads)
    # How many graphs (or buckets of eager code) have launched reductions, and the autograd node of the last graph.
    graph: int = 0
    node: Any = None
    # The accumulated parameters that post-backward hooks have not been called with yet.
    accumulated: list[ShardedParameter] = field(default_factory=list)
    # The ``param_id``s whose full gradients this backward has left pending.
    waiting: set[int] = field(default_factory=set)
    # Reduced gradients that are accumulated at the end, together with pending ones, by ``param_id``.
    late: dict[int, Tensor] = field(default_factory=dict)
    # The units that gradients came to, if their model accumulates without communication. In compiled autograd's graph:
    # of any model.
    units: dict[Unit, None] = field(default_factory=dict)
    # The ``param_id``s of parameters that may get more gradients, so that their hooks run at the end.
    hooks_held: dict[int, None] = field(default_factory=dict)
    # The root units of the models that take part in the backward.
    roots: dict[Unit, None] = field(default_factory=dict)
    # The units of these models that gradients came to.
    taking_part: set[Unit] = field(default_factory=set)

    def begin_graph(self, node: Any) -> None:
        """Note that another graph, or a bucket of eager code (``node`` is None), is about to launch reductions."""
        self.node, self.graph = node, self.graph + 1

    def launch(
        self, pending: PendingReduceScatter, parameters: Sequence[ShardedParameter], grads: Sequence[Tensor],
        how: BucketSpec | AgreedBucket = FLAT_REDUCTION, group: ShardGroup | None = None,
    ) -> None:  # fmt: skip
        """Launch a bucket of the graph that began last; arguments are those of ``PendingReduceScatter.launch``."""
        self.advance()
        pending.launch(parameters, grads, self.graph, how, group)
        self.buckets.append(pending)

    def advance(self) -> None:
        """Launch the second reduction of every bucket whose first one is in flight."""
        for pending in self.buckets:
            pending.advance()

    def defer(self, parameter: ShardedParameter, pending: PendingReduceScatter, which: int = 0) -> None:
        """Note that ``pending`` brings the parameter's gradient, or a part of it."""
        self.deferred.setdefault(parameter.param_id, []).append(BucketPiece(pending, parameter, which))

    def only_adds(self, unit: Unit) -> bool:
        """Whether a reduced gradient of the unit only has to be added to ``.grad``, if no other backward runs.

        It is true for nearly all gradients, and takes a third of the time of the checks that it makes unnecessary.
        """
        return (
            unit in self.taking_part
            and unit.state is ShardState.SHARDED
            and not (self.queue or self.deferred or self.hooks_held)
            and not (unit.accumulation.enabled or unit.eager.may_run_again or unit.post_backward_hooks)
            and not torch.is_grad_enabled()
        )
