"""Code that follows an agreed plan without being compiled for it: which plan, and when a run of it begins and ends.

A rank's code may differ from the other ranks' code for the same parameters: it has a graph break that they do not have,
it checkpoints a layer, or a part of it runs uncompiled. The other ranks then run code that was compiled for an agreed
plan. This rank takes part in the same collectives in the same order: its code asks here for full parameters, and hands
in full gradients (``runtime/followed.py``).

All ranks know the same plans, and the first parameter that a forward asks for decides which plan is followed. So ranks
exchange nothing about plans while they run.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

from torch import Tensor

from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.compat.autograd import backward_id, in_checkpoint
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.ranks.agreement import Agreement, agreement_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.statement import Outcome
from compiled_fsdp.runtime.followed import BoundPlan, FollowedForward, LaunchReduction
from compiled_fsdp.runtime.followed_backwards import FollowedBackwards
from compiled_fsdp.runtime.known_plans import KnownPlans, parameters_named, plan_of_block, statement_of_block
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit

_Block = tuple[str, Hashable]


class PlanFollower:
    """The agreed plans that this rank knows, and the runs of them by code that is not compiled for them."""

    def __init__(self, prefetcher: AllGatherPrefetcher, launch: LaunchReduction) -> None:
        self._prefetcher = prefetcher
        self.known = KnownPlans()
        self._forward: FollowedForward | None = None
        # The blocks that ranks have met about before uncompiled code read them, and the journal's entries for blocks
        # that uncompiled code gathers. A block is given by kind ("training" or "inference") and ``bucket_key``.
        self._met: weakref.WeakKeyDictionary[Unit, set[_Block]] = weakref.WeakKeyDictionary()
        self._noted: weakref.WeakKeyDictionary[Unit, dict[_Block, BoundPlan]] = weakref.WeakKeyDictionary()
        # The plan that the last meeting decided on, if this rank follows.
        self.plan_of_meeting: BoundPlan | None = None
        # The parameters of the compiled code that ran last, and the plans that its forward had begun.
        self._ran: tuple[Container[int], list[BoundPlan]] = (), []
        self.backwards = FollowedBackwards(prefetcher, launch)

    @property
    def is_active(self) -> bool:
        """Whether a forward that follows a plan has begun and not ended."""
        return self._forward is not None

    # ---- forwards ----------------------------------------------------------------------------------------------------
    def full(self, parameter: ShardedParameter, kind: str, *, meets: bool) -> Tensor | None:
        """The full parameter, in a forward or a backward, for code that has no collectives of its own.

        None if no plan is followed. Then the caller gathers the parameter's whole block.

        Args:
            meets: whether all ranks meet before a whole block is gathered for the first time.
        """
        if backward_id() != -1:
            return self.backwards.full(parameter)
        run = self._run_for(parameter, kind, meets=meets)
        if run is None:
            return None
        read = run.bound.read_of[parameter.param_id]
        full = run.full(read)
        self._keep_for_checkpoint(run, read, full, kind)
        return full

    def note_full(self, parameter: ShardedParameter, kind: str, *, meets: bool, full: Tensor | None = None) -> None:
        """Note that code without its own collectives reads a parameter that needs no gather.

        ``full``: the full parameter, to be kept if a checkpoint reads it; None: its shard group has one rank.
        """
        if backward_id() == -1 and (run := self._run_for(parameter, kind, meets=meets)) is not None:
            read = run.bound.read_of[parameter.param_id]
            run.bound.asked.add(read)
            if full is not None:
                self._keep_for_checkpoint(run, read, full, kind)

    def _keep_for_checkpoint(self, run: FollowedForward, read: int, full: Tensor, kind: str) -> None:
        """Keep a full parameter that a checkpoint reads again in backward, if other ranks do not gather it there."""
        if kind == "training" and in_checkpoint() and read not in run.bound.gathered("backward"):
            self.backwards.keep(run.bound, read, full)

    def _run_for(self, parameter: ShardedParameter, kind: str, *, meets: bool) -> FollowedForward | None:
        """The run of a plan that the parameter is read in, a new one if needed; None if no plan is followed."""
        if fake_mode_is_active():  # nothing is gathered, and the other ranks may not run this code
            return None
        self._end_finished_forward()
        run = self._forward
        if run is None or not run.serves(parameter.param_id):
            self.end_forward()
            line = unit_of(parameter).line_of(parameter, trains=kind == "training")
            bound = self.known.that_begins_with(parameter, kind, line)
            if bound is None and meets:
                bound = self._ask(parameter, kind)
            if bound is None:
                self.backwards.followed.pop(parameter, None)
                return None
            phase = "forward" if kind == "training" else "inference"
            ran, begun = self._ran
            code_ran = begun is self.known.begun() and parameter.param_id in ran
            run = self._forward = FollowedForward(bound, phase, self._prefetcher, code_ran=code_ran)
            self.known.begins(bound)
        if kind == "training":
            self.backwards.followed[parameter] = run.bound
        return run

    def full_by_block(self, parameter: ShardedParameter, kind: str) -> Tensor:
        """The full parameter for compiled code. If there is no plan, the code follows one for the parameter's block."""
        full = self.full(parameter, kind, meets=True)
        if full is None:
            bound = self._learn_block(parameter, kind)
            if backward_id() != -1:  # a reentrant checkpoint runs code again that followed no plan in forward
                self.backwards.follow(bound)
            full = self.full(parameter, kind, meets=False)
            assert full is not None
        return full

    def note_full_by_block(self, first: ShardedParameter, full: Sequence[ShardedParameter], kind: str) -> None:
        """Do the same as ``note_full`` for compiled code, whose gradients need a plan.

        Args:
            first: the parameter that the code reads first, which decides on the plan.
            full: the parameters that the code reads and that need no gather.
        """
        if backward_id() == -1:
            self._run_for(first, kind, meets=True)
        for parameter in full:
            self.note_full(parameter, kind, meets=True)
            if kind == "training" and backward_id() == -1 and parameter not in self.backwards.followed:
                self._learn_block(parameter, kind)
                self.note_full(parameter, kind, meets=False)

    def _learn_block(self, parameter: ShardedParameter, kind: str) -> BoundPlan:
        members = unit_of(parameter).params_by_bucket()[parameter.bucket_key]
        return self.known.learn(plan_of_block(members, kind), kind, members)

    def bind(self, outcome: Outcome, near: Sequence[ShardedParameter], kind: str, agreement: Agreement) -> BoundPlan:
        """Learn and return the plan that all ranks follow after a meeting.

        Args:
            near: parameters of the models that the plan is about.
            agreement: that of the ranks which have met. If another rank compiles, the caller must end its last round.
        """
        statement = outcome.statement
        assert statement is not None
        parameters = parameters_named(statement.names, near)
        plan = statement.plan
        if not statement.has_code and outcome.leader is not None:
            plan = agreement.follow_rounds()
        self.plan_of_meeting = self.known.learn(plan or plan_of_block(parameters, kind), kind, parameters)
        return self.plan_of_meeting

    def learn_shared(self, plan: AgreedPlan, kind: str, parameters: Sequence[ShardedParameter]) -> BoundPlan:
        """Learn the plan of code that was compiled for other layers, and is about to run for these parameters.

        If this rank has code with several plans for such layers, ranks may take different ones. So they meet before.

        Raises:
            RanksDiffer: another rank runs other code.
        """
        new = BoundPlan(plan, kind, parameters)
        if backward_id() == -1 and new.has_collectives and self.known.has_others_like(new):
            agreement = new.agreement
            agreement.meet(new.statement("runs"))
            agreement.end_region()
        return self.known.learn(plan, kind, parameters)

    def _ask(self, parameter: ShardedParameter, kind: str) -> BoundPlan | None:
        """Meet the other ranks before uncompiled code reads a block for the first time.

        Returns the plan to follow; None if all ranks read the block in uncompiled code.
        """
        members = unit_of(parameter).params_by_bucket()[parameter.bucket_key]
        met, block = self._met.setdefault(unit_of(parameter), set()), (kind, parameter.bucket_key)
        agreement = agreement_of(parameter.group)
        is_local = unit_of(parameter).model_communicates_nothing(trains=kind == "training")
        if block in met or agreement.liveness.alone or is_local:
            return None
        outcome = agreement.meet(statement_of_block(members, kind))
        if outcome is None:
            met.add(block)
            agreement.end_region()
            return None
        bound = self.bind(outcome, members, kind, agreement)
        agreement.end_last_round()
        return bound

    def note_block(self, members: Sequence[ShardedParameter], kind: str) -> None:
        """Note in the journal that a forward gathers a whole block in uncompiled code, because other ranks may ask."""
        if fake_mode_is_active():
            return
        notes, block = self._noted.setdefault(unit_of(members[0]), {}), (kind, members[0].bucket_key)
        if block not in notes:
            notes[block] = BoundPlan(plan_of_block(members, kind), kind, members)
        notes[block].agreement.journal.begin(notes[block])

    def expect_gradient(self, parameter: ShardedParameter, count: int = 1) -> None:
        """Expect ``count`` more gradients of the parameter in the backward of this forward."""
        is_read_again = backward_id() != -1 and in_checkpoint()  # its gradient is expected since the first read
        if fake_mode_is_active() or is_read_again:
            return
        if self._forward is not None and (read := self._forward.bound.read_of.get(parameter.param_id)) is not None:
            self._forward.bound.expected[read] += count

    def complete(self, parameters: Iterable[ShardedParameter]) -> None:
        """Launch the gathers of these parameters, because code that reads them has ended its forward, used or not."""
        if (run := self._forward) is not None:
            known = run.bound.read_of
            run.complete([known[parameter.param_id] for parameter in parameters if parameter.param_id in known])

    # ---- compiled code begins and ends -------------------------------------------------------------------------------
    def other_code_begins(self, bound: BoundPlan) -> None:
        """Note that code begins which has its own collectives, compiled for ``bound``.

        Raises:
            RanksDiffer: the running forward follows another plan, which can still give some of the same parameters.
        """
        if backward_id() != -1:  # a part of a forward is run again
            return
        if self._forward is not None:
            self._end_finished_forward()
            run = self._forward
            is_over = run is None or run.code_ran or run.is_all_read_by(bound.read_of)
            if run is not None and not is_over and any(run.serves(param_id) for param_id in bound.read_of):
                raise RanksDiffer(
                    f"compiled_fsdp: code that was compiled for {bound.plan.names[0]!r} by itself runs in a forward in "
                    "which this rank takes part in the collectives of other ranks' code for the whole model. Let all "
                    "ranks take the same way through the model, or compile the model as a whole only."
                )
            self.end_forward()
        self.known.begins(bound)
        self._ran = bound.read_of.keys(), self.known.begun()

    def graph_begins(self, bound: BoundPlan, gradients: Mapping[ShardedParameter, int]) -> None:
        """Begin a plan's run by a graph of compiled autograd.

        Args:
            gradients: how many gradients the graph brings, for each parameter that it reads or reduces.
        """
        bound.begins()
        bound.forward_begins()
        for parameter, count in gradients.items():
            if (read := bound.read_of.get(parameter.param_id)) is not None:
                bound.asked.add(read)
                bound.expected[read] += count
                self.backwards.followed[parameter] = bound
        self.backwards.begin(bound)

    def graph_ends(self, parameters: Iterable[ShardedParameter]) -> None:
        """Note that compiled autograd's graph has ended, so that its parameters follow no plan."""
        for parameter in parameters:
            self.backwards.followed.pop(parameter, None)

    def code_begins(self, parameters: Sequence[ShardedParameter], *, is_broken: bool) -> None:
        """Note that compiled code begins which reads these parameters and follows the plan that they have.

        The running forward ends if its plan is read to the end and this code begins a plan again.

        ``is_broken``: whether a graph break begins or ends the code, so that other ranks' code may go on after it.
        """
        if backward_id() != -1:  # a part of a forward is run again
            return
        self._end_finished_forward()
        run = self._forward
        if run is None or not run.all_asked:
            return
        read = {parameter.param_id for parameter in parameters}
        is_called_again = run.is_all_read_by(read) and not is_broken
        if run.bound.read_of.keys().isdisjoint(read) or is_called_again or unit_of(parameters[0]).root.depth == 0:
            self.end_forward()

    def code_ends(self, parameters: Sequence[ShardedParameter], gradients: Mapping[int, int]) -> BoundPlan | None:
        """Note that the code of ``code_begins`` has ended its forward.

        All ranks gather its parameters, whether this rank needed all of them or not.

        Args:
            gradients: how many gradients its backward brings, by the index in ``parameters``.

        Returns: the followed plan if its backward only gathers, because then no gradient makes this rank take part;
        else None.
        """
        if backward_id() != -1:
            return None
        for place, parameter in enumerate(parameters):
            self.expect_gradient(parameter, gradients.get(place, 0))
        self.complete(parameters)
        bound = self.backwards.plan_of(parameters[0])
        return bound if bound is not None and bound.only_gathers_in_backward else None

    def plan_for(
        self, lines: Mapping[ShardedParameter, str], times: Mapping[ShardedParameter, int], kind: str
    ) -> BoundPlan | None:
        """The plan that code with these parameters would follow if it came next; None if there is none.

        Args:
            lines: each parameter's state then (``Unit.line_of``), in the order of the reads.
            times: how often compiled autograd's graph gathers or reduces each parameter; not used for a forward.
            kind: of the forward, or "backward" for compiled autograd's graph.
        """
        if kind == "backward":
            return self.known.for_backward(lines, times)
        self._end_finished_forward()
        if (run := self._forward) is not None and all(run.serves(parameter.param_id) for parameter in lines):
            return run.bound
        first = next(iter(lines))
        bound = self.known.that_begins_with(first, kind, lines[first])
        fits = bound is not None and all(bound.fits(parameter, line) for parameter, line in lines.items())
        return bound if fits else None

    def serves(self, parameter: ShardedParameter) -> bool:
        """Whether the running forward can still give the full parameter."""
        return self._forward is not None and self._forward.serves(parameter.param_id)

    def end_forward_without(self, parameters: Sequence[ShardedParameter]) -> None:
        """End the running forward unless it can still give one of these parameters."""
        self._end_finished_forward()
        if not any(map(self.serves, parameters)):
            self.end_forward()

    def end_forward(self) -> None:
        """End the running forward, because no code will ask for more of its parameters."""
        run, self._forward = self._forward, None
        if run is not None:
            run.end()

    def drop(self, params: Iterable[Tensor]) -> None:
        """End the running forward if its plan has one of these DTensors, because they are about to be written."""
        if self._forward is not None and self._forward.bound.holds({id(param) for param in params}):
            self.end_forward()

    def _end_finished_forward(self) -> None:
        ended = self._prefetcher.forward_ended
        if ended and backward_id() == -1:  # in a backward, the gathers in flight were launched for that backward
            self._prefetcher.close()
        # the end of a backward may have closed the prefetcher meanwhile
        if ended or (self._forward is not None and self._forward.is_over):
            self.end_forward()
