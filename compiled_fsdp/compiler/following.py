"""Find the plan that a graph's code has to follow, because it has no plan of its own.

The backend asks for it before it compiles a graph. For example, this rank's forward has a graph break, so that it
compiles a region that the other ranks do not have. Either the region's parameters have an agreed plan already, or all
ranks meet and one of them leads. The graph is then compiled without collectives (``passes/follow.py``), and the runtime
takes part in the collectives of the plan.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compiled_fsdp.buckets.agreed_plan import AgreedBucket, AgreedPlan, AgreedRead
from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.pipeline import INDUCTOR_PASSES
from compiled_fsdp.ranks.agreement import Agreement
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.question import Signature
from compiled_fsdp.ranks.statement import Statement
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.followed import BoundPlan
from compiled_fsdp.state import registry
from compiled_fsdp.state.parameter import ShardedParameter


class PlanFinder:
    """Finds the plan for one region, among the known plans of its parameters or by meeting the other ranks."""

    def __init__(
        self, region: Region, agreement: Agreement | None, signature: Signature, model: Callable[[], Signature]
    ) -> None:
        self._region, self._agreement, self._signature, self._model = region, agreement, signature, model

    @property
    def _kind(self) -> str:
        return self._region.kind

    def known(self) -> BoundPlan | None:
        """Return the plan that the parameters have; None if it is this region's own plan, or if there is none."""
        region, follower = self._region, RUNTIME.follower
        modes = {(parameter, read.mode) for parameter, read in zip(region.parameters, region.reads, strict=True)}
        if len(modes) > len(set(region.parameters)):
            # Reads of one parameter differ in mode. For example, after ``unshard()`` the first of two calls reads the
            # full parameter, and the second call gathers it.
            return None
        bound = self._plan_that_fits()
        if bound is None or bound.plan.signature == self._signature:
            return None
        is_recomputed = self._kind != "backward" and backward_id() != -1
        if bound.plan.signature[0] not in ("", self._signature[0]) and not is_recomputed:
            return None  # all ranks compile the model anew with other options
        names = {parameter.name for parameter in region.parameters}
        same = self._kind == "backward" or set(bound.plan.names) == names
        # A whole forward that reads fewer parameters is another use of the model (for example its encoder alone), with
        # a plan of its own.
        return bound if same or region.is_fragment or follower.is_active else None

    def own(self) -> BoundPlan | None:
        """Return the plan that the parameters have, if it is this region's own plan; else None."""
        bound = self._plan_that_fits()
        return bound if bound is not None and bound.plan.signature == self._signature else None

    def _plan_that_fits(self) -> BoundPlan | None:
        times = _times_of(self._region)
        bound = RUNTIME.follower.plan_for(_by_parameter(self._region), times, self._kind)
        # A part of compiled autograd's graph may have the gradients of one call of a layer, and another part of two.
        return bound if bound is not None and all(bound.calls(p) == max(t, 1) for p, t in times.items()) else None

    def is_known_model(self) -> bool:
        """Return whether the ranks have agreed on a plan for a part of the region's model."""
        first = next(iter(self._region.parameters), None)
        return first is not None and RUNTIME.follower.known.has_any_of(registry.unit_of(first).root)

    def meet(self, collectives: Signature = ()) -> BoundPlan | None:
        """Meet the other ranks.

        Returns the plan to follow; None if all ranks compile this region, or if this rank leads.

        Args:
            collectives: the collectives of a plan that would replace the plan that the parameters have.
        """
        assert self._agreement is not None
        if self._agreement.waits_for_code:  # Dynamo has restarted the trace of this region
            return RUNTIME.follower.plan_of_meeting
        RUNTIME.follower.end_forward_without(self._region.parameters)
        outcome = self._agreement.meet(
            Statement(
                what="compiles",
                options=self._signature[0],
                kind=self._signature[1],
                names=tuple(read.name for read in self._region.reads),
                lines=lines_of(self._region),
                rest=tuple(p.name for p in self._region.parameters if not RUNTIME.follower.serves(p)),
                model=self._model(),
                collectives=collectives,
            )
        )
        if outcome is None:
            return None
        return RUNTIME.follower.bind(outcome, self._region.parameters, self._kind, self._agreement)

    def of_this_region(self) -> BoundPlan:
        """Return the plan of the ranks that go on compiling this region.

        This rank's graph does not have the plan's collectives.
        """
        assert self._agreement is not None
        return self.learn(self._agreement.follow_rounds())

    def learn(self, plan: AgreedPlan) -> BoundPlan:
        """Note that all ranks have agreed on ``plan`` for the region; return it with the region's parameters."""
        return RUNTIME.follower.known.learn(plan, self._kind, self._region.parameters)


