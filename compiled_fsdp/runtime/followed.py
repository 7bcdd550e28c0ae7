"""One run of an agreed plan by code that is not compiled for it: a forward or a backward.

Compiled code of the other ranks launches the plan's collectives in the plan's order. This rank launches them in the
same order, when its code asks. If the code asks for a parameter, its gather is launched after all buckets that come
before it in the plan. A gradient is kept until its whole bucket, and all buckets before that, can be launched.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from compiled_fsdp.buckets.agreed_plan import AgreedBucket, AgreedPlan
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.compat.autograd import keeps_graph
from compiled_fsdp.ranks.agreement import agreement_of
from compiled_fsdp.ranks.statement import Statement
from compiled_fsdp.runtime.in_flight import GatherInFlight, spec_of
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of

LaunchReduction = Callable[[PendingReduceScatter, Sequence[ShardedParameter], Sequence[Tensor], AgreedBucket], None]


class BoundPlan:
    """An agreed plan, bound to the parameters that it is about, because equal layers have equal plans."""

    def __init__(self, plan: AgreedPlan, kind: str, parameters: Sequence[ShardedParameter]) -> None:
        self.plan, self.kind = plan, kind
        # The kind of forward, and the block that it reads first.
        self.beginning = kind, parameters[0].block
        self.agreement = agreement_of(max((p.group for p in parameters), key=lambda group: len(group.ranks)))
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        # The index of each parameter's read, by ``param_id``. A parameter may have two reads, one with a gradient and
        # one without. They share one gather, and the first read represents both.
        self.read_of: dict[int, int] = {}
        first = [self.read_of.setdefault(parameter.param_id, read) for read, parameter in enumerate(parameters)]
        self.buckets = {
            phase: tuple(replace(bucket, reads=tuple(first[read] for read in bucket.reads)) for bucket in buckets)
            for phase, buckets in plan.buckets.items()
        }
        if kind != "inference":  # this plan's code has no backward, but code that follows it may have one
            self.buckets.setdefault("forward", self.buckets.get("inference", ()))
        self.has_collectives = any(self.buckets.values())
        # How the gradient of each trained read is reduced: a ``ReduceSpec`` as text.
        self.spec_of = {first[n]: read.reduce_text for n, read in enumerate(plan.reads) if read.trainable}
        # The state of each parameter that the plan is for (``Unit.line_of``); if it has two reads, for the trained one.
        by_training = sorted(range(len(first)), key=lambda n: plan.reads[n].trainable)
        self.line_of = {first[n]: plan.reads[n].line for n in by_training}
        # How often compiled autograd's graph gathers or reduces each parameter, by ``param_id``.
        self.times = Counter[int]()
        for read, parameter in zip(plan.reads, parameters, strict=True):
            self.times[parameter.param_id] += read.times
        # The reads that need no gather: their parameter is full already, or its shard group has one rank.
        self.without_gather = frozenset(
            read for read in first if plan.reads[read].mode == "full" or parameters[read].world == 1
        )
        # The reads that code asked for in the last forward, and how many gradients its backward brings for each (fewer
        # if the loss does not need some).
        self.asked: set[int] = set()
        self.expected: Counter[int] = Counter()
        # The full parameters, by read, that a checkpoint reads again in backward but the plan does not gather there.
        # They stay until the backwards of all forwards that follow the plan have ended, or until an optimizer's step.
        self.kept: dict[int, Tensor] = {}
        self._forwards = 0
        self.is_recomputed_only = False  # whether only backwards that run a part of a forward again had this plan
        # For each of the last two forwards with this plan: the plans that the forward began, in order.
        self.forwards: tuple[list[BoundPlan], list[BoundPlan]] = [], []

    @property
    def is_alive(self) -> bool:
        """Whether all parameters still exist."""
        return all(reference() is not None for reference in self._parameters)

    def holds(self, params: set[int]) -> bool:
        """Whether the plan has one of the DTensors with these ids."""
        return any((parameter := ref()) is not None and id(parameter.param) in params for ref in self._parameters)

    def parameter(self, read: int) -> ShardedParameter:
        """The parameter of a read. Its model must be alive."""
        parameter = self._parameters[read]()
        assert parameter is not None
        return parameter

    def parameters(self, reads: Sequence[int]) -> list[ShardedParameter]:
        """The parameters of several reads."""
        return [self.parameter(read) for read in reads]

    def is_for_now(self) -> bool:
        """Whether all parameters are in the state that the plan was made for."""
        trains = self.kind == "training"
        now = ((read, self.parameter(read)) for read in self.read_of.values())
        return all(
            unit_of(parameter).line_of(parameter, trains=trains) == self.line_of[read] for read, parameter in now
        )

    def begins(self) -> None:
        """Count a forward with the plan's collectives in the journal, because it begins.

        A forward without collectives does not count, because one rank alone may run it. For example, rank 0 evaluates
        the model after ``unshard()``.
        """
        if self.has_collectives:
            self.agreement.journal.begin(self)

    def is_part_of(self, other: BoundPlan) -> bool:
        """Whether the other plan begins with the same block and has all parameters of this one, in the same state."""
        return self.beginning == other.beginning and self.read_of.keys() <= other.read_of.keys() and self.like(other)

    def calls(self, parameter: ShardedParameter) -> int:
        """How often the plan's code gathers or reduces a parameter; 1 if it needs no gather."""
        return max(self.times[parameter.param_id], 1)

    def forward_begins(self) -> None:
        """Note that a forward begins to follow the plan."""
        self.asked.clear()
        self.expected.clear()
        self._forwards += 1

    def backward_ended(self) -> None:
        """Note that a backward of one of the forwards has ended."""
        if keeps_graph():
            return
        self._forwards = max(self._forwards - 1, 0)
        if self._forwards == 0:
            self.kept.clear()

    def forget_kept(self) -> None:
        """Drop the kept full parameters, because the parameters are about to be written."""
        self.kept.clear()
        self._forwards = 0

    def like(self, other: BoundPlan) -> bool:
        """Whether both plans hold, train and reduce the parameters that both read in the same way."""
        shared = [(read, other.read_of[p]) for p, read in self.read_of.items() if p in other.read_of]
        return all(self.line_of[mine] == other.line_of[its] for mine, its in shared)

    def gathered(self, phase: str) -> frozenset[int]:
        """The reads that the plan gathers in a phase."""
        return frozenset(read for b in self.buckets.get(phase, ()) if b.kind.supplies for read in b.reads)

    @property
    def only_gathers_in_backward(self) -> bool:
        """Whether the plan's backward has gathers but no reductions, because no parameter is trained."""
        buckets = self.buckets.get("backward", ())
        return bool(buckets) and all(bucket.kind.supplies for bucket in buckets)

    def statement(self, what: Literal["runs", "ran"] = "ran") -> Statement:
        """This rank's statement about a forward with the plan, which begins ("runs") or has run."""
        parameters = [reference() for reference in self._parameters]
        names = tuple(read.name if p is None else p.name for read, p in zip(self.plan.reads, parameters, strict=True))
        reads = tuple(replace(read, name=name) for read, name in zip(self.plan.reads, names, strict=True))
        on_demand = self.plan.on_demand
        return Statement(
            what=what,
            options="" if on_demand else self.plan.signature[0],
            kind=self.kind,
            names=names,
            lines=tuple("" if on_demand else read.line for read in reads),
            rest=names,
            plan=None if on_demand else replace(self.plan, reads=reads),
        )

    def fits(self, parameter: ShardedParameter, line: str) -> bool:
        """Whether the plan has the parameter and was made for its present state, ``line`` (``Unit.line_of``)."""
        read = self.read_of.get(parameter.param_id)
        return read is not None and self.line_of[read] == line


