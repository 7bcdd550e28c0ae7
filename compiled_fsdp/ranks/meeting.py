"""A place in the process group's key-value store where all ranks of a group say what they do, and hear what all do.

Ranks that say the same cost three questions to the store each. If one says something else, all post their statements,
and the last one decides for all (``statement.outcome_of``). A rank that is not at this position itself, because it runs
compiled code which needs to ask nobody, is answered for by its journal's thread (``journal.py``).
"""

# Why: docs/design.md, note N78

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.ranks.failures import RanksDiffer, problem_key
from compiled_fsdp.ranks.heartbeat import Gone, Watch
from compiled_fsdp.ranks.liveness import Liveness
from compiled_fsdp.ranks.statement import Outcome, Statement, outcome_of

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2  # seconds between two looks into the store
_PAUSE = 1 / 16  # of the time waited so far: what a wait may be longer than it has to be
_SECONDS_BETWEEN_LIVENESS_CHECKS = 1.0
_SECONDS_BEFORE_CALLING = 0.5  # until the ranks that do not come by themselves are asked for

SAME, TELL = "same", "tell"


def wait_for(
    liveness: Liveness, key: str, seconds: float, on_gone: Callable[[Gone], None], on_late: Callable[[], None]
) -> str | None:
    """What is posted under a key; None after so many seconds.

    Meanwhile once a second it is asked whether the other ranks' processes still run (``on_gone`` if one does not, which
    may raise), and ``on_late`` is called.
    """
    began = checked = time.monotonic()
    watch = Watch(liveness)
    # Not the store's own wait: a TCPStore writes two warnings for each one that ends without an answer.
    while (value := liveness.value(key)) is None:
        now = time.monotonic()
        if now >= began + seconds:
            return None
        if now - checked >= (_SECONDS_BETWEEN_LIVENESS_CHECKS if checked != began else _SECONDS_BEFORE_CALLING):
            checked = now
            on_late()
            if (gone := watch.gone()) is not None and liveness.value(key) is None:
                on_gone(gone)
        pause = min(max(_PAUSE * (now - began), _SHORTEST_PAUSE), _LONGEST_PAUSE)
        time.sleep(min(pause, max(began + seconds - now, 0.0)))
    return value


def called_key(liveness: Liveness) -> str:
    """Where the ranks that wait at a meeting say which one it is."""
    return f"{liveness.prefix}/called"


def _key(liveness: Liveness, name: str) -> str:
    return f"{liveness.prefix}/meeting {name}"


def heard_at(liveness: Liveness, name: str) -> str:
    """Where ranks hear whether all have said the same at a meeting: ``SAME``, ``TELL``, or a problem of one of them."""
    return f"{_key(liveness, name)}/heard"


class Attendance:
    """One rank's part in one meeting: it posts its statement and reads the outcome."""

    def __init__(self, liveness: Liveness, name: str, statement: Statement) -> None:
        self._liveness, self.statement = liveness, statement
        self._key = _key(liveness, name)
        # The key of the word whether all have said the same.
        self.heard = heard_at(liveness, name)
        self._has_told = False

    @property
    def decided(self) -> str:
        """The key of the outcome."""
        return f"{self._key}/outcome"

    def come(self) -> None:
        """Say a digest of the statement; the last one to come sees whether all have said the same."""
        store = self._liveness.store
        store.set(f"{self._key}/came {self._liveness.rank}", "")
        alike = f"{self._key}/{self.statement.digest()}"
        store.add(alike, 1)
        if store.add(f"{self._key}/came", 1) == self._liveness.size:
            same = store.add(alike, 0)  # counted once all have come: between this rank's two additions others may come
            store.set(self.heard, SAME if same == self._liveness.size and self.statement.what != "ran" else TELL)

    def tell(self) -> None:
        """Post the statement; the last one decides. Once, and only if ranks have said different things."""
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
        store.set(self.decided, json.dumps(asdict(outcome)))

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        ranks = range(self._liveness.size)
        return [rank for rank in ranks if self._liveness.value(f"{self._key}/came {rank}") is None]

    def outcome(self) -> Outcome:
        """What was decided, once it is posted."""
        found: Outcome = from_json(Outcome, self._liveness.store.get(self.decided).decode())
        return found


def meet(
    liveness: Liveness, name: str, statement: Statement, last_seen: Callable[[list[int]], str] = lambda _: ""
) -> Outcome | None:
    """Post this rank's statement, and wait until all ranks of the group have posted theirs.

    Args:
        name: of the meeting, the same on all ranks.
        last_seen: what ranks did last that do not come, for the error.

    Returns:
        What all do; None if all have said the same.

    Raises:
        RanksDiffer: they cannot do that together, a rank is gone, or it did not come within the group's timeout.
    """
    own = Attendance(liveness, name, statement)
    called = called_key(liveness)

    def gone(rank: Gone) -> None:
        told = liveness.value(problem_key(liveness))
        raise RanksDiffer(
            told
            or f"compiled_fsdp: rank {rank.rank} of the group {rank.how} while others waited for it: it was killed, "
            "or an error ended it, which it has shown."
        )

    def wait(key: str) -> str:
        limit = liveness.timeout.total_seconds()
        value = wait_for(liveness, key, limit, gone, lambda: liveness.store.set(called, name))
        if value is None:
            raise RanksDiffer(
                f"compiled_fsdp: not all {liveness.size} ranks of the group came to the place where this one "
                f"{statement} within {liveness.timeout}; another rank failed, runs another model, or compiles for "
                f"longer than the process group's timeout (init_process_group(timeout=...)). {last_seen(own.missing())}"
            )
        return value

    try:
        own.come()
        if (heard := wait(own.heard)) == SAME:
            return None
        if heard != TELL:
            raise RanksDiffer(heard)
        own.tell()
        wait(own.decided)
        outcome = own.outcome()
    except dist.DistError as error:
        raise RanksDiffer(
            f"compiled_fsdp: while this rank {statement}, the process group's store could not be reached. {error}"
        ) from error
    if outcome.problem:
        raise RanksDiffer(outcome.problem)
    return outcome
