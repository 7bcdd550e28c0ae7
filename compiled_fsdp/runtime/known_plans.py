"""The agreed plans that this rank knows, and which of them a forward follows that reads a certain parameter first."""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from compiled_fsdp.buckets.agreed_plan import AgreedBucket, AgreedPlan, AgreedRead
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.outline import outline_of
from compiled_fsdp.ranks.statement import Statement
from compiled_fsdp.runtime.followed import BoundPlan
from compiled_fsdp.state import registry
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit


class _Code(NamedTuple):
    """Compiled code: its kind, the names of the parameters that it reads, and its collectives by phase."""

    kind: str
    names: tuple[str, ...]
    buckets: tuple[tuple[str, tuple[AgreedBucket, ...]], ...]


class KnownPlans:
    """The plans of all living models, by the unit that is read first."""

    def __init__(self) -> None:
        # The end of each outermost forward sets this, in traced code too. It is read and cleared here.
        self.forward_ended = False
        # The plans that the running forward has begun, in order.
        self._begun: list[BoundPlan] = []
        self._of_unit: weakref.WeakKeyDictionary[Unit, list[BoundPlan]] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[Unit] = weakref.WeakSet()
        # Compiled code. The key says whether the code trains, and names all parameters of its model, because equal
        # models share code, which outlives its model.
        self._codes: dict[tuple[bool, tuple[str, ...]], set[_Code]] = {}

    def learn(self, plan: AgreedPlan, kind: str, parameters: Sequence[ShardedParameter]) -> BoundPlan:
        """Note that all ranks have agreed on ``plan`` for these parameters, which are in the order of its reads."""
        bound, same = BoundPlan(plan, kind, parameters), self.same(plan, kind, parameters)
        bound.is_recomputed_only = same.is_recomputed_only if same is not None else backward_id() != -1
        known = self._of_unit.setdefault(unit_of(parameters[0]), [])
        # A plan for more parameters replaces those that begin with the same block, unless one forward has both.
        beside = [b for b in self.begun() if b.plan.signature != plan.signature]
        known[:] = [b for b in known if b.is_alive and (b in beside or not b.is_part_of(bound))]
        known.append(bound)
        root = unit_of(parameters[0]).root
        is_new = root not in self._roots
        self._roots.add(root)
        if not plan.on_demand and kind != "backward":
            self._note_code(root, is_new, plan, [parameter.name for parameter in parameters])
        return bound

    def _note_code(self, root: Unit, is_new: bool, plan: AgreedPlan, names: Sequence[str]) -> None:
        """Note compiled code with a plan for the parameters with these names.

        If there are several codes for the same parameters, ranks might choose different ones for the next equal model.
        So new models share none of them (``registry.begin_generation``).
        """
        model = tuple(parameter.name for unit in root.tree_units() for parameter in unit.parameters)
        kind = plan.signature[1]
        known = self._codes.setdefault(("inference" not in kind, model), set())
        code = _Code(kind, tuple(names), tuple(sorted(plan.buckets.items())))
        is_new |= code not in known
        known.add(code)
        if is_new and not all(set(names).isdisjoint(other.names) for other in known - {code}):
            registry.begin_generation(self.has_any_of)

    def forget_codes(self) -> None:
        """Note that there is no compiled code any more."""
        self._codes.clear()

    def begins(self, bound: BoundPlan) -> None:
        """Note that the running forward begins a plan.

        If only recomputations had the plan so far, all ranks meet before. For example, all ranks run a layer in a
        reentrant checkpoint, and compiled autograd compiles its recomputation. A rank that then runs the layer without
        the checkpoint has a plan, but in the other ranks' forward the layer is uncompiled and trains nothing.

        Raises:
            RanksDiffer: another rank runs other code.
        """
        if bound.is_recomputed_only:
            bound.agreement.meet(bound.statement("runs"))
            bound.agreement.end_region()
            bound.is_recomputed_only = False
        begun = self.begun()
        begun.append(bound)
        if bound.forwards[1] is not begun:
            bound.forwards = bound.forwards[1], begun
        bound.begins()

    def begun(self) -> list[BoundPlan]:
        """The plans that the running forward has begun, in order. Each forward has a new list."""
        if self.forward_ended:
            self._begun, self.forward_ended = [], False
        return self._begun

    def has_any_of(self, root: Unit) -> bool:
        """Whether ranks have agreed on a plan for a part of this root's model, which is then compiled on all ranks."""
        return root in self._roots

    def that_begins_with(self, parameter: ShardedParameter, kind: str, line: str) -> BoundPlan | None:
        """The plan that a forward follows which reads ``parameter`` first; None if there is none.

        If several plans begin with the parameter's block, the largest one for the parameters' present state is
        followed. But if the last forward with that plan also began others of them, they are followed in that order. For
        example, a layer is called before a graph break and after it.

        ``line``: the parameter's present state (``Unit.line_of``).
        """
        beginning = kind, parameter.block
        known = self._of_unit.get(unit_of(parameter), ())
        found = [b for b in known if b.beginning == beginning and b.is_alive and b.fits(parameter, line)]
        if len(found) > 1:  # for example, one was made when other parameters were frozen
            found = [bound for bound in found if bound.is_for_now()] or found
        if len(found) < 2:
            return found[0] if found else None
        largest = max(found, key=lambda bound: len(bound.read_of))
        begun = self.begun()
        last = largest.forwards[0 if largest.forwards[1] is begun else 1]
        by_region = {_region_of(bound): bound for bound in found}  # a plan may have been learned again since it began
        order = [by_region[region] for region in map(_region_of, last) if region in by_region]
        number = sum(_region_of(bound) in by_region for bound in begun)
        return order[number] if number < len(order) else largest

    def for_backward(
        self, lines: Mapping[ShardedParameter, str], times: Mapping[ShardedParameter, int]
    ) -> BoundPlan | None:
        """The plan of a graph of compiled autograd with exactly these parameters, in any order; None if there is none.

        Args:
            lines: each parameter's state in that graph (``Unit.line_of``).
            times: how often that graph gathers or reduces each parameter. After two forwards, a backward has another
                plan than after one.
        """
        by_id = {parameter.param_id: count for parameter, count in times.items()}
        for bound in self._all("backward"):
            if bound.times == by_id and all(bound.fits(p, line) for p, line in lines.items()):
                return bound
        return None

    def same(self, plan: AgreedPlan, kind: str, parameters: Sequence[ShardedParameter]) -> BoundPlan | None:
        """The known plan of these parameters with the collectives of ``plan``; None if there is none."""
        ids = {parameter.param_id for parameter in parameters}
        for bound in self._of_unit.get(unit_of(parameters[0]), ()):
            if bound.kind == kind and bound.plan.has_collectives_of(plan) and bound.read_of.keys() == ids:
                return bound
        return None

    def has_other(self, plan: AgreedPlan, kind: str, parameters: Sequence[ShardedParameter]) -> bool:
        """Whether a plan of another region is known that has some of these parameters, in the same state as ``plan``.

        Plans of the running forward do not count, because the new plan comes after them.
        """
        new, begun = BoundPlan(plan, kind, parameters), self.begun()
        return any(
            bound.plan.signature != plan.signature
            and not bound.plan.on_demand
            and bound not in begun
            and not new.read_of.keys().isdisjoint(bound.read_of)
            and bound.like(new)
            for bound in self._all(kind)
        )

    def has_others_like(self, new: BoundPlan) -> bool:
        """Whether code with another plan is known that might run for the parameters of ``new``.

        It is for them or for a layer that begins with an equal parameter.
        """
        return any(
            bound.line_of[0] == new.line_of[0]
            and not bound.plan.on_demand
            and not bound.plan.has_collectives_of(new.plan)
            for bound in self._all(new.kind)
        )

    def _all(self, kind: str) -> Iterator[BoundPlan]:
        for known in self._of_unit.values():
            yield from (bound for bound in known if bound.kind == kind and bound.is_alive)