class _Run:
    """A run's buckets in the plan's order, and its gathers: in flight, or held until their parameters' last use."""

    def __init__(self, bound: BoundPlan, phase: str, prefetcher: AllGatherPrefetcher) -> None:
        self.bound, self._buckets, self._prefetcher = bound, bound.buckets.get(phase, ()), prefetcher
        gathers = [(number, bucket) for number, bucket in enumerate(self._buckets) if bucket.kind.supplies]
        # For each read: the number of the bucket that gathers it, and its uses (``AgreedBucket.uses``).
        self._gather_of = {read: number for number, bucket in gathers for read in bucket.reads}
        self._uses = {r: use for _, bucket in gathers for r, use in zip(bucket.reads, bucket.uses, strict=True)}
        self._launched: set[int] = set()
        self._in_flight: dict[int, GatherInFlight] = {}
        self._fulls: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def _has(self, read: int) -> bool:
        """Whether the run can still give the full parameter of a read that it gathers."""
        number = self._gather_of[read]
        return number not in self._launched or read in self._fulls or number in self._in_flight

    def _take(self, read: int) -> Tensor:
        """Return the full parameter of a launched gather, and drop those whose last use comes before this read."""
        if read not in self._fulls:
            number = self._gather_of[read]
            with torch.no_grad(), torch.inference_mode(False):
                fulls = self._in_flight.pop(number).fulls()
            self._fulls.update(zip(self._buckets[number].reads, fulls, strict=True))
        self._taken.add(read)
        order, _ = self._uses[read]
        for other in [r for r in self._fulls if r in self._taken and self._uses[r][1] <= order and r != read]:
            del self._fulls[other]
        return self._fulls[read]

    def _launch_through(self, number: int) -> None:
        for each in range(min(number + 1, len(self._buckets))):
            self._launch_one(each)

    def _launch_one(self, number: int) -> None:
        if number not in self._launched:
            self._launched.add(number)
            self._launch_bucket(number, self._buckets[number])

    def _launch_bucket(self, number: int, bucket: AgreedBucket) -> None:
        parameters, recheck = self.bound.parameters(bucket.reads), self.bound.plan.recheck
        with torch.no_grad(), torch.inference_mode(False):
            spec = spec_of(parameters, bucket.form, bucket.transport)
            spec = replace(spec, copier=bucket.copier, edge=bucket.edge, recheck=recheck)
            shards, launch = [parameter.shard for parameter in parameters], self._prefetcher.get_or_launch
            launched = None if spec.edge is None else launch(parameters, shards, spec)
            self._in_flight[number] = GatherInFlight(parameters, spec, launched)

    def end(self) -> None:
        """End the run: wait for the gathers that no code has asked for, and drop all full parameters."""
        for launched in self._in_flight.values():
            launched.wait()
        self._in_flight.clear()
        self._fulls.clear()


