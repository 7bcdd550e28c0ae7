"""A rank's statement at one position of its program, and the decision for all ranks if their statements differ."""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

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
    """The next action of one rank, or its action at an earlier position, as far as its collectives depend on it.

    Attributes:
        what: the rank "compiles" code that reads these parameters, "reads" a block of them in uncompiled code, "runs"
            code that it shares with equal layers, or "ran" code with an agreed plan.
        options: the backend's options, one per line; "" in uncompiled code.
        kind: the region's kind: "training", "inference" or "backward", with a note for a fragment ("a part, training").
        names: the names of the parameters that are read.
        lines: the description of each parameter (``Unit.line_of``): dtype, shape, whether it is trained, and how its
            gradient is reduced; "" if it is not known.
        rest: those of ``names`` that no plan has gathered yet. For example, a rank whose first graph follows a plan for
            "a" and "b", but reads only "a", has "b" gathered already when it compiles its second graph.
        model: the outline of the models ("name: description"); empty if the rank "runs" or "ran" code.
        collectives: the collectives that a new plan would have, if there is a plan for the same parameters already.
        plan: the plan of the code that the rank "runs" or "ran".
    """

    what: Literal["compiles", "reads", "runs", "ran"]
    options: str
    kind: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    rest: tuple[str, ...]
    model: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    plan: AgreedPlan | None = None

    @property
    def has_code(self) -> bool:
        """Whether the rank has code with the collectives of an agreed plan, so that it can follow no other plan."""
        return self.what in ("runs", "ran")

    @property
    def is_whole(self) -> bool:
        """Whether the rank compiles code, and no plan has gathered any parameter of that code yet."""
        return self.what == "compiles" and self.rest == self.names

    @property
    def reads(self) -> tuple[str, ...]:
        """A line for each parameter that is read: its name and its description."""
        return tuple(map(" ".join, zip(self.names, self.lines, strict=True)))

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return "inference" not in self.kind

    def digest(self) -> str:
        """A hash, which is the same for equal statements."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        first = f", the first: {self.reads[0]}" if self.names else ""
        return f"{self.what} {self.kind or 'uncompiled code'} with {len(self.names)} parameters{first}"


@dataclass(frozen=True)
class Outcome(PlainData):
    """The decision for all ranks after they have said different things.

    Attributes:
        leader: the rank that has or makes the plan that all ranks follow; None if all ranks read block by block.
        statement: the leader's statement; without a leader, the statement of a rank that reads the block.
        problem: an error for all ranks; "" if there is none.
    """

    leader: int | None = None
    statement: Statement | None = None
    problem: str = ""


def outcome_of(statements: Sequence[Statement]) -> Outcome:
    """The decision for all ranks, from the statements of rank 0, rank 1, and so on.

    If some rank runs or has run code with a plan here, all ranks follow that plan. Otherwise a rank leads that
    compiles code for all parameters that the others read here; if several ranks do, the leader is one with the most
    frequent statement. If none does, but a rank reads them all in uncompiled code, all ranks read block by block. Ranks
    that read different parameters, or have different options or models, get an error.
    """
    for odd, mine in enumerate(statements):
        if found := _contradiction(mine, statements[0]):
            return Outcome(problem=other_regions(odd, *found, 0) + _way_out(mine, statements[0], *found))
    ran = [rank for rank, statement in enumerate(statements) if statement.has_code]
    if ran:
        leader = statements[ran[0]]
        asks = any(statement.what == "runs" for statement in statements)
        for odd, mine in enumerate(statements):
            # compared with the leader, too, because rank 0's statement may lack what differs, for example a model
            found = _contradiction(mine, leader)
            fits = mine.names == leader.names if mine.has_code else not set(mine.rest).isdisjoint(leader.names)
            if asks and mine.has_code and fits and not found and not _have_same_collectives(mine.plan, leader.plan):
                return Outcome(problem=_other_codes(odd, ran[0], mine))
            if found or not fits:
                return Outcome(problem=other_regions(odd, *(found or _difference(mine, leader)), ran[0]))
        return Outcome(ran[0], leader)
    said = Counter(statements)
    for whole in (True, False):  # compiled code is preferred to uncompiled code
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
    """The first difference that is not allowed, or None: in options, models, training or not, or a parameter's line."""
    if mine.options and theirs.options and mine.options != theirs.options:
        return first_difference((mine.options,), (theirs.options,), "option", 1)
    if mine.model and theirs.model and mine.model != theirs.model:
        return first_difference(mine.reads, theirs.reads, "read", 0) or difference_of_outlines(mine.model, theirs.model)
    if mine.trains != theirs.trains:
        return _describe_kind(mine), _describe_kind(theirs)
    their_lines = _lines_by_name(theirs)
    for name, lines in _lines_by_name(mine).items():
        # one common line is enough, because one rank may read a parameter once more, without its gradient
        if name in their_lines and lines.isdisjoint(their_lines[name]):
            return f"{name} {min(lines)}", f"{name} {min(their_lines[name])}"
    return None


def _way_out(mine: Statement, theirs: Statement, my_line: str, their_line: str) -> str:
    """What to do if graphs of compiled autograd differ only in whether they gather a parameter; else ""."""
    in_backward = mine.kind.startswith("backward") and theirs.kind.startswith("backward")
    if not in_backward or my_line.replace(", resharded,", ", kept,") != their_line.replace(", resharded,", ", kept,"):
        return ""
    return (
        " Under compiled_autograd(), a layer has to be in a checkpoint on all ranks or on none. If it cannot, run the "
        "backward without compiled_autograd()."
    )


def _describe_kind(statement: Statement) -> str:
    """The kind, for ranks of which only some compute gradients."""
    return statement.kind if statement.trains else f"{statement.kind}, or a checkpoint with use_reentrant=True"


def _lines_by_name(statement: Statement) -> dict[str, set[str]]:
    """The known lines of each parameter. Two reads of it may have two lines, if only one of them trains it."""
    found: dict[str, set[str]] = {}
    for name, line in zip(statement.names, statement.lines, strict=True):
        if line:
            found.setdefault(name, set()).add(line)
    return found


def _difference(first: Statement, second: Statement) -> tuple[str, str]:
    """The first read that differs between two ranks, in each one's words; if none does, their whole statements."""
    return first_difference(first.reads, second.reads, "read", 0) or (str(first), str(second))


def _have_same_collectives(mine: AgreedPlan | None, theirs: AgreedPlan | None) -> bool:
    """Whether two ranks' plans have the same collectives. None is the plan of a block in uncompiled code."""
    return mine is theirs if mine is None or theirs is None else mine.has_collectives_of(theirs)


def _other_codes(rank: int, other: int, statement: Statement) -> str:
    """The text of the error for two ranks that run different code for one of several equal layers."""
    return (
        f"compiled_fsdp: ranks run different code for equal layers. Ranks {other} and {rank} of the group run code "
        f"with other collectives for the {len(statement.names)} parameters from {statement.names[0]!r} on, which both "
        "have compiled for layers like this one. If ranks take different ways through equal layers, compile the model "
        "as a whole (torch.compile(model)) and not layer by layer."
    )


def other_regions(rank: int, mine: str, theirs: str, other: int) -> str:
    """The text of the error for two ranks whose statements do not fit together."""
    return (
        f"compiled_fsdp: ranks compile different regions. Rank {rank} of the group has: {mine}; rank {other} has: "
        f"{theirs}. Every rank must run the same sharded model with the same options."
    )
