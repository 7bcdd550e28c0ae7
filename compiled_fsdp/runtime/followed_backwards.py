"""Backwards that take part in the collectives of agreed plans: which plan, and when a run of it begins and ends.

A backward follows the plan that its forward has followed. Code hands in full gradients here, and asks for full
parameters that backward needs.
"""

# Why: docs/design.md, note N78

from __future__ import annotations

import weakref

from torch import Tensor

from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.runtime.followed import BoundPlan, FollowedBackward, LaunchReduction, too_late
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter


class FollowedBackwards:
    """The plans that backwards follow, and the runs of those that have not ended.

    Attributes:
        followed: the plan that the parameter's last training forward followed.
    """

    def __init__(self, prefetcher: AllGatherPrefetcher, launch: LaunchReduction) -> None:
        self._prefetcher, self._launch = prefetcher, launch
        self.followed: weakref.WeakKeyDictionary[ShardedParameter, BoundPlan] = weakref.WeakKeyDictionary()
        # Plans of which full parameters are kept, and perhaps others.
        self._keeping: weakref.WeakSet[BoundPlan] = weakref.WeakSet()
        # By the backward's number.
        self._runs: dict[int, FollowedBackward] = {}
        # Also by its number: parameters without a gradient on this rank, each with the bucket that has its result.
        self._without_gradient: dict[int, list[tuple[ShardedParameter, PendingReduceScatter]]] = {}

    # ---- what a checkpoint reads again -------------------------------------------------------------------------------
    @property
    def keeps(self) -> bool:
        """Whether full parameters may be kept for checkpoints."""
        return bool(self._keeping)

    def keep(self, bound: BoundPlan, read: int, full: Tensor) -> None:
        """A forward has read a full parameter that its checkpoint reads again, and the plan does not gather again."""
        bound.kept[read] = full
        self._keeping.add(bound)

    def drop_kept(self, params: set[int]) -> None:
        """The DTensor parameters with these ids are about to be written: what is kept of their plans will be old."""
        for bound in [bound for bound in self._keeping if bound.holds(params)]:
            bound.forget_kept()
            self._keeping.discard(bound)

    # ---- one backward ------------------------------------------------------------------------------------------------
    def plan_of(self, parameter: ShardedParameter) -> BoundPlan | None:
        """The plan that a backward of the parameter follows; None if it follows none."""
        return None if fake_mode_is_active() else self.followed.get(parameter)

    def full(self, parameter: ShardedParameter) -> Tensor | None:
        """The full parameter, gathered again; None where no plan is followed."""
        bound = self.plan_of(parameter)
        if bound is None:
            return None
        read = bound.read_of[parameter.param_id]
        if read in bound.kept:
            return bound.kept[read]
        run = self._run_of(bound)
        if run.is_done and not run.serves(read):
            run = self.begin(bound)
        if not run.serves(read):
            raise too_late(bound, read, "the full parameter in backward")
        return run.full(read)

    def follows(self, parameter: ShardedParameter) -> bool:
        """Whether the parameter's last training forward followed a plan, as its backward will."""
        return self.plan_of(parameter) is not None

    def gathers_in_backward(self, parameter: ShardedParameter) -> bool:
        """Whether the plan that its last forward followed gathers the parameter again in backward; True without one."""
        bound = self.plan_of(parameter)
        return bound is None or bound.read_of[parameter.param_id] in bound.gathered("backward")

    def reduce(
        self, parameter: ShardedParameter, grad: Tensor, spec: ReduceSpec
    ) -> tuple[bool, PendingReduceScatter | None]:
        """Hand in a full gradient.

        Returns whether a plan is followed, and if this is the parameter's first gradient, the bucket of its result.
        """
        bound = self.plan_of(parameter)
        if bound is None:
            return False, None
        run = self._run_of(bound)
        read = bound.read_of[parameter.param_id]
        if not run.takes(read):
            if not (run.is_done or bound.plan.on_demand):
                raise too_late(bound, read, "a second gradient")
            # of an earlier forward (two forwards, one backward), or of a block that all ranks gathered twice in one
            run = self.begin(bound)
        return True, run.reduce(read, grad, spec)

    def leave_unreduced(self, parameter: ShardedParameter) -> None:
        """A full gradient stays on this rank until a backward that communicates, so nothing of it is handed in.

        The plan's backward begins all the same: it may have gathers that this rank's code does not need, as for another
        rank's checkpoint, which reads the parameter again.
        """
        bound = self.plan_of(parameter)
        if bound is None:
            return
        run, read = self._run_of(bound), bound.read_of[parameter.param_id]
        if run.has_all_of(read):
            if run.has_to_reduce and not bound.plan.on_demand:
                raise too_late(bound, read, "a second gradient")
            run = self.begin(bound)  # of an earlier forward (two forwards, one backward)
        run.leave(read)

    def run_whole(self, bound: BoundPlan) -> None:
        """Take part in all of a plan's backward, of which this rank's code needs nothing."""
        self.begin(bound)
        self.end_run()

    def end(self) -> list[tuple[ShardedParameter, Tensor]]:
        """Launch all that is left of the running backward's plans.

        Returns the reduced gradients of parameters that have a gradient on other ranks only. (A gradient of zeros is
        taken for none: then no rank may have had one.)
        """
        self.end_run()
        found = []
        for parameter, pending in self._without_gradient.pop(backward_id(), []):
            grad = pending.shard(parameter)
            if bool(grad.any()):
                found.append((parameter, grad))
        return found

    def close_failed(self) -> None:
        """Drop what backwards that ended by an exception have left."""
        self._runs.clear()
        self._without_gradient.clear()

    def _run_of(self, bound: BoundPlan) -> FollowedBackward:
        run = self._runs.get(backward_id())
        return run if run is not None and run.bound is bound else self.begin(bound)

    def begin(self, bound: BoundPlan) -> FollowedBackward:
        """A backward of the plan begins."""
        self.end_run()  # of a plan that the other ranks have behind them, too
        run = self._runs[backward_id()] = FollowedBackward(bound, self._prefetcher, self._launch)
        return run

    def end_run(self) -> None:
        """Code with its own collectives begins in the running backward, or all is done: launch the rest of the plan."""
        number = backward_id()
        run = self._runs.pop(number, None)
        if run is not None:
            run.end()
            run.bound.backward_ended()
            self._without_gradient.setdefault(number, []).extend(run.without_gradient)