class FollowedForward(_Run):
    """A forward that takes part in a plan's collectives, but in the last ones only if code asks for their parameters.

    Attributes:
        code_ran: whether this rank ran compiled code for the same parameters just before, in the same forward. Then
            such code may run again. For example, a method calls its compiled model twice and reads a weight in between.
    """

    def __init__(self, bound: BoundPlan, phase: str, prefetcher: AllGatherPrefetcher, *, code_ran: bool) -> None:
        super().__init__(bound, phase, prefetcher)
        self.code_ran, self._forwards_over = code_ran, prefetcher.forwards_over
        bound.forward_begins()

    @property
    def is_over(self) -> bool:
        """Whether the prefetcher has seen the forward end, so that its full parameters may be stale."""
        return self._prefetcher.forwards_over > self._forwards_over

    def serves(self, param_id: int) -> bool:
        """Whether the run can still give the full parameter."""
        read = self.bound.read_of.get(param_id)
        return self._has(read) if read in self._gather_of else read in self.bound.without_gather

    @property
    def all_asked(self) -> bool:
        """Whether code has asked for every gathered parameter."""
        return self._gather_of.keys() <= self.bound.asked

    def is_all_read_by(self, param_ids: Container[int]) -> bool:
        """Whether code has asked for all, and code with ``param_ids`` reads all again: a layer is called twice."""
        return self.all_asked and all(param_id in param_ids for param_id in self.bound.read_of)

    def full(self, read: int) -> Tensor:
        """The full parameter of a read. Also launches the next bucket, to be in flight while this one is used."""
        self.bound.asked.add(read)
        self._launch_through(self._gather_of[read] + 1)
        return self._take(read)

    def complete(self, reads: Sequence[int]) -> None:
        """Launch all gathers up to those of ``reads``, because the code that reads them has ended, used or not."""
        self.bound.asked.update(reads)
        self._launch_through(max((self._gather_of[read] for read in reads if read in self._gather_of), default=-1))


