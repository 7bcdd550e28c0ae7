"""Backwards that follow agreed plans: which plan each one follows, and when its run of the plan begins and ends.

A backward follows the same plan as its forward. Code hands in full gradients here, and asks for the full parameters
that backward needs.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import weakref

from torch import Tensor

from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.runtime.followed import BoundPlan, FollowedBackward, LaunchReduction
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter


class FollowedBackwards:
    """The plans that backwards follow, and the runs that have not ended.

    Attributes:
        followed: for each parameter, the plan that its last training forward followed.
    """

    def __init__(self, prefetcher: AllGatherPrefetcher, launch: LaunchReduction) -> None:
        self._prefetcher, self._launch = prefetcher, launch
        self.followed: weakref.WeakKeyDictionary[ShardedParameter, BoundPlan] = weakref.WeakKeyDictionary()
        # All plans with kept full parameters, and perhaps plans whose kept ones are dropped already.
        self._keeping: weakref.WeakSet[BoundPlan] = weakref.WeakSet()
        # The present run of each backward, by the backward's number.
        self._runs: dict[int, FollowedBackward] = {}
        # By the same number: the parameters without a gradient on this rank, each with the bucket that has its result.
        self._without_gradient: dict[int, list[tuple[ShardedParameter, PendingReduceScatter]]] = {}

    # ---- full parameters kept for checkpoints ------------------------------------------------------------------------
    @property
    def keeps(self) -> bool:
        """Whether full parameters may be kept for checkpoints."""
        return bool(self._keeping)

    def keep(self, bound: BoundPlan, read: int, full: Tensor) -> None:
        """Keep a full parameter that a checkpoint reads again in backward, but the plan does not gather there."""
        bound.kept[read] = full
        self._keeping.add(bound)

    def drop_kept(self, params: set[int]) -> None:
        """Drop the kept parameters of each plan with one of these DTensors (by id), which are about to be written."""
        for bound in [bound for bound in self._keeping if bound.holds(params)]:
            bound.forget_kept()
            self._keeping.discard(bound)

    # ---- one backward ------------------------------------------------------------------------------------------------
    def plan_of(self, parameter: ShardedParameter) -> BoundPlan | None:
        """The plan that a backward of the parameter follows; None if it follows none."""
        return None if fake_mode_is_active() else self.followed.get(parameter)

    def follow(self, bound: BoundPlan) -> None:
        """Let backwards follow a plan that no forward has followed, with all of its parameters."""
        bound.asked.update(bound.read_of.values())
        for read in bound.asked:
            self.followed[bound.parameter(read)] = bound

    def full(self, parameter: ShardedParameter) -> Tensor | None:
        """The full parameter in backward, gathered again or kept; None if no plan is followed."""
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
            raise _too_late(bound, read, "the full parameter in backward")
        return run.full(read)

    def follows(self, parameter: ShardedParameter) -> bool:
        """Whether the parameter's last training forward followed a plan, so that its backward does, too."""
        return self.plan_of(parameter) is not None

    def gathers_in_backward(self, parameter: ShardedParameter) -> bool:
        """Whether the plan of its last forward gathers the parameter again in backward; True if there is no plan."""
        bound = self.plan_of(parameter)
        return bound is None or bound.read_of[parameter.param_id] in bound.gathered("backward")

    def reduce(
        self, parameter: ShardedParameter, grad: Tensor, spec: ReduceSpec
    ) -> tuple[bool, PendingReduceScatter | None]:
        """Hand in a full gradient.

        Returns whether a plan is followed, and the bucket of the result if this is the parameter's first gradient.
        """
        bound = self.plan_of(parameter)
        if bound is None:
            return False, None
        run = self._run_of(bound)
        read = bound.read_of[parameter.param_id]
        if not run.takes(read):
            if not (run.is_done or bound.plan.on_demand):
                raise _too_late(bound, read, "a second gradient")
            # from an earlier forward (two forwards, one backward), or a block that all ranks gathered twice in one
            run = self.begin(bound)
        return True, run.reduce(read, grad, spec)

    def leave_unreduced(self, parameter: ShardedParameter) -> None:
        """Note a full gradient that is not handed in, because it stays pending until a backward that communicates.

        The plan's backward begins all the same, because it may have gathers that this rank's code does not need. For
        example, a checkpoint of another rank reads the parameter again.
        """
        bound = self.plan_of(parameter)
        if bound is None:
            return
        run, read = self._run_of(bound), bound.read_of[parameter.param_id]
        if run.has_all_of(read):
            if run.has_to_reduce and not bound.plan.on_demand:
                raise _too_late(bound, read, "a second gradient")
            run = self.begin(bound)  # the gradient is from an earlier forward (two forwards, one backward)
        run.leave(read)

    def run_whole(self, bound: BoundPlan) -> None:
        """Launch all collectives of a plan's backward, although this rank's code needs none of them."""
        self.begin(bound)
        self.end_run()

    def end(self) -> list[tuple[ShardedParameter, Tensor]]:
        """Launch the remaining collectives of the running backward's plan.

        Returns the reduced gradients of parameters that have a gradient on other ranks only. A reduced gradient that is
        all zero is left out, because perhaps no rank had a gradient.
        """
        self.end_run()
        found = []
        for parameter, pending in self._without_gradient.pop(backward_id(), []):
            grad = pending.shard(parameter)
            if bool(grad.any()):
                found.append((parameter, grad))
        return found

    def close_failed(self) -> None:
        """Drop the runs of backwards that ended by an exception."""
        self._runs.clear()
        self._without_gradient.clear()

    def _run_of(self, bound: BoundPlan) -> FollowedBackward:
        run = self._runs.get(backward_id())
        return run if run is not None and run.bound is bound else self.begin(bound)

    def begin(self, bound: BoundPlan) -> FollowedBackward:
        """Begin a run of the plan in the running backward."""
        self.end_run()  # the other ranks have ended the run before it, too
        run = self._runs[backward_id()] = FollowedBackward(bound, self._prefetcher, self._launch)
        return run

    def end_run(self) -> None:
        """Launch the rest of the present run's plan, before code with its own collectives or at the end of backward."""
        number = backward_id()
        run = self._runs.pop(number, None)
        if run is not None:
            run.end()
            run.bound.backward_ended()
            self._without_gradient.setdefault(number, []).extend(run.without_gradient)


def _too_late(bound: BoundPlan, read: int, what: str) -> RanksDiffer:
    """The error for a full parameter or gradient (``what``) that comes too late for its place in the plan."""
    name = bound.plan.reads[read].name
    return RanksDiffer(
        f"compiled_fsdp: this rank runs other code than the ranks whose plan it follows, and {what} of {name!r} does "
        "not fit into that plan's order. Let all ranks take the same way through the model, or call "
        "fully_shard(...).set_reduce_scatter_unused_params(True) on the modules that only some ranks use."
    )
