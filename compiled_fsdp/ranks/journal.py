"""The journal of the forwards that this rank has run, by position, and a thread that tells other ranks about them.

A rank that reaches code which no other rank has asks the other ranks what they do at this position (``meeting.py``).
Ranks that run compiled code do not come to a meeting. They may even wait in a collective for the rank that asks. So
each rank counts the forwards of agreed plans that it begins, and keeps the last ones. While the count does not change,
a thread looks into the store for a question, and answers with the plan that this rank ran at that position.

For example, rank 0 has run four forwards and compiles a new graph in its fifth, so it asks about position 4. Rank 1
waits in a collective of its fifth forward. Its thread answers with the plan of that forward, and rank 0 follows it.
"""

# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Protocol

import torch.distributed as dist

from compiled_fsdp.ranks.liveness import Liveness
from compiled_fsdp.ranks.meeting import TELL, Attendance, called_key, position_of
from compiled_fsdp.ranks.statement import Statement

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 8.0
"""Seconds between two looks of the thread. It looks into the store only if no forward began in between."""
_REMEMBERED = 4096


class Entry(Protocol):
    """A forward that has begun."""

    def statement(self) -> Statement:
        """The statement about it for other ranks."""


class Journal:
    """The forwards of agreed plans over one group that this rank has begun.

    Attributes:
        position: how many have begun. All ranks begin the same forwards, so a position means the same on all of them.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.position = 0
        self._meetings = 0
        self._entries: list[Entry | None] = [None] * _REMEMBERED  # a ring
        self._thread: threading.Thread | None = None

    def begin(self, entry: Entry) -> None:
        """Note that a forward of an agreed plan begins."""
        self._entries[self.position % _REMEMBERED] = entry
        self.position += 1  # after the entry, because the thread may read in between
        self._meetings = 0

    def next_meeting(self) -> str:
        """The name of the next meeting at this position, for example "4.1" for the first one at position 4."""
        self._meetings += 1
        return f"{self.position}.{self._meetings}"

    def statement_at(self, position: int) -> Statement | None:
        """The statement of the forward at a position; None if this rank has not reached it, or has forgotten it."""
        if position >= self.position:
            return None
        entry = self._entries[position % _REMEMBERED]
        # The position is read after the entry, and the oldest entry does not count, because ``begin`` may replace it.
        return entry.statement() if entry is not None and self.position < position + _REMEMBERED else None

    def answer(self) -> None:
        """Start the thread that answers for this rank, if it does not run yet."""
        if self._thread is None and not self.liveness.alone:
            self._thread = threading.Thread(
                target=_answer, args=(weakref.ref(self),), name="compiled_fsdp journal", daemon=True
            )
            _threads.add(self._thread)
            self._thread.start()


_stop = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_LONGEST_JOIN = 10.0
"""Seconds to wait for a thread at exit: a store whose machine is gone may not answer for minutes."""


@atexit.register
def _end_threads() -> None:
    """End all threads, because one that is in a call of the store aborts the process when the interpreter ends."""
    _stop.set()
    for thread in list(_threads):
        thread.join(_LONGEST_JOIN)


def _answer(reference: weakref.ref[Journal]) -> None:
    pause, last = _FIRST_PAUSE, -1
    attendances: dict[str, Attendance] = {}
    while not _stop.wait(pause):
        journal = reference()
        if journal is None:
            return
        moves, last = journal.position != last, journal.position
        pause = _FIRST_PAUSE if moves or attendances else min(2 * pause, _LONGEST_PAUSE)
        if moves and not attendances:
            continue
        try:
            _look(journal, attendances)
        except dist.DistError:  # the store has ended, so nobody can ask any more
            return
        del journal


def _look(journal: Journal, attendances: dict[str, Attendance]) -> None:
    """Answer a rank that calls a meeting, and go on with the meetings that are not over."""
    liveness = journal.liveness
    name = liveness.value(called_key(liveness))
    if name and name not in attendances:
        statement = journal.statement_at(position_of(name))
        attendance = None if statement is None else Attendance(liveness, name, statement)
        if attendance is not None and liveness.value(attendance.heard) is None:  # else the meeting is over
            attendances[name] = attendance
            attendance.come()
    for known, attendance in list(attendances.items()):
        heard = liveness.value(attendance.heard)
        if heard == TELL:
            attendance.tell()
        if heard is not None:
            del attendances[known]
