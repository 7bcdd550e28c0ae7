"""Which process each rank of a group is, and whether the other ranks' processes still run.

Each rank writes its process into the group's key-value store when a model is sharded over the group. A rank that waits
for another one can then see that the other's process has ended, and need not wait for the group's timeout. That is seen
on the same machine; ``heartbeat.py`` has what is seen of others.
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
    """The ranks that run the same collectives, as processes, and the key-value store where they meet.

    Attributes:
        name: of the group, the same on all of its ranks.
        rank: this rank's place among them.
        size: how many ranks there are.
        store: the key-value store; None if the group has no other processes (the "fake" backend).
        timeout: the process group's.
        prefix: of all keys of this group in the store.
    """

    def __init__(self, group: ShardGroup) -> None:
        # No reference to the group: it is the key under which this object is found.
        self.name, self.rank, self.size = _name(group), group.place, len(group.ranks)
        one_group = self.size == group.size
        # The ranks of a mesh that is larger than one process group meet in the default group's store.
        self.store: Any
        self.store, self.timeout = store_of(group.process_group if one_group else None)
        self.prefix = "compiled_fsdp" if one_group else f"compiled_fsdp/{self.name}"
        self._seen: dict[int, tuple[int, str]] = {}
        self._sign_in()

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self.store is None or self.size == 1

    def value(self, key: str) -> str | None:
        """What is in the store under a key, if anything is."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """What is in the store under each key; in two questions, if all are there and the store can do that."""
        if keys and self.store.has_extended_api() and self.store.check(list(keys)):
            return [value.decode() for value in self.store.multi_get(list(keys))]
        return [self.value(key) for key in keys]

    def processes(self) -> dict[int, tuple[int, str]]:
        """The process (its id, and when it began) of each rank that has signed in on this machine."""
        if machine_id() is None:
            return {}
        here = f"{self.prefix}/on {machine_id()}"
        entries = self.values([f"{here}/{n + 1}" for n in range(self.store.add(here, 0))])
        found = {rank: (pid, start) for rank, pid, start in (from_json(_Entry, entry) for entry in entries if entry)}
        self._seen = found
        return found

    def look(self) -> None:
        """See which processes there are, unless all were seen: later the store may be gone."""
        if not self.alone and len(self._seen) < self.size:
            self.processes()

    def seen_to_end(self) -> dict[int, int]:
        """Of the processes that were seen last those that have ended, by rank; does not ask the store."""
        return _ended(self._seen)

    def ended(self, processes: Mapping[int, tuple[int, str]] | None = None) -> tuple[int, int] | None:
        """A rank whose process ran on this machine and has ended, and the id of that process.

        ``processes``: what ``processes()`` gave.
        """
        found = self.processes() if processes is None else processes
        ended = _ended(found)
        if not ended:
            return None
        # Others may have ended because that one has: all ranks name the one that was seen first.
        first = int(self.store.compare_set(f"{self.prefix}/ended", "", str(min(ended))))
        rank = first if first in ended else min(ended)
        return rank, ended[rank]

    def _sign_in(self) -> None:
        """Write which process this rank is, for the other ranks on this machine."""
        if not self.alone and machine_id() is not None:
            here = f"{self.prefix}/on {machine_id()}"
            number = self.store.add(here, 1)
            self.store.set(f"{here}/{number}", json.dumps([self.rank, os.getpid(), start_time(os.getpid())]))


def _ended(processes: Mapping[int, tuple[int, str]]) -> dict[int, int]:
    """Those that have ended, by rank, in their order."""
    return {rank: pid for rank, (pid, start) in sorted(processes.items()) if start_time(pid) != start}


_Entry = tuple[int, int, str]  # rank, process, and when that began

# By name, as long as the process group lives in whose store the ranks meet: what a rank knows must not depend on when
# it collected a deleted model, and what was written under a name is there for as long as the store.
_signed_in: dict[str, tuple[weakref.ref[dist.ProcessGroup], Liveness]] = {}


def sign_in(group: ShardGroup) -> Liveness:
    """The processes of a group's ranks.

    From the first call on, other ranks can see it if this process ends.
    """
    name, owner = _name(group), group.process_group if len(group.ranks) == group.size else dist.group.WORLD
    assert owner is not None  # a group has been made
    reference, liveness = _signed_in.get(name, (None, None))
    if liveness is None or reference is None or reference() is not owner:
        liveness = Liveness(group)
        _signed_in[name] = (weakref.ref(owner), liveness)
    return liveness


def all_signed_in() -> Iterator[Liveness]:
    """Every group that this process has signed in to and that still exists."""
    return (liveness for reference, liveness in list(_signed_in.values()) if reference() is not None)


def _name(group: ShardGroup) -> str:
    """The same on all ranks that run the same collectives."""
    return group.name if len(group.ranks) == group.size else f"ranks {','.join(map(str, group.ranks))}"


# ---- whether a process of this machine still runs, which only Linux tells --------------------------------------------
@functools.cache
def machine_id() -> str | None:
    """The same for all processes that can see each other; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """When a process began, in ticks since the machine's start; None if it has ended, reaped or not."""
    try:
        # After the name, which may contain anything: the state, and the start time 19 fields later.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else rest[18]
