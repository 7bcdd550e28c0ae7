"""Gradients on their way from compiled backwards to ``.grad``.

A backward graph that is one of several defers its last reductions: they are in flight when it ends (``defer``), and
zeros without memory stand for their results. Gates then find the results here, and accumulate them once the next
graph's reductions are launched; the last ones at the end of backward. What no gate asks for (``torch.autograd.grad``)
is dropped there.

Hooks that want a bucket's parameters together (``register_post_backward_hook``) are called when the bucket's last one
is accumulated; where a whole graph returns all gradients at once, at the end of backward.

One backward may run inside of another: a reentrant checkpoint's, one of a custom Function or of a hook. What such a one
has in flight ends with it. What is to be done once for a model (reducing what waits, the hooks of a parameter that the
other one brings gradients to as well) is left to the outermost of those that the model has a part in.

More than 400 lines, of which most are one state: what of which backward is in flight, waits or is reduced.
"""

# Why: docs/design.md, note N14; docs/design.md, note N28

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
    """What backwards have in flight, by backward: one may run inside of another."""

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
        """Launch the reduction of full gradients; returns a zero, ``[]`` of its ``dtype``, to stand for each result."""
        backward = self._running()
        if (node := running_node()) is not backward.node:
            backward.begin_graph(node)
        parameters = parameters_of(param_ids)
        if grads[0].device.type != "cpu" and (bucket.coalesced or len(grads) == 1):
            # neither packed nor padded, it is the graph's memory, which code for GPUs may use again while the
            # collective still reads it
            grads = [
                grad.clone() if grad.numel() == parameter.world * numel else grad
                for grad, parameter, numel in zip(grads, parameters, bucket.numels, strict=True)
            ]
        pending = PendingReduceScatter(bucket.reduction)
        backward.launch(pending, parameters, grads, bucket)
        for index, parameter in enumerate(parameters):
            backward.defer(parameter, pending, parameters[:index].count(parameter))
        return grads[0].new_zeros((), dtype=bucket.dtype)

    @never_compiled
    def collect(
        self, grad: Tensor, parameter: ShardedParameter, spec: ReduceSpec, expected: ExpectedGrads | None
    ) -> Tensor:
        """Put a full gradient into the bucket of the followed plan, or of its block; returns a zero to stand for it.

        The bucket is launched when its last gradient comes.

        Args:
            expected: how many gradients an eager read's block brings; None for code that follows a plan.
        """
        self.pass_frozen()
        backward = self._running()
        dtype = parameter.gate_dtype if spec.sync is GradSync.ALL else parameter.reduce_dtype
        zero = grad.new_zeros((), dtype=dtype).expand(tuple(parameter.shard.shape))
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

    # ---- gradients that wait -----------------------------------------------------------------------------------------
    @never_compiled
    def accumulate_unreduced(self, grad: Tensor, parameter: ShardedParameter, *, follows: bool = False) -> None:
        """Add a full gradient to what waits, if the running backward is one that brings gradients to parameters.

        ``follows``: whether the code is one that follows a plan, if the parameter has one.
        """
        if follows and self.follower.backwards.follows(parameter) and not compiled_autograd_runs():
            self._running()  # at whose end the plan's backward ends
            self.follower.backwards.leave_unreduced(parameter)
        gate = parameter.grads.unreduced_gate
        assert gate is not None
        if backward_id() == -1 or engine_runs(gate.grad_fn):
            accumulate_unreduced(parameter, grad)

    def _last_for(self, parameter: ShardedParameter) -> BackwardState:
        """The backward at whose end what waits on the parameter's model is reduced."""
        unit = unit_of(parameter)
        backward = self._outermost(unit)
        backward.units[unit] = None
        return backward

    def _is_late(self, parameter: ShardedParameter, unit: Unit) -> bool:
        """Whether what waits on a parameter, whose reduced gradient is here, came after the reduction or is to come."""
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
        """Reduce and accumulate what waits on the parameters of ``units``: a collective call, see ``reduced``.

        It is what the end of compiled autograd's graph calls for what that backward has not reached, and pipeline
        schedules after the last one.
        """
        parameters = []
        for parameter, grad in reduced(units):
            self._accumulate(parameter, unit_of(parameter), grad, owned=True)
            parameters.append(parameter)
        run_post_backward_hooks(parameters, self._prefetcher, self._offloaded)
        self._offloaded.finish()

    def _reduce_what_waits(self, backward: BackwardState) -> None:
        """Reduce at the end of a backward what it did not reach, of all units of the models that it ran through."""
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

    # ---- blocks without gradients ------------------------------------------------------------------------------------
    @never_compiled
    def watch_frozen(self, reads: Sequence[FrozenRead], output: Any) -> None:
        """A forward with these reads has ended: every backward that comes to ``output`` (a pytree) passes by them."""
        for node in _nodes_of(output):
            node.register_prehook(partial(self._frozen_are_reached, reads))

    def _frozen_are_reached(self, reads: Sequence[FrozenRead], grads: tuple[Tensor | None, ...]) -> None:
        if not in_compiled_autograd():  # whose graph is planned, and the plan agreed on
            self._reach_frozen(reads)

    @never_compiled
    def _reach_frozen(self, reads: Sequence[FrozenRead]) -> None:
        self._running().frozen.reach(reads)

    def pass_frozen(self) -> None:
        """A collective is about to be launched: in a backward, gather what it has behind it by now."""
        backward, node = self._backwards.get(backward_id()), running_node()
        if backward is not None and node is not None:
            backward.frozen.pass_by(sequence_number(node))

    def gathers_again(self, parameters: Sequence[ShardedParameter]) -> None:
        """The running backward needs a block in full, and gathers it next."""
        if (backward := self._backwards.get(backward_id())) is not None:
            backward.frozen.take(parameters)

    # ---- backwards inside of one another -----------------------------------------------------------------------------
    @never_compiled  # a reentrant checkpoint's backward runs below compiled autograd's code
    def take_part(self, unit: Unit) -> None:
        """The unit's model has a part in the running backward."""
        self._running().roots[unit.root] = None

    @never_compiled
    def watch_output(self, unit: Unit, output: Any) -> None:
        """The unit's model has a part in every backward that comes to ``output`` (a pytree), whatever that brings."""
        # not a tensor's hook: compiled autograd fails at one whose tensor the loss does not use
        for node in _nodes_of(output):  # which must not keep the unit alive
            node.register_prehook(partial(self._output_is_reached, weakref.ref(unit)))

    def _output_is_reached(self, reference: weakref.ref[Unit], grads: tuple[Tensor | None, ...]) -> None:
        if (unit := reference()) is not None and not in_compiled_autograd():
            self.take_part(unit)

    def _outermost(self, unit: Unit, after: int = -1) -> BackwardState:
        """The outermost running backward, of those after number ``after``, that the unit's model has a part in."""
        running, root = self._running(), unit.root
        running.roots[root] = None
        running.taking_part.add(unit)
        if len(self._backwards) == 1:  # nearly always
            return running
        for number in sorted(self._backwards):  # a backward has a higher number than the one that it runs inside of
            backward = self._backwards[number]
            if number > after and root in backward.roots and backward.runs():
                return backward
        return running

    # ---- from gates to ``.grad`` -------------------------------------------------------------------------------------
    def gradient(self, param_id: int, grads: tuple[Tensor, ...], sync: GradSync) -> None:
        """Accumulate a gate's gradient, which is complete, or let it wait for its reduction while the next graph runs.

        What is not reduced over all ranks (``sync``) waits for a backward that communicates.
        """
        owned = may_keep(grads)  # nothing else holds it; asked before we hold it
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
        """Accumulate a gradient at once, in compiled autograd's graph; ``last``: of its bucket."""
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
        """Reduce and accumulate what waits, where compiled autograd's graph brings no more gradients to gates."""
        state = self._graph
        if state is not None and state.number == backward_id():
            self.end_graph()
            self._graph = None
            touched = (unit for unit in state.units if unit.accumulation.enabled)
            units = dict.fromkeys(unit for some in touched for unit in some.tree_units())
            self.reduce_accumulated(unit for unit in units if unit.reduces)
            _reshard_others({unit.root for unit in state.units})

    def _graph_state(self) -> BackwardState:
        if self._graph is None or self._graph.number != backward_id():  # the last one failed
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
        """Hand in a full gradient in compiled autograd's graph, where that follows a plan."""
        _, pending = self.follower.backwards.reduce(parameter, grad, spec)
        if pending is not None:
            self._graph_state().defer(parameter, pending)

    def end_graph(self) -> None:
        """Compiled autograd's graph, or what is left of it behind a graph break, launches no more of its plan."""
        state, of_others = self._graph_state(), self.follower.backwards.end()
        for queued in state.queue:
            self._accumulate_in_graph(state, queued.parameter, queued.total(), queued.sync)
        state.queue.clear()
        for parameter, grad in of_others:
            self._accumulate_in_graph(state, parameter, grad, parameter.grads.spec.sync)
        self._run_post_backward_hooks(state)

    def _accumulate(self, parameter: ShardedParameter, unit: Unit, grad: Tensor, owned: bool = False) -> None:
        """``accumulate_grad``, and run the parameter's hooks."""
        accumulate_grad(parameter, unit, grad, owned, offloaded=self._offloaded)
        run_hooks(parameter, self._prefetcher, self._offloaded)

    def _accumulate_queued(self, backward: BackwardState, at_end_of: int) -> None:
        """Accumulate what is queued and due at the end of the graph with this number, bucket by bucket."""
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
        """A parameter's gradient is reduced, as far as it is to be: accumulate it, now or at the end of a backward."""
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
        """Drop what backwards that ended by an exception have in flight; inside of a backward do nothing."""
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
            # reads that the loss does not depend on have no gradient
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
            pending.wait()  # nobody reads it, but it has to end


def _nodes_of(output: Any) -> set[Any]:
    """The autograd nodes that have made the tensors of a pytree."""
    return {leaf.grad_fn for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.grad_fn}


def _reshard_others(roots: Container[Unit]) -> None:
    """At the end of a backward: what ``unshard()`` has gathered in its models, and no gradient has resharded."""
    for unit in unsharded_units():
        if unit.root in roots and unit.policy.reshard_after_backward:
            unit.forget_reads()
            unit.reshard()
