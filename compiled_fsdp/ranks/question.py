"""The question of one round of an agreement, and the first difference between two questions, for error messages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from compiled_fsdp.base.plain_data import PlainData

Signature = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The question that the ranks answer in one round.

    Attributes:
        topic: the phase whose plan is decided, or another subject (``Agreement.agree``).
        signature: the region's options, its kind, and a line for each read.
        collectives: the collectives that the decision is about, a line for each.
        param_names: the names of the parameters that are read, in the order of the reads.
    """

    topic: str = ""
    signature: Signature = ()
    collectives: Signature = ()
    param_names: Signature = ()

    def difference(self, theirs: Question) -> tuple[str, str] | None:
        """The first difference from another rank's question, in this rank's words and in that rank's; None if equal.

        Regions are compared before topics, because ranks with other options or layers have other topics, too. Their
        collectives may differ, and one may have no backward: such a rank follows the plan in other code.
        """
        difference = None
        if self.signature != theirs.signature:
            ours = _with_names(self.signature, self.param_names)
            difference = first_difference(ours, _with_names(theirs.signature, theirs.param_names), "read", 2)
        if self.has_backward == theirs.has_backward:
            difference = difference or first_difference((self.topic,), (theirs.topic,), "", 1)
        return difference or first_difference(self.param_names, theirs.param_names, "parameter", 0)

    @property
    def has_backward(self) -> bool:
        """Whether a backward follows. A training region has none if no input and no parameter needs a gradient."""
        return self.topic != "inference" or not any("training" in kind for kind in self.signature[1:2])

    def has_same_collectives(self, theirs: Question) -> bool:
        """Whether the plan that answers the other rank's question is also valid for this rank's graph."""
        return self.has_backward == theirs.has_backward and set(self.collectives) == set(theirs.collectives)

    def needs_more(self, theirs: Question) -> bool:
        """Whether this rank's graph has all collectives of the other rank's graph, and more."""
        if self.has_backward != theirs.has_backward:
            return self.has_backward
        return set(self.collectives) > set(theirs.collectives)

    def __str__(self) -> str:
        return f"{self.topic} of {region_for_people(self.signature, self.param_names)}"


@dataclass(frozen=True)
class Posted(PlainData):
    """The leader's post in a round.

    Attributes:
        question: the leader's question.
        decision: the leader's proposal.
        problem: an error for all ranks instead of a decision; "" if there is a decision.
    """

    question: Question = Question()
    decision: str = ""
    problem: str = ""


# ---- differences, for people -----------------------------------------------------------------------------------------
def region_for_people(signature: Signature, param_names: Signature) -> str:
    """A region in words; ``signature`` begins with the options and the kind, and the reads follow."""
    reads, kind = signature[2:], signature[1] if len(signature) > 1 else "no kind"
    first = f", the first: {_with_names(signature, param_names)[2]}" if reads else ""
    return f"this region ({kind}, {len(reads)} reads{first})"


def _with_names(signature: Signature, param_names: Signature) -> Signature:
    names = itertools.chain(param_names, itertools.repeat(""))
    reads = (f"{name} {read}" if name else read for read, name in zip(signature[2:], names, strict=False))
    return (*signature[:2], *reads)


def first_difference(mine: Signature, theirs: Signature, noun: str, first: int) -> tuple[str, str] | None:
    """The first entries that differ, in words; None if there are none. Only the differing lines of an entry are given.

    Entries from number ``first`` on are called ``noun`` and a number, for example "read 0: ". Entries before that are
    options or a kind, or, if there is no ``noun``, a topic.
    """
    for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs, fillvalue="nothing more")):
        if a != b:
            where = f"{noun} {i - first}: " if i >= first else "" if noun else "the plan of its "
            lines = [(x, y) for x, y in itertools.zip_longest(a.splitlines(), b.splitlines(), fillvalue="") if x != y]
            return where + ", ".join(x for x, _ in lines), where + ", ".join(y for _, y in lines)
    return None
