"""The processes of a group's ranks, and whether they still run.

Each rank writes its process id into the group's key-value store when a model is sharded over the group. So a rank that
waits for another rank can see that the other rank's process has ended, and need not wait for the group's timeout. This
works on the same machine; ``heartbeat.py`` watches ranks on other machines.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.compat.autograd import store_of
from compiled_fsdp.sharding.process_groups import ShardGroup


class Liveness:
    """The processes of the ranks that run the same collectives, and the key-value store where the ranks meet.

    Attributes:
        name: the group's name, the same on all of its ranks.
        rank: this rank's place in the group.
        size: the number of ranks.
        store: the key-value store; None if the group has no other processes (the "fake" backend).
        timeout: the process group's timeout.
        prefix: the beginning of all keys of this group in the store.
    """

    def __init__(self, group: ShardGroup) -> None:
        # Without a reference to the group, so that this object does not keep the process group alive.
        self.name, self.rank, self.size = _name(group), group.place, len(group.ranks)
        one_group = group.group_of_all is not None
        # The ranks of a mesh that is larger than one process group meet in the default group's store.
        self.store: Any
        self.store, self.timeout = store_of(group.group_of_all)
        self.prefix = "compiled_fsdp" if one_group else f"compiled_fsdp/{self.name}"
        self._seen: dict[int, tuple[int, str]] = {}
        self._sign_in()

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self.store is None or self.size == 1

    def value(self, key: str) -> str | None:
        """The value under a key in the store; None if there is none."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """The values under several keys; with two requests, if all keys are there and the store can do that."""
        if keys and self.store.has_extended_api() and self.store.check(list(keys)):
            return [value.decode() for value in self.store.multi_get(list(keys))]
        return [self.value(key) for key in keys]

    def processes(self) -> dict[int, tuple[int, str]]:
        """The processes of the ranks that have signed in on this machine, by rank: the id, and when it began."""
        if machine_id() is None:
            return {}
        here = f"{self.prefix}/on {machine_id()}"
        entries = self.values([f"{here}/{n + 1}" for n in range(self.store.add(here, 0))])
        found = {rank: (pid, start) for rank, pid, start in (from_json(_Entry, entry) for entry in entries if entry)}
        self._seen = found
        return found

    def look(self) -> None:
        """Remember the processes, unless all are known already, because later the store may be gone."""
        if not self.alone and len(self._seen) < self.size:
            self.processes()

    def seen_to_end(self) -> dict[int, int]:
        """The ids of the remembered processes that have ended, by rank. It does not ask the store."""
        return _ended(self._seen)

    def ended(self, processes: Mapping[int, tuple[int, str]] | None = None) -> tuple[int, int] | None:
        """A rank whose process ran on this machine and has ended, and the id of that process; None if there is none.

        ``processes``: the result of ``processes()``, if the caller has it.
        """
        found = self.processes() if processes is None else processes
        ended = _ended(found)
        if not ended:
            return None
        # Others may have ended because of the first one, so all ranks name the one that was seen first.
        first = int(self.store.compare_set(f"{self.prefix}/ended", "", str(min(ended))))
        rank = first if first in ended else min(ended)
        return rank, ended[rank]

    def _sign_in(self) -> None:
        """Write this rank's process into the store, for the other ranks on this machine."""
        if not self.alone and machine_id() is not None:
            here = f"{self.prefix}/on {machine_id()}"
            number = self.store.add(here, 1)
            self.store.set(f"{here}/{number}", json.dumps([self.rank, os.getpid(), start_time(os.getpid())]))


def _ended(processes: Mapping[int, tuple[int, str]]) -> dict[int, int]:
    """The ids of the processes that have ended, by rank, in the order of ranks."""
    return {rank: pid for rank, (pid, start) in sorted(processes.items()) if start_time(pid) != start}


_Entry = tuple[int, int, str]  # rank, process id, and when the process began

# By name, each with the process group in whose store the ranks meet. An entry is valid as long as that group lives, and
# not as long as a model: ranks may collect a deleted model at different times, and the keys stay in the store.
_signed_in: dict[str, tuple[weakref.ref[dist.ProcessGroup], Liveness]] = {}


def sign_in(group: ShardGroup) -> Liveness:
    """The ``Liveness`` of a group's ranks.

    The first call signs this process in: from then on other ranks can see if it ends.
    """
    name, owner = _name(group), group.group_of_all or dist.group.WORLD
    assert owner is not None  # because a group exists
    reference, liveness = _signed_in.get(name, (None, None))
    if liveness is None or reference is None or reference() is not owner:
        liveness = Liveness(group)
        _signed_in[name] = (weakref.ref(owner), liveness)
    return liveness


def all_signed_in() -> Iterator[Liveness]:
    """Every group that this process has signed in to and that still exists."""
    return (liveness for reference, liveness in list(_signed_in.values()) if reference() is not None)


def _name(group: ShardGroup) -> str:
    """The group's name, which is the same on all ranks that run the same collectives."""
    of_all = group.group_of_all
    return f"ranks {','.join(map(str, group.ranks))}" if of_all is None else of_all.group_name


# ---- whether a process of this machine still runs (on Linux only) ----------------------------------------------------
@functools.cache
def machine_id() -> str | None:
    """An id that is equal in all processes that can see each other; None if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """When a process began, in clock ticks since the machine's start; None if it has ended, even if it is a zombie."""
    try:
        # The state follows the name, which may contain anything; the start time is 19 fields behind the state.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else rest[18]
