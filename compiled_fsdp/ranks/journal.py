"""The forwards that this rank has run, by position, and a thread that tells other ranks of them.

A rank that comes to code which no other rank has asks the others what they do at this position (``meeting.py``). Those
that run compiled code do not come to a meeting: they may be waiting inside of a collective for the very rank that asks.
So each rank counts the forwards of agreed plans that it begins, and keeps the last ones. While the count stands still,
a thread looks into the store whether somebody asks, and answers with what was run at that position.
"""

# Why: docs/design.md, note N78

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
"""Seconds between two looks of the thread; it looks into the store only if nothing was begun in between."""
_REMEMBERED = 4096


class Entry(Protocol):
    """A forward that has begun."""

    def statement(self) -> Statement:
        """What is told of it."""


class Journal:
    """The forwards of agreed plans that one rank has begun, in the ranks of one group.

    Attributes:
        position: how many there were. All ranks begin the same ones, so a position means the same on all of them.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.position = 0
        self._meetings = 0
        self._entries: list[Entry | None] = [None] * _REMEMBERED  # a ring
        self._thread: threading.Thread | None = None

    def begin(self, entry: Entry) -> None:
        """A forward of an agreed plan begins."""
        self._entries[self.position % _REMEMBERED] = entry
        self.position += 1  # after the entry: the thread may read in between
        self._meetings = 0

    def next_meeting(self) -> str:
        """The name of the next meeting at this position."""
        self._meetings += 1
        return f"{self.position}.{self._meetings}"

    def statement_at(self, position: int) -> Statement | None:
        """What was begun at a position; None if this rank has not come there, or has forgotten it."""
        if position >= self.position:
            return None
        entry = self._entries[position % _REMEMBERED]
        # Counted after the entry is read, and without the oldest: a later entry may be taking its place.
        return entry.statement() if entry is not None and self.position < position + _REMEMBERED else None

    def answer(self) -> None:
        """From now on a thread answers for this rank."""
        if self._thread is None and not self.liveness.alone:
            self._thread = threading.Thread(
                target=_answer, args=(weakref.ref(self),), name="compiled_fsdp journal", daemon=True
            )
            self._thread.start()


_stop = threading.Event()
atexit.register(_stop.set)


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
        except dist.DistError:  # the store has ended, and with it all that could be asked
            return
        del journal


def _look(journal: Journal, attendances: dict[str, Attendance]) -> None:
    """Answer a rank that asks for a meeting, and continue with meetings that are not over yet."""
    liveness = journal.liveness
    name = liveness.value(called_key(liveness))
    if name and name not in attendances:
        statement = journal.statement_at(position_of(name))
        attendance = None if statement is None else Attendance(liveness, name, statement)
        if attendance is not None and liveness.value(attendance.heard) is None:  # else it is over
            attendances[name] = attendance
            attendance.come()
    for known, attendance in list(attendances.items()):
        heard = liveness.value(attendance.heard)
        if heard == TELL:
            attendance.tell()
        if heard is not None:
            del attendances[known]