class FollowedBackward(_Run):
    """A backward that takes part in the collectives of an agreed plan.

    It calls ``launch`` with each bucket of reductions when the bucket's turn comes.
    """

    def __init__(self, bound: BoundPlan, prefetcher: AllGatherPrefetcher, launch: LaunchReduction) -> None:
        super().__init__(bound, "backward", prefetcher)
        self._launch = launch
        self._reduction_of = {r: n for n, b in enumerate(self._buckets) if not b.kind.supplies for r in b.reads}
        # No rank launches a backward bucket if no code asked for its parameters in forward. But compiled autograd's
        # graph launches all: this rank's graph may lack parameters that only other ranks gather (for a checkpoint).
        asked = bound.asked if bound.kind != "backward" else set(bound.read_of.values())
        self._launched = {n for n, b in enumerate(self._buckets) if asked.isdisjoint(b.reads)}
        self._grads: dict[int, Tensor] = {}
        self._arrived: Counter[int] = Counter()
        self._pending: dict[int, PendingReduceScatter] = {}
        # The parameters that have no gradient on this rank, but perhaps on others, each with its bucket.
        self.without_gradient: list[tuple[ShardedParameter, PendingReduceScatter]] = []

    @property
    def is_done(self) -> bool:
        """Whether all collectives are launched."""
        return len(self._launched) == len(self._buckets)

    @property
    def has_to_reduce(self) -> bool:
        """Whether reductions are still to be launched."""
        return not self._launched.issuperset(self._reduction_of.values())

    # ---- gathers -----------------------------------------------------------------------------------------------------
    def serves(self, read: int) -> bool:
        """Whether the run can still give the read's full parameter."""
        return read in self._gather_of and self._has(read)

    def full(self, read: int) -> Tensor:
        """The full parameter of a read, gathered again."""
        self._launch_in_turn(self._gather_of[read])
        return self._take(read)

    # ---- reductions --------------------------------------------------------------------------------------------------
    def takes(self, read: int) -> bool:
        """Whether a gradient of the read can still join its bucket."""
        return self._reduction_of.get(read) not in (None, *self._launched)

    def reduce(self, read: int, grad: Tensor, spec: ReduceSpec) -> PendingReduceScatter | None:
        """Add a full gradient to its bucket. Returns the bucket if this is the read's first gradient."""
        number = self._reduction_of[read]
        self._note_gradient(read)
        first = read not in self._grads
        self._grads[read] = grad if first else self._grads[read] + grad
        pending = self._pending.setdefault(number, PendingReduceScatter(spec))
        self._launch_what_is_ready()
        return pending if first else None

    def leave(self, read: int) -> None:
        """Note that a gradient of the read has come which this backward does not reduce."""
        self._note_gradient(read)
        self._launch_what_is_ready()

    def _note_gradient(self, read: int) -> None:
        if self.bound.plan.on_demand and (gather := self._gather_of.get(read)) is not None:
            self._launch_one(gather)  # as ranks without a plan do, because perhaps only some ranks' backwards need it
        self._arrived[read] += 1

    def has_all_of(self, read: int) -> bool:
        """Whether all gradients of the read have come."""
        return self._arrived[read] >= max(self.bound.expected[read], 1)

    def _is_complete(self, number: int) -> bool:
        return all(self.has_all_of(read) for read in self._buckets[number].reads if read in self.bound.asked)

    def _launch_what_is_ready(self) -> None:
        for number in [n for n, b in enumerate(self._buckets) if not b.kind.supplies and n not in self._launched]:
            if self._is_complete(number):
                self._launch_in_turn(number)
            elif not self.bound.plan.on_demand:
                break
        trained = self.bound.asked & self.bound.spec_of.keys()
        if not self.bound.plan.on_demand and all(map(self.has_all_of, trained)):
            # The gathers that this rank does not need: the next collective may be one of uncompiled code.
            self._launch_through(len(self._buckets))

    # ---- launches ----------------------------------------------------------------------------------------------------
    def _launch_in_turn(self, number: int) -> None:
        """Launch a bucket after all buckets before it in the plan; with ``on_demand`` launch it alone."""
        if self.bound.plan.on_demand:
            self._launch_one(number)
        else:
            self._launch_through(number)

    def _launch_bucket(self, number: int, bucket: AgreedBucket) -> None:
        for pending in self._pending.values():  # other code may wait for its replicas before its next collective
            pending.advance()
        if bucket.kind.supplies:
            super()._launch_bucket(number, bucket)
            return
        # Zeros replace gradients that did not come; with ``on_demand`` their parameters are left out.
        if not (reads := [r for r in bucket.reads if r in self._grads or not self.bound.plan.on_demand]):
            return
        spec, grads = ReduceSpec.parse(self.bound.spec_of[bucket.reads[0]]), []
        pending = self._pending.setdefault(number, PendingReduceScatter(spec))
        for read in reads:
            parameter, grad = self.bound.parameter(read), self._grads.get(read)
            if grad is None:
                dtype = getattr(torch, ReduceSpec.parse(self.bound.spec_of[read]).dtype)
                grad = torch.zeros(parameter.read_spec.size, dtype=dtype, device=parameter.device)
                self.without_gradient.append((parameter, pending))
            grads.append(grad)
        self._launch(pending, self.bound.parameters(reads), grads, bucket)

    def end(self) -> None:
        """Launch the remaining reductions, and without ``on_demand`` also the gathers that no code has asked for."""
        for number, bucket in enumerate(self._buckets):
            if not (bucket.kind.supplies and self.bound.plan.on_demand):
                self._launch_one(number)
        super().end()
