"""A block that is read in uncompiled code, as other ranks know it: as a plan, and as a statement.

Uncompiled code gathers all parameters of a block at the first read of one of them.
"""

# Why: docs/design.md, note N78

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_fsdp.buckets.agreed_plan import AgreedBucket, AgreedPlan, AgreedRead
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.ranks.outline import outline_of
from compiled_fsdp.ranks.statement import Statement
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of


def plan_of_block(members: Sequence[ShardedParameter], kind: str) -> AgreedPlan:
    """The collectives of a block that is read in uncompiled code: one gather, and one reduction."""
    unit, trains = unit_of(members[0]), kind == "training"
    mode = unit.mode_of(members[0], trains=trains)
    reads = tuple(
        AgreedRead(p.name, p.param.requires_grad, p.reduce_text, mode, unit.line_of(p, mode=mode, trains=trains))
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
    """What a rank says that is about to read a block in uncompiled code."""
    unit, group = unit_of(members[0]), members[0].group
    trains = kind == "training"
    lines = tuple(unit.line_of(p, mode=unit.mode_of(p, trains=trains), trains=trains) for p in members)
    names = tuple(member.name for member in members)
    return Statement("reads", "", kind, names, lines, names, outline_of(unit.tree_units(), group))


@dataclass(frozen=True)
class GatheredBlock:
    """A block that was gathered in uncompiled code, for the journal."""

    kind: str
    names: tuple[str, ...]

    def statement(self) -> Statement:
        """What is told of it."""
        return Statement("ran", "", self.kind, self.names, ("",) * len(self.names), self.names)
