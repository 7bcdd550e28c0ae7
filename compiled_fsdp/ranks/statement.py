"""A rank's statement at one position of its program, and the decision for all ranks if their statements differ."""

# Why: docs/design.md, note N78

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.ranks.outline import difference_of_outlines
from compiled_fsdp.ranks.question import first_difference


@dataclass(frozen=True)
class Statement(PlainData):
    """What one rank does next (or did, at that position), as far as its collectives depend on it.

    Attributes:
        what: it "compiles" code that reads these parameters, it "reads" a block of them in uncompiled code, or it "ran"
            code with an agreed plan.
        options: the backend's options, a line each; "" in uncompiled code.
        kind: of the region: "training", "inference" or "backward", perhaps as a part of a forward.
        names: the parameters that are read.
        lines: what each of them is: shape, dtype, whether it is trained, how its gradient is reduced; "" where that is
            not known.
        rest: those of ``names`` that no plan has gathered yet. For example, a rank whose first graph follows a plan for
            "a" and "b", but reads "a" alone, has "b" gathered already when it compiles its second graph.
        model: all parameters of the models ("name: what it is"); none of what it ran.
        collectives: those that a new plan would be about, where there is a plan for the same parameters already.
        plan: what it ran.
    """

    what: Literal["compiles", "reads", "ran"]
    options: str
    kind: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    rest: tuple[str, ...]
    model: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    plan: AgreedPlan | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a plan for what it compiles would have everything in it."""
        return self.what == "compiles" and self.rest == self.names

    @property
    def reads(self) -> tuple[str, ...]:
        """A line for each parameter that is read."""
        return tuple(map(" ".join, zip(self.names, self.lines, strict=True)))

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return "inference" not in self.kind

    def digest(self) -> str:
        """The same for equal statements."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        first = f", the first: {self.reads[0]}" if self.names else ""
        return f"{self.what} {self.kind or 'uncompiled code'} with {len(self.names)} parameters{first}"


@dataclass(frozen=True)
class Outcome(PlainData):
    """What all ranks do after they have said different things.

    Attributes:
        leader: the rank whose plan all follow, or that makes it; None if everybody reads block by block.
        statement: what that rank has said.
        problem: an error for all ranks; "" if there is none.
    """

    leader: int | None = None
    statement: Statement | None = None
    problem: str = ""


def outcome_of(statements: Sequence[Statement]) -> Outcome:
    """What ranks do that said these things, by rank.

    A plan that some rank runs already is followed by all. Else the rank leads that compiles all that the others read at
    this position; of several such ranks one that says what most of them say. Ranks that read different parameters, or
    have different options or models, get an error.
    """
    for odd, mine in enumerate(statements):
        if found := _contradiction(mine, statements[0]):
            return Outcome(problem=other_regions(odd, *found, 0))
    ran = [rank for rank, statement in enumerate(statements) if statement.what == "ran"]
    if ran:
        leader = statements[ran[0]]
        for odd, mine in enumerate(statements):
            # what ran says nothing of its model, so the first rank's need not be like it
            found = _contradiction(mine, leader)
            fits = mine.names == leader.names if mine.what == "ran" else not set(mine.rest).isdisjoint(leader.names)
            if found or not fits:
                return Outcome(problem=other_regions(odd, *(found or _difference(mine, leader)), ran[0]))
        return Outcome(ran[0], leader)
    said = Counter(statements)
    for whole in (True, False):  # compiled code leads, before uncompiled code
        leaders = [
            (-said[statement], rank)
            for rank, statement in enumerate(statements)
            if (statement.is_whole if whole else statement.what == "reads")
            and all(set(other.rest) <= set(statement.names) for other in statements)
        ]
        if leaders:
            rank = min(leaders)[1]
            return Outcome(rank if whole else None, statements[rank])
    odd = next(rank for rank, statement in enumerate(statements) if statement.rest != statements[0].rest)
    return Outcome(problem=other_regions(odd, *_difference(statements[odd], statements[0]), 0))


def _contradiction(mine: Statement, theirs: Statement) -> tuple[str, str] | None:
    """What ranks cannot differ in: options, models, training or not, and what a parameter is."""
    if mine.options and theirs.options and mine.options != theirs.options:
        return first_difference((mine.options,), (theirs.options,), "option", 1)
    if mine.model and theirs.model and mine.model != theirs.model:
        return first_difference(mine.reads, theirs.reads, "read", 0) or difference_of_outlines(mine.model, theirs.model)
    if mine.trains != theirs.trains:
        return mine.kind, theirs.kind
    their_lines = _lines_by_name(theirs)
    for name, lines in _lines_by_name(mine).items():
        # one rank may read a parameter once more, without its gradient
        if name in their_lines and lines.isdisjoint(their_lines[name]):
            return f"{name} {min(lines)}", f"{name} {min(their_lines[name])}"
    return None


def _lines_by_name(statement: Statement) -> dict[str, set[str]]:
    """What each parameter is, as far as that is known; of two reads one may train it and the other not."""
    found: dict[str, set[str]] = {}
    for name, line in zip(statement.names, statement.lines, strict=True):
        if line:
            found.setdefault(name, set()).add(line)
    return found


def _difference(first: Statement, second: Statement) -> tuple[str, str]:
    """The first read that differs, of one rank and of the other; if none does, all that they say."""
    return first_difference(first.reads, second.reads, "read", 0) or (str(first), str(second))


def other_regions(rank: int, mine: str, theirs: str, other: int) -> str:
    """The error of two ranks that cannot do together what they do."""
    return (
        f"compiled_fsdp: ranks compile different regions. Rank {rank} of the group has: {mine}; rank {other} has: "
        f"{theirs}. Every rank must run the same sharded model with the same options."
    )
