"""Meetings in the process group's key-value store: all ranks of a group say what they do, and hear what all do.

Each rank makes three requests to the store, and then waits for the result. If the ranks do not all say the same, all
post their statements, and the last rank to post decides for all (``statement.outcome_of``). A rank that runs compiled
code does not come to a meeting itself, because its code asks nobody. Its journal's thread answers for it
(``journal.py``).
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

from compiled_fsdp.ranks.failures import RanksDiffer, naming_a_lost_store, problem_key
from compiled_fsdp.ranks.heartbeat import Gone
from compiled_fsdp.ranks.liveness import Liveness
from compiled_fsdp.ranks.statement import Outcome, Statement, outcome_of
from compiled_fsdp.ranks.waiting import wait_for

SAME, TELL = "same", "tell"


def called_key(liveness: Liveness) -> str:
    """The key of the name of the meeting at which ranks wait; if there are several, that at the earliest position."""
    return f"{liveness.prefix}/called"


def position_of(name: str) -> int:
    """The position of the meeting with this name: how many forwards are before it."""
    return int(name.partition(".")[0])


def _key(liveness: Liveness, name: str) -> str:
    return f"{liveness.prefix}/meeting {name}"


def heard_at(liveness: Liveness, name: str) -> str:
    """The key of a meeting's first result: ``SAME``, ``TELL`` (all post their statements), or a problem of one rank."""
    return f"{_key(liveness, name)}/heard"


class Attendance:
    """One rank's part in one meeting: it posts its statement and reads the outcome."""

    def __init__(self, liveness: Liveness, name: str, statement: Statement) -> None:
        self._liveness, self._name, self.statement = liveness, name, statement
        self._key = _key(liveness, name)
        # The keys of the first result (``heard_at``) and of the outcome.
        self.heard, self.decided = heard_at(liveness, name), f"{self._key}/outcome"
        self._has_told = False

    def come(self) -> None:
        """Post a digest of the statement. The last rank to come sees whether all have said the same."""
        store = self._liveness.store
        store.set(f"{self._key}/came {self._liveness.rank}", "")
        alike = f"{self._key}/{self.statement.digest()}"
        store.add(alike, 1)
        if store.add(f"{self._key}/came", 1) == self._liveness.size:
            same = store.add(alike, 0)  # read now, because other ranks may have come between the two additions above
            store.set(self.heard, SAME if same == self._liveness.size and self.statement.what != "ran" else TELL)

    def call(self) -> None:
        """Call the journals of the ranks that do not come by themselves, so that these answer for their ranks.

        Ranks that run ahead (for example other replicas, in a forward) may wait in a meeting at a later position. They
        leave the call for an earlier meeting in the store, because the ranks that wait there cannot come to the later
        meeting before. If the calls replaced each other, a journal, which looks only now and then, might see the later
        call every time, and no rank would ever go on.
        """
        liveness, called = self._liveness, called_key(self._liveness)
        known = liveness.value(called) or ""
        is_earlier = bool(known) and position_of(known) < position_of(self._name)
        if is_earlier and liveness.value(heard_at(liveness, known)) is None:
            return
        if known != self._name:
            liveness.store.compare_set(called, known, self._name)

    def tell(self) -> None:
        """Post the statement, once, after ranks have said different things. The last rank to post decides for all."""
        if self._has_told:
            return
        self._has_told = True
        store, size = self._liveness.store, self._liveness.size
        store.set(f"{self._key}/says {self._liveness.rank}", self.statement.to_json())
        if store.add(f"{self._key}/told", 1) < size:
            return
        statements = [Statement.from_json(store.get(f"{self._key}/says {rank}").decode()) for rank in range(size)]
        outcome = outcome_of(statements)
        if outcome.problem:
            store.set(problem_key(self._liveness), outcome.problem)
        store.set(self.decided, outcome.to_json())

    def end(self, _gone: Gone, problem: str) -> None:
        """End the meeting for all ranks, because one is gone: those on other machines cannot see that themselves."""
        self._liveness.store.set(self.heard, problem)
        self._liveness.store.set(self.decided, Outcome(problem=problem).to_json())

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        ranks = range(self._liveness.size)
        return [rank for rank in ranks if self._liveness.value(f"{self._key}/came {rank}") is None]


def meet(liveness: Liveness, name: str, statement: Statement) -> Outcome | None:
    """Post this rank's statement, and wait until all ranks of the group have posted a statement.

    ``name``: the meeting's name, the same on all ranks.

    Returns:
        The decision for all ranks; None if all have said the same.

    Raises:
        RanksDiffer: the statements do not fit together, a rank is gone or has failed to compile, or a rank did not come
            within the group's timeout.
    """
    own = Attendance(liveness, name, statement)
    late = f"not all {liveness.size} ranks of the group came to the place where this one {statement}"

    with naming_a_lost_store(str(statement), liveness):
        own.come()
        heard = wait_for(liveness, own.heard, late, own.missing, on_late=own.call, on_gone=own.end)
        if heard == SAME:
            return None
        if heard != TELL:
            raise RanksDiffer(heard)
        own.tell()
        outcome = Outcome.from_json(wait_for(liveness, own.decided, late, own.missing, on_gone=own.end))
    if outcome.problem:
        raise RanksDiffer(outcome.problem)
    return outcome