def _region_of(bound: BoundPlan) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The region that a plan is of, with its parameters: equal if a plan was learned twice."""
    return bound.plan.signature, tuple(bound.read_of)


def parameters_named(names: Sequence[str], near: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """The parameters with these names, in the models that the parameters ``near`` belong to.

    Raises:
        RanksDiffer: these models have no parameter of one of the names.
    """
    known: dict[str, ShardedParameter] = {}
    for root in reversed(list(dict.fromkeys(unit_of(parameter).root for parameter in near))):
        known |= {parameter.name: parameter for unit in root.tree_units() for parameter in unit.parameters}
    missing = [name for name in names if name not in known]
    if missing:
        raise RanksDiffer(
            f"compiled_fsdp: other ranks compile code that reads {missing[0]!r}, a parameter of another model than "
            f"{near[0].name!r}, which this rank reads. Every rank must run the same models in the same order."
        )
    return [known[name] for name in names]


# ---- blocks in uncompiled code, which gathers all parameters of a block at the first read of one ---------------------
def plan_of_block(members: Sequence[ShardedParameter], kind: str) -> AgreedPlan:
    """The plan of a block that uncompiled code reads: one gather and one reduction."""
    unit, trains = unit_of(members[0]), kind == "training"
    mode = unit.mode_of(members[0])
    reads = tuple(
        AgreedRead(p.name, p.param.requires_grad, p.read_spec.reduce, mode, unit.line_of(p, mode=mode, trains=trains))
        for p in members
    )
    every = tuple(range(len(members)))
    gather = AgreedBucket(
        Kind.GATHER, every, Kind.GATHER.usual_transport, uses=tuple((0, 1) for _ in members), edge=(True, True)
    )
    gathers = (gather,) if mode != "full" and members[0].world > 1 else ()
    trained = tuple(read for read in every if reads[read].trainable)
    again = gathers if mode == "resharded" else ()
    backward = (*again, AgreedBucket(Kind.REDUCE, trained, Kind.REDUCE.usual_transport)) if trained else again
    buckets: dict[str, tuple[AgreedBucket, ...]] = {"forward": gathers, "inference": gathers, "backward": backward}
    return AgreedPlan(signature=("", "block"), reads=reads, buckets=buckets, on_demand=True)


def statement_of_block(members: Sequence[ShardedParameter], kind: str) -> Statement:
    """The statement of a rank that is about to read a block in uncompiled code."""
    unit, group = unit_of(members[0]), members[0].group
    lines = tuple(unit.line_of(p, trains=kind == "training") for p in members)
    names = tuple(member.name for member in members)
    return Statement("reads", "", kind, names, lines, names, outline_of(unit.tree_units(), group))
