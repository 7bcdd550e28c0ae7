"""Signs of life of ranks that compile, so that ranks that wait for them notice which one is gone, on any machine.

While a rank compiles, a thread writes a sign of life into the group's key-value store every second. The signs count
only between machines. On the same machine a rank sees whether a process has ended, and silence means nothing, because a
process may be stopped in a debugger.
"""

# Why: docs/design/ranks.md, "Heartbeats while ranks compile, and at no other time"

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.ranks.liveness import Liveness

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 8.0
"""Seconds without a sign of life after which a rank that compiles on another machine counts as gone."""

# Numbers of signs. No number repeats, so a sign that stays the same is an old one.
_numbers = itertools.count()

_Sign = tuple[int, str, int]  # its number; host name and process id, for error messages


def _key(liveness: Liveness, rank: int) -> str:
    return f"{liveness.prefix}/beat/{rank}"


@contextlib.contextmanager
def beating(liveness: Liveness | None) -> Iterator[None]:
    """A context that gives signs of life to the other ranks of a group; None: there is no group."""
    if liveness is None or liveness.alone:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(liveness, stop), name="compiled_fsdp heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(BEAT)  # the thread takes longer only if the store does not answer


def _beat(liveness: Liveness, stop: threading.Event) -> None:
    key, store = _key(liveness, liveness.rank), liveness.store
    try:
        while True:
            store.set(key, json.dumps([next(_numbers), socket.gethostname(), os.getpid()]))
            if stop.wait(BEAT):
                break
        store.set(key, "")  # from here on this rank's silence means nothing
    except dist.DistError as error:  # the rank itself gets this error, too, when it next asks the store
        log.debug("this rank's heartbeat could not be posted: %s", error)


def sign_of(liveness: Liveness, rank: int) -> str:
    """The latest sign of life of a rank, another one every few seconds while it compiles; "" if it does not."""
    return liveness.value(_key(liveness, rank)) or ""


class Gone(NamedTuple):
    """A rank that is gone.

    Attributes:
        rank: its place in the group.
        how: the evidence, for error messages: for example "has ended (process 7)".
    """

    rank: int
    how: str


class Watch:
    """Looks for ranks that are gone while this rank waits for them.

    Rank 0 listens to all other ranks. They listen only to rank 0, which tells them if a rank is gone. So the number of
    requests to the store grows with the number of ranks, and not with its square.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._listens_to = [0] if liveness.rank != 0 else list(range(1, liveness.size))
        self._heard: dict[int, tuple[str, float]] = {}  # the last sign, and when it came

    def gone(self) -> Gone | None:
        """The first rank that is found to be gone; None if there is none. Call it about once a second."""
        here = self._liveness.processes()
        if (ended := self._liveness.ended(here)) is not None:
            return Gone(ended[0], f"has ended (process {ended[1]})")
        elsewhere = [rank for rank in self._listens_to if rank not in here]
        signs = self._liveness.values([_key(self._liveness, rank) for rank in elsewhere])
        now = time.monotonic()
        for rank, sign in zip(elsewhere, signs, strict=True):
            if not sign:
                self._heard.pop(rank, None)
            elif self._heard.get(rank, ("", 0.0))[0] != sign:
                self._heard[rank] = sign, now
            elif (silent := now - self._heard[rank][1]) > SILENCE:
                _, host, pid = from_json(_Sign, sign)
                return Gone(rank, f"has given no sign of life for {silent:.0f} s (process {pid} on {host!r})")
        return None
