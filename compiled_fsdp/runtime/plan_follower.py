"""Which agreed plan code follows that is not compiled for it, and when a run of the plan begins and ends.

A rank's code may differ from the other ranks' code for the same parameters: it has a graph break that they do not have,
it checkpoints a layer, or a part of it runs uncompiled. The other ranks then run code that was compiled for an agreed
plan. This rank takes part in the same collectives in the same order: its code asks here for full parameters, and hands
in full gradients (``runtime/followed.py``).

All ranks know the same plans, and what is asked for first in a forward decides which plan is followed. So nothing is
exchanged between ranks while they run.
"""

# Why: docs/design.md, note N78

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

from torch import Tensor

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
    """The agreed plans that this rank knows, and the runs of them that other code takes part in."""

    def __init__(self, prefetcher: AllGatherPrefetcher, launch: LaunchReduction) -> None:
        self._prefetcher = prefetcher
        self.known = KnownPlans()
        self._forward: FollowedForward | None = None
        # The blocks before whose first read in uncompiled code all ranks have met, and what is told of those that were
        # gathered there. By kind ("training" or "inference") and block.
        self._met: weakref.WeakKeyDictionary[Unit, set[_Block]] = weakref.WeakKeyDictionary()
        self._noted: weakref.WeakKeyDictionary[Unit, dict[_Block, BoundPlan]] = weakref.WeakKeyDictionary()
        # What the last meeting came to, on a rank that follows.
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

        None where no plan is followed, and the parameter's block is to be gathered as a whole.

        Args:
            meets: before a block is gathered as a whole for the first time, all ranks say what they do.
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
        """Code without its own collectives reads a parameter that needs no gather: ``full``, or whole on each rank."""
        if backward_id() == -1 and (run := self._run_for(parameter, kind, meets=meets)) is not None:
            read = run.bound.read_of[parameter.param_id]
            run.bound.asked.add(read)
            if full is not None:
                self._keep_for_checkpoint(run, read, full, kind)

    def _keep_for_checkpoint(self, run: FollowedForward, read: int, full: Tensor, kind: str) -> None:
        """Keep what a checkpoint reads again in backward, where the other ranks do not gather it."""
        if kind == "training" and in_checkpoint() and read not in run.bound.gathered("backward"):
            self.backwards.keep(run.bound, read, full)

    def _run_for(self, parameter: ShardedParameter, kind: str, *, meets: bool) -> FollowedForward | None:
        """The run that the parameter is read in, a new one if need be; None where no plan is followed."""
        if fake_mode_is_active():  # nothing is gathered, and the other ranks may not be here
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
        """The same for compiled code, for which no one else gathers a block."""
        full = self.full(parameter, kind, meets=True)
        if full is None:
            self._learn_block(parameter, kind)
            full = self.full(parameter, kind, meets=False)
            assert full is not None
        return full

    def note_full_by_block(self, first: ShardedParameter, full: Sequence[ShardedParameter], kind: str) -> None:
        """``note_full`` for compiled code, whose gradients need a plan.

        Args:
            first: what the code reads first, which tells the plan.
            full: what it reads that needs no gather.
        """
        if backward_id() == -1:
            self._run_for(first, kind, meets=True)
        for parameter in full:
            self.note_full(parameter, kind, meets=True)
            if kind == "training" and backward_id() == -1 and parameter not in self.backwards.followed:
                self._learn_block(parameter, kind)
                self.note_full(parameter, kind, meets=False)

    def _learn_block(self, parameter: ShardedParameter, kind: str) -> None:
        members = unit_of(parameter).params_by_bucket()[parameter.bucket_key]
        self.known.learn(plan_of_block(members, kind), kind, members)

    def bind(self, outcome: Outcome, near: Sequence[ShardedParameter], kind: str, agreement: Agreement) -> BoundPlan:
        """The plan that all follow after a meeting.

        Args:
            near: parameters of the models that the plan is about.
            agreement: among the ranks that have met. If another rank compiles, its last round is still to be ended.
        """
        statement = outcome.statement
        assert statement is not None
        parameters = parameters_named(statement.names, near)
        if statement.what == "ran":
            plan = statement.plan
        else:
            plan = None if outcome.leader is None else agreement.follow_rounds()
        self.plan_of_meeting = self.known.learn(plan or plan_of_block(parameters, kind), kind, parameters)
        return self.plan_of_meeting

    def _ask(self, parameter: ShardedParameter, kind: str) -> BoundPlan | None:
        """Meet the other ranks before a block is read in uncompiled code for the first time.

        Returns the plan to follow; None if all read the block in this way.
        """
        members = unit_of(parameter).params_by_bucket()[parameter.bucket_key]
        met, block = self._met.setdefault(unit_of(parameter), set()), (kind, parameter.bucket_key)
        agreement = agreement_of(parameter.group)
        needs_no_gather = kind == "inference" and unit_of(parameter).model_needs_no_gather
        if block in met or agreement.liveness.alone or needs_no_gather:
            return None
        outcome = agreement.meet(statement_of_block(members, kind))
        if outcome is None:
            met.add(block)
            return None
        bound = self.bind(outcome, members, kind, agreement)
        agreement.end_last_round()
        return bound

    def note_block(self, members: Sequence[ShardedParameter], kind: str) -> None:
        """A block is gathered as a whole in uncompiled code, in a forward; other ranks may ask what was done."""
        if fake_mode_is_active():
            return
        notes, block = self._noted.setdefault(unit_of(members[0]), {}), (kind, members[0].bucket_key)
        if block not in notes:
            notes[block] = BoundPlan(plan_of_block(members, kind), kind, members)
        notes[block].journal.begin(notes[block])

    def expect_gradient(self, parameter: ShardedParameter, count: int = 1) -> None:
        """The backward of this forward brings so many gradients more of the parameter."""
        is_read_again = backward_id() != -1 and in_checkpoint()  # with the gradient of before
        if fake_mode_is_active() or is_read_again:
            return
        if self._forward is not None and (read := self._forward.bound.read_of.get(parameter.param_id)) is not None:
            self._forward.bound.expected[read] += count

    def complete(self, parameters: Iterable[ShardedParameter]) -> None:
        """Code that reads these parameters has ended its forward, whether it needed all of them or not."""
        if (run := self._forward) is not None:
            known = run.bound.read_of
            run.complete([known[parameter.param_id] for parameter in parameters if parameter.param_id in known])

    # ---- what code begins and ends -----------------------------------------------------------------------------------
    def other_code_begins(self, bound: BoundPlan) -> None:
        """Code begins that has its own collectives, compiled for ``bound``."""
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
        """Compiled autograd's graph begins, which follows a plan.

        Args:
            gradients: how many it brings of each parameter that it reads or reduces.
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
        """Such a graph has ended."""
        for parameter in parameters:
            self.backwards.followed.pop(parameter, None)

    def code_begins(self, parameters: Sequence[ShardedParameter], *, is_broken: bool) -> None:
        """Compiled code begins that reads these parameters and follows whatever plan they have.

        ``is_broken``: whether a graph break begins or ends it, so that other ranks' code may go on behind it.
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
        """Such code has ended its forward.

        All ranks gather what it reads, whether this rank needed all of it or not.

        Args:
            gradients: how many its backward brings, by the place among ``parameters``.

        Returns: the plan that it followed, if nothing else would take part in its backward: no gradient comes.
        """
        if backward_id() != -1:
            return None
        for place, parameter in enumerate(parameters):
            self.expect_gradient(parameter, gradients.get(place, 0))
        self.complete(parameters)
        bound = self.backwards.plan_of(parameters[0])
        return bound if bound is not None and bound.only_gathers_in_backward else None

    def plan_for(self, lines: Mapping[ShardedParameter, str], kind: str) -> BoundPlan | None:
        """The plan that a forward would follow which reads these parameters next, or compiled autograd's graph
        ("backward") that has them; None if there is none.

        ``lines``: what each of them is then (``Unit.line_of``), in the order of the reads.
        """
        if kind == "backward":
            return self.known.for_backward(lines)
        self._end_finished_forward()
        if (run := self._forward) is not None and all(run.serves(parameter.param_id) for parameter in lines):
            return run.bound
        first = next(iter(lines))
        bound = self.known.that_begins_with(first, kind, lines[first])
        fits = bound is not None and all(bound.fits(parameter, line) for parameter, line in lines.items())
        return bound if fits else None

    def serves(self, parameter: ShardedParameter) -> bool:
        """Whether the running forward has a gather of the parameter that is still to be used."""
        return self._forward is not None and self._forward.serves(parameter.param_id)

    def end_forward_without(self, parameters: Sequence[ShardedParameter]) -> None:
        """End the running forward unless it has one of these parameters to give."""
        self._end_finished_forward()
        if not any(map(self.serves, parameters)):
            self.end_forward()

    def end_forward(self) -> None:
        """No code will ask for more of the running forward."""
        run, self._forward = self._forward, None
        if run is not None:
            run.end()

    def drop(self, params: Iterable[Tensor]) -> None:
        """End the running forward if its plan has one of these DTensor parameters: they are about to be written."""
        if self._forward is not None and self._forward.bound.holds({id(param) for param in params}):
            self.end_forward()

    def _end_finished_forward(self) -> None:
        ended = self._prefetcher.forward_ended
        if ended and backward_id() == -1:  # what is in flight in a backward was launched for it
            self._prefetcher.close()
        # the end of a backward may have closed the prefetcher meanwhile
        if ended or (self._forward is not None and self._forward.is_over):
            self.end_forward()
