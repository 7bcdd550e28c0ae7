"""Gradients on their way from compiled backwards to ``.grad``.

If a backward has several graphs, each graph defers its last reductions (``defer``): they are in flight when it ends,
and zeros without memory stand for their results. Gates find the results here, and accumulate them once the next graph's
reductions are launched, the last ones at the end of backward. Results that no gate asks for (``torch.autograd.grad``)
are dropped there.

Post-backward hooks, which take a bucket's parameters together, are called when the bucket's last gradient is
accumulated. If one graph returns all gradients at once, they are called at the end of backward.

One backward may run inside of another, for example that of a reentrant checkpoint, a custom Function or a hook. Its
collectives end with it. Work that is done once for a model is left to the outermost backward that the model takes part
in: reducing pending gradients, and the hooks of parameters that both backwards bring gradients to.

More than 400 lines: most of them work on one state, the gradients of each backward in flight, pending or reduced.
"""

# Why: docs/design/gradients.md, "Nested backwards"; docs/design/graph-breaks.md, "Deferred reductions bypass autograd"

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.buckets.agreed_plan import AgreedBucket
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import BucketSpec
from compiled_fsdp.compat.autograd import (
    at_end_of_backward,
    backward_id,
    engine_runs,
    running_node,
    sequence_number,
)
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs, in_compiled_autograd
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.compat.modules import tree_flatten
from compiled_fsdp.ranks.same_models import check_same_model
from compiled_fsdp.runtime.accumulate_grad import (
    accumulate_grad,
    add_to_grad,
    may_keep,
    refuse_hooks_in_inner_backward,
    run_hooks,
    run_post_backward_hooks,
)
from compiled_fsdp.runtime.accumulation import accumulate_partial, accumulate_unreduced, reduced
from compiled_fsdp.runtime.backward_state import (
    BackwardState,
    EagerBucket,
    ExpectedGrads,
    QueuedGrad,
)
from compiled_fsdp.runtime.frozen_reads import FrozenRead
from compiled_fsdp.runtime.offloaded_grads import OffloadedGrads
from compiled_fsdp.runtime.plan_follower import PlanFollower
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reduce_scatter import NOT_LAUNCHED, PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import parameter_of, parameters_of, unit_of, unsharded_units
from compiled_fsdp.state.unit import Unit

log = logging.getLogger(__name__)