def lines_of(region: Region) -> tuple[str, ...]:
    """Return for each read a description of its parameter, see ``Unit.line_of``."""
    trains = region.kind != "inference"  # in inference every read has a gate, but no backward follows
    return tuple(
        registry.unit_of(parameter).line_of(parameter, mode=read.mode, trains=trains and read.trainable)
        for read, parameter in zip(region.reads, region.parameters, strict=True)
    )


def _by_parameter(region: Region) -> dict[ShardedParameter, str]:
    """Return the same descriptions by parameter, in the order of the reads.

    If a parameter has two reads, the read that trains it counts.
    """
    reads = list(zip(region.parameters, region.reads, lines_of(region), strict=True))
    return {p: line for p, _, line in reads} | {p: line for p, read, line in reads if read.trainable}


def _times_of(region: Region) -> Counter[ShardedParameter]:
    """Return how often compiled autograd's graph gathers or reduces each parameter."""
    times = Counter[ShardedParameter]()
    for parameter, count in zip(region.parameters, region.times, strict=True):
        times[parameter] += count
    return times


def agreed_plan(
    region: Region, options: Options, signature: Signature, buckets: Mapping[str, tuple[AgreedBucket, ...]]
) -> AgreedPlan:
    """Return the facts that code of another shape needs to take part in the collectives of a region's code.

    Args:
        region: the region.
        options: the backend's options.
        signature: the region's signature with the options, as ranks compare it.
        buckets: the collectives, by phase.
    """
    reads = tuple(
        AgreedRead(read.name, read.trainable, read.reduce_text, read.mode, line, times)
        for read, line, times in zip(region.reads, lines_of(region), region.times, strict=True)
    )
    obstacle = ""
    if any(read.piece for read in region.reads):
        obstacle = "parameters with all-gather extensions are gathered in pieces"
    elif any(read.backward_group or read.reduces_within for read in region.reads):
        obstacle = "with reshard_after_forward=<int> or set_reshard_after_backward(<int>) fewer ranks gather parts"
    elif region.shares_checkpoint:
        obstacle = "one checkpoint has several compiled graphs, which run again before the first one's backward"
    elif set(options.disable_passes) - {run.__name__ for run in INDUCTOR_PASSES}:  # these change no collective
        obstacle = "passes are switched off (option 'disable_passes')"
    reduced = [read for phase in buckets.values() for b in phase if not b.kind.supplies for read in b.reads]
    if len(reduced) > len(set(reduced)):
        obstacle = "a parameter has several gradients that are reduced one by one"
    known = dict(buckets)
    if region.runs_twice:  # as a backward with a checkpoint does
        known["backward"] = tuple(map(_held, (*known.get("forward", ()), *known.get("backward", ()))))
    return AgreedPlan(
        signature,
        reads,
        known,
        recheck=options.recheck_prefetched,
        obstacle=obstacle,
        repeats_forward=region.runs_twice,
    )


def _held(bucket: AgreedBucket) -> AgreedBucket:
    """Return the bucket without last uses, so that its parameters are not dropped early.

    A forward and its backward run one after the other here, and each counts the uses of parameters for itself. So a
    parameter that was read in the forward may be read again.
    """
    return replace(bucket, uses=tuple((first, sys.maxsize) for first, _ in bucket.uses))


def check_can_be_followed(bound: BoundPlan) -> None:
    """Raise RanksDiffer if code of another shape cannot take part in a plan."""
    if bound.plan.obstacle:
        raise RanksDiffer(
            f"compiled_fsdp: this rank's code differs from the code that the other ranks have for the same parameters "
            f"({bound.plan.names[0]!r} first), and it cannot follow their plan: {bound.plan.obstacle}. Let all ranks "
            "take the same way through the model."
        )


def parameters_of_call(
    args: Sequence[Any], id_places: Sequence[tuple[int, int] | None]
) -> list[ShardedParameter] | None:
    """Return the parameters of a region's reads in a call of its code; None if its inputs do not tell all of them."""
    found = []
    for place in id_places:
        if place is None:
            return None
        which, position = place
        found.append(registry.parameter_of(args[which][position]))
    return found