class GradReducer:
    """The reductions and gradients in flight, by backward, because one backward may run inside of another."""

    def __init__(self, prefetcher: AllGatherPrefetcher) -> None:
        self._prefetcher = prefetcher
        self.follower = PlanFollower(prefetcher, self._launch_followed)
        self._offloaded = OffloadedGrads()
        self._backwards: dict[int, BackwardState] = {}
        self._graph: BackwardState | None = None

    @property
    def idle(self) -> bool:
        """Whether no backward has anything in flight."""
        return not self._backwards and self._offloaded.idle

    # ---- reductions outside of graphs --------------------------------------------------------------------------------
    def defer(self, grads: Sequence[Tensor], param_ids: Sequence[Tensor], bucket: BucketSpec) -> Tensor:
        """Launch the reduction of full gradients. Returns a scalar zero of the bucket's ``dtype`` for each result."""
        backward = self._running()
        if (node := running_node()) is not backward.node:
            backward.begin_graph(node)
        parameters, spec = parameters_of(param_ids), bucket.reduction
        if grads[0].device.type != "cpu" and (bucket.coalesced or len(grads) == 1):
            # a gradient that is neither packed nor padded is the graph's memory, which GPU code may reuse while the
            # collective reads it
            grads = [
                grad.clone() if grad.numel() == bucket.world * numel else grad
                for grad, numel in zip(grads, bucket.numels, strict=True)
            ]
        pending = PendingReduceScatter(spec)
        part = None if spec.within is None else parameters[0].group.part_of(spec.within[0])
        backward.launch(pending, parameters, grads, bucket, part)
        for index, parameter in enumerate(parameters):
            backward.defer(parameter, pending, parameters[:index].count(parameter))
        return grads[0].new_zeros((), dtype=bucket.dtype)

    @never_compiled
    def collect(
        self, grad: Tensor, parameter: ShardedParameter, spec: ReduceSpec, expected: ExpectedGrads | None
    ) -> Tensor:
        """Put a full gradient into the bucket of the followed plan or of its block.

        The bucket is launched when its last gradient comes. Returns a zero that stands for the result.

        Args:
            expected: the gradients that eager code's block will bring; None for compiled code that follows a plan.
        """
        self.pass_frozen()
        backward = self._running()
        dtype = parameter.gate_dtype if spec.sync is GradSync.ALL else parameter.reduce_dtype
        shape = parameter.shard.shape if spec.sync is GradSync.ALL else parameter.partial_shape
        zero = grad.new_zeros((), dtype=dtype).expand(tuple(shape))
        follows, pending = self.follower.backwards.reduce(parameter, grad, spec)
        if pending is not None:
            backward.defer(parameter, pending)
        if follows:
            return zero
        assert expected is not None
        bucket = backward.eager_buckets.get(id(expected))
        if bucket is None:
            bucket = backward.eager_buckets[id(expected)] = EagerBucket(expected, PendingReduceScatter(spec))
        if parameter not in bucket.grads:
            backward.defer(parameter, bucket.pending)
        bucket.add(parameter, grad)
        if bucket.added == expected.count:
            self._launch(backward, bucket)
        return zero

    def _launch(self, backward: BackwardState, bucket: EagerBucket) -> None:
        del backward.eager_buckets[id(bucket.expected)]
        members = bucket.members()
        if members[0].world == 1:  # else ranks have compared before the first gather
            check_same_model(members[0])
        backward.begin_graph(None)
        backward.launch(bucket.pending, members, [bucket.grads[parameter] for parameter in members])

    def _launch_followed(
        self, pending: PendingReduceScatter, parameters: Sequence[ShardedParameter], grads: Sequence[Tensor],
        bucket: AgreedBucket,
    ) -> None:  # fmt: skip
        if compiled_autograd_runs():
            pending.launch(parameters, grads, 0, bucket)
        else:
            backward = self._running()
            backward.begin_graph(None)
            backward.launch(pending, parameters, grads, bucket)

    # ---- pending gradients -------------------------------------------------------------------------------------------
    @never_compiled
    def accumulate_unreduced(self, grad: Tensor, parameter: ShardedParameter, *, follows: bool = False) -> None:
        """Add a full gradient to the pending one, unless the backward never reaches the gate (``torch.autograd.grad``).

        ``follows``: whether the code follows the parameter's plan, if there is one.
        """
        if follows and self.follower.backwards.follows(parameter) and not compiled_autograd_runs():
            self._running()  # the plan's backward ends at the end of this backward
            self.follower.backwards.leave_unreduced(parameter)
        gate = parameter.grads.unreduced_gate
        assert gate is not None
        if backward_id() == -1 or engine_runs(gate.grad_fn):
            accumulate_unreduced(parameter, grad)

    def _last_for(self, parameter: ShardedParameter) -> BackwardState:
        """The backward at whose end the pending gradients of the parameter's model are reduced."""
        unit = unit_of(parameter)
        backward = self._outermost(unit)
        backward.units[unit] = None
        return backward

    def _is_late(self, parameter: ShardedParameter, unit: Unit) -> bool:
        """Whether a full gradient of the parameter came after its reduction was launched, or is still to come.

        For example, one backward runs through two forwards, one of them without gradient sync.
        """
        grads = parameter.grads
        if backward_id() == -1:
            return False
        backward = self._last_for(parameter)
        if not unit.policy.requires_gradient_sync:
            warn_once(
                log,
                "sync off too late",
                "gradient sync was turned off between a forward and its backward, which reduces the gradient of %r all "
                "the same: compiled code has the reduction in it. The result is right, only more is communicated; call "
                "set_requires_gradient_sync(False) before the forward.",
                parameter.name,
            )
        if grads.unsharded_accumulated_grad is not None or parameter.param_id in backward.late:
            return True
        gate = grads.unreduced_gate
        return gate is not None and parameter.param_id not in self._running().waiting and engine_runs(gate.grad_fn)

    def reduce_accumulated(self, units: Iterable[Unit]) -> None:
        """Reduce and accumulate the pending gradients of ``units``: a collective call, see ``reduced``."""
        parameters = []
        for parameter, grad in reduced(units):
            self._accumulate(parameter, unit_of(parameter), grad, owned=True)
            parameters.append(parameter)
        run_post_backward_hooks(parameters, self._prefetcher, self._offloaded)
        self._offloaded.finish()

    def _reduce_what_waits(self, backward: BackwardState) -> None:
        """At a backward's end, reduce the pending gradients that it did not reach, in all units of its models."""
        units = list(dict.fromkeys(unit for touched in backward.units for unit in touched.tree_units()))
        refuse_hooks_in_inner_backward(units)
        total = backward.late
        for parameter, grad in reduced(unit for unit in units if unit.reduces):
            param_id = parameter.param_id
            total[param_id] = total[param_id] + grad if param_id in total else grad
        for unit in units:
            for parameter in (p for p in unit.parameters if p.param_id in total):
                accumulate_grad(parameter, unit, total[parameter.param_id], owned=True, offloaded=self._offloaded)
                backward.hooks_held[parameter.param_id] = None
        backward.late = {}

    # ---- frozen blocks -----------------------------------------------------------------------------------------------
    @never_compiled
    def watch_frozen(self, reads: Sequence[FrozenRead], output: Any) -> None:
        """Tell every backward that reaches ``output`` (a pytree) of the frozen reads of the forward that made it."""
        for node in _nodes_of(output):
            node.register_prehook(partial(self._frozen_are_reached, reads))

    def _frozen_are_reached(self, reads: Sequence[FrozenRead], grads: tuple[Tensor | None, ...]) -> None:
        if not in_compiled_autograd():  # ranks have agreed on a plan for its graph
            self._reach_frozen(reads)

    @never_compiled
    def _reach_frozen(self, reads: Sequence[FrozenRead]) -> None:
        self._running().frozen.reach(reads)

    def pass_frozen(self) -> None:
        """Gather the frozen blocks that the running backward has passed, because it is about to launch a collective."""
        backward, node = self._backwards.get(backward_id()), running_node()
        if backward is not None and node is not None:
            backward.frozen.pass_by(sequence_number(node))

    def gathers_again(self, parameters: Sequence[ShardedParameter]) -> None:
        """Note that the running backward needs a full block and gathers it next."""
        if (backward := self._backwards.get(backward_id())) is not None:
            backward.frozen.take(parameters)

    # ---- backwards inside of one another -----------------------------------------------------------------------------
    @never_compiled  # a reentrant checkpoint's backward runs below compiled autograd's code
    def take_part(self, unit: Unit) -> None:
        """Note that the unit's model takes part in the running backward."""
        self._running().roots[unit.root] = None

    @never_compiled
    def watch_output(self, unit: Unit, output: Any) -> None:
        """Let the unit's model take part in every backward that reaches ``output`` (a pytree), whatever it brings."""
        # not tensor hooks: compiled autograd fails at the hook of a tensor that the loss does not use
        for node in _nodes_of(output):  # a node must not keep the unit alive
            node.register_prehook(partial(self._output_is_reached, weakref.ref(unit)))

    def _output_is_reached(self, reference: weakref.ref[Unit], grads: tuple[Tensor | None, ...]) -> None:
        if (unit := reference()) is not None and not in_compiled_autograd():
            self.take_part(unit)

    def _outermost(self, unit: Unit, after: int = -1) -> BackwardState:
        """The outermost running backward with a number above ``after`` that the unit's model takes part in."""
        running, root = self._running(), unit.root
        running.roots[root] = None
        running.taking_part.add(unit)
        if len(self._backwards) == 1:  # nearly always
            return running
        for number in sorted(self._backwards):  # an inner backward has a higher number than its outer backward
            backward = self._backwards[number]
            if number > after and root in backward.roots and backward.runs():
                return backward
        return running

    # ---- from gates to ``.grad`` -------------------------------------------------------------------------------------
    def gradient(self, param_id: int, grads: tuple[Tensor, ...], sync: GradSync) -> None:
        """Accumulate the complete gradient that a gate got, or queue it if its reduction is still in flight.

        If ``sync`` is not ``ALL``, the gradient stays pending until a backward that communicates.
        """
        owned = may_keep(grads)  # asked before this function holds the gradient, too
        grad, parameter = grads[0], parameter_of(param_id)
        if sync is GradSync.NONE:
            self._last_for(parameter)
            self._running().waiting.add(param_id)
            unit_of(parameter).after_backward(parameter)
            return
        backward, unit = self._backwards.get(backward_id()), unit_of(parameter)
        if backward is not None and len(self._backwards) == 1 and sync is GradSync.ALL and backward.only_adds(unit):
            add_to_grad(parameter, grad, owned, self._offloaded)
            run_hooks(parameter, self._prefetcher, self._offloaded)
            return
        if backward is not None and (backward.queue or backward.deferred):
            self._accumulate_queued(backward, at_end_of=backward.graph)
            if pieces := backward.deferred.pop(param_id, []):
                backward.roots[unit.root] = None
                backward.queue.append(QueuedGrad(parameter, grad, pieces, sync))
                return
        self._reduced_is_complete(parameter, grad, sync, owned)

    gradient_never_compiled = never_compiled(gradient)

    def gradient_in_graph(self, param_id: int, grad: Tensor, sync: GradSync, *, last: bool = False) -> None:
        """Accumulate a gradient at once, in compiled autograd's graph. ``last``: whether its bucket has no more."""
        state, parameter = self._graph_state(), parameter_of(param_id)
        unit = unit_of(parameter)
        state.units[unit] = None
        if pieces := state.deferred.pop(param_id, []):
            state.queue.append(QueuedGrad(parameter, grad, pieces, sync))
        else:
            self._accumulate_in_graph(state, parameter, grad, sync)
        if last:
            self._run_post_backward_hooks(state)

    def end_of_graph(self) -> None:
        """Reduce and accumulate pending gradients, because compiled autograd's graph brings no more to gates."""
        state = self._graph
        if state is not None and state.number == backward_id():
            self.end_graph()
            self._graph = None
            touched = (unit for unit in state.units if unit.accumulation.enabled)
            units = dict.fromkeys(unit for some in touched for unit in some.tree_units())
            self.reduce_accumulated(unit for unit in units if unit.reduces)
            roots = {unit.root for unit in state.units}
            _reshard_others(roots)
            for unit in (unit for root in roots for unit in root.tree_units()):
                unit.end_recomputation()

    def _graph_state(self) -> BackwardState:
        if self._graph is None or self._graph.number != backward_id():  # that state is of a backward that failed
            self._graph = BackwardState(backward_id())
        return self._graph

    def _accumulate_in_graph(
        self, state: BackwardState, parameter: ShardedParameter, grad: Tensor, sync: GradSync
    ) -> None:
        unit = unit_of(parameter)
        if sync is GradSync.ALL:
            self._accumulate(parameter, unit, grad)
            state.accumulated.append(parameter)
        else:
            if sync is GradSync.SHARDS_ONLY:
                accumulate_partial(parameter, grad)
            unit.after_backward(parameter)

    def follow_in_graph(self, grad: Tensor, parameter: ShardedParameter, spec: ReduceSpec) -> None:
        """Hand in a full gradient in a graph of compiled autograd that follows a plan."""
        _, pending = self.follower.backwards.reduce(parameter, grad, spec)
        if pending is not None:
            self._graph_state().defer(parameter, pending)

    def end_graph(self) -> None:
        """End the plan of compiled autograd's graph (or its rest after a graph break), and accumulate its gradients."""
        state, of_others = self._graph_state(), self.follower.backwards.end()
        for queued in state.queue:
            self._accumulate_in_graph(state, queued.parameter, queued.total(), queued.sync)
        state.queue.clear()
        for parameter, grad in of_others:
            self._accumulate_in_graph(state, parameter, grad, parameter.grads.spec.sync)
        self._run_post_backward_hooks(state)

    def _accumulate(self, parameter: ShardedParameter, unit: Unit, grad: Tensor, owned: bool = False) -> None:
        """Call ``accumulate_grad``, and run the parameter's hooks."""
        accumulate_grad(parameter, unit, grad, owned, offloaded=self._offloaded)
        run_hooks(parameter, self._prefetcher, self._offloaded)

    def _accumulate_queued(self, backward: BackwardState, at_end_of: int) -> None:
        """Accumulate the queued gradients that are due at the end of the graph with this number, bucket by bucket."""
        ready = [queued for queued in backward.queue if queued.due <= at_end_of]
        backward.queue = [queued for queued in backward.queue if queued.due > at_end_of]
        for number, queued in enumerate(ready, start=1):
            bucket = queued.pieces[-1].pending
            self._reduced_is_complete(queued.parameter, queued.total(), queued.sync, owned=True)
            queued.pieces.clear()
            if number == len(ready) or ready[number].pieces[-1].pending is not bucket:
                self._run_post_backward_hooks(backward)
        backward.buckets = [pending for pending in backward.buckets if pending.in_flight]

    def _reduced_is_complete(
        self, parameter: ShardedParameter, grad: Tensor, sync: GradSync, owned: bool = False
    ) -> None:
        """Accumulate a gradient that is reduced as far as ``sync`` says, now or at the end of a backward."""
        unit, param_id = unit_of(parameter), parameter.param_id
        if sync is GradSync.SHARDS_ONLY:
            self._last_for(parameter)
            accumulate_partial(parameter, grad)
            unit.after_backward(parameter)
            return
        if unit.accumulation.enabled and self._is_late(parameter, unit):
            late = self._running().late
            late[param_id] = late[param_id] + grad if param_id in late else grad if owned else grad.clone()
            return
        if backward_id() != -1:
            eager = unit.eager
            end = self._outermost(unit, after=-1 if unit.is_group else eager.backward)
            if param_id in end.hooks_held or eager.may_run_again or (eager.in_parts and end is not self._running()):
                accumulate_grad(parameter, unit, grad, owned, offloaded=self._offloaded)
                end.hooks_held[param_id] = None
                return
        self._accumulate(parameter, unit, grad, owned)
        if unit.post_backward_hooks:
            self._running().accumulated.append(parameter)

    # ---- the end of a backward ---------------------------------------------------------------------------------------
    def close_failed(self) -> None:
        """Drop the state of backwards that ended by an exception; inside of a backward do nothing."""
        if not self.idle and backward_id() == -1:
            for backward in self._backwards.values():
                self._end(backward)
            self._backwards.clear()
            self.follower.backwards.close_failed()
            self._offloaded.finish()

    def _running(self) -> BackwardState:
        number = backward_id()
        backward = self._backwards.get(number)
        if backward is None:
            backward = self._backwards[number] = BackwardState(number)
            backward.runs = at_end_of_backward(self._end_backward)
        return backward

    def _end_backward(self) -> None:
        backward = self._backwards.get(backward_id())
        if backward is not None:
            backward.frozen.pass_by(-1)
            # these are incomplete, because reads that the loss does not depend on have no gradient
            for bucket in list(backward.eager_buckets.values()):
                self._launch(backward, bucket)
            of_others = self.follower.backwards.end()
            backward.advance()  # all reductions over replicas are in flight together
            self._accumulate_queued(backward, at_end_of=NOT_LAUNCHED)
            for parameter, grad in of_others:
                self._reduced_is_complete(parameter, grad, parameter.grads.spec.sync, owned=True)
            if backward.units:
                self._reduce_what_waits(backward)
            held, backward.hooks_held = backward.hooks_held, {}
            for param_id in held:
                parameter = parameter_of(param_id)
                run_hooks(parameter, self._prefetcher, self._offloaded)
                backward.accumulated.append(parameter)
            self._run_post_backward_hooks(backward)
            self._offloaded.finish()
            self._end(self._backwards.pop(backward_id()))
            if not self._backwards:
                _reshard_others(backward.roots)

    def _run_post_backward_hooks(self, backward: BackwardState) -> None:
        parameters, backward.accumulated = backward.accumulated, []
        run_post_backward_hooks(parameters, self._prefetcher, self._offloaded)

    def _end(self, backward: BackwardState) -> None:
        for pending in backward.buckets:
            pending.wait()  # nobody needs the result, but the collective must end


def _nodes_of(output: Any) -> set[Any]:
    """The autograd nodes that made the tensors of a pytree."""
    return {leaf.grad_fn for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.grad_fn}


def _reshard_others(roots: Container[Unit]) -> None:
    """At the end of a backward, reshard the units of its models that are still full after ``unshard()``."""
    for unit in unsharded_units():
        if unit.root in roots and unit.policy.reshard_after_backward:
            unit.forget_reads()
            unit.reshard()
