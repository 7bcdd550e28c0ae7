"""One rank of each machine compiles, and the others take its code from the cache on disk.

After all ranks have said that none has code, and that each could run any other's, the ranks of a machine part: one goes
on to compile. It says in the store when its code is in the cache, and the others look there.
"""

# Why: docs/design/ranks.md, "One rank of a machine compiles for the others"

from __future__ import annotations

import logging

import torch.distributed as dist

from compiled_fsdp.ranks.failures import RanksDiffer, naming_a_lost_store
from compiled_fsdp.ranks.liveness import Liveness, machine_id
from compiled_fsdp.ranks.waiting import wait_for

log = logging.getLogger(__name__)


class SharedCompile:
    """The ranks of this machine while one of them compiles for all."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        # The beginning of the keys of this machine's ranks in the store, for the compile that begins.
        self._here = ""
        self._leader = 0
        # The rank that compiles for this machine, and whether it is this one and others wait for it.
        self._compiler = 0
        self.is_awaited = False

    def begin(self, name: str, leader: int) -> None:
        """Note the round in which the ranks were asked about code, the same on all ranks, and the rank that leads."""
        self.say_that_code_is_kept()  # Dynamo has restarted the compile that others wait for: let them look and go on
        self._here, self._leader = f"{name}/on {machine_id()}", leader

    def compiles_here(self, folder: str) -> bool:
        """Whether this rank compiles.

        One rank of each machine does: the one that leads, or the lowest. So does a rank whose code is kept in another
        folder than that rank's.

        Args:
            folder: the folder of this rank's cache.
        """
        own = self._liveness.rank
        with naming_a_lost_store("found out which rank compiles", self._liveness):
            ranks = self._liveness.processes().keys() | {own}
            self._compiler = self._leader if self._leader in ranks else min(ranks)
            if own == self._compiler:
                self.is_awaited = len(ranks) > 1
                self._liveness.store.set(f"{self._here}/folder", folder)
                return True
            late = f"rank {self._compiler} of the group did not begin to compile"
            return wait_for(self._liveness, f"{self._here}/folder", late, lambda: [self._compiler]) != folder

    def wait_for_code(self) -> None:
        """Wait until this machine's rank has put its code into its cache.

        Raises:
            RanksDiffer: that rank has failed or is gone.
        """
        late = f"rank {self._compiler} of the group did not finish the code for this machine"
        with naming_a_lost_store("waited for code", self._liveness):
            key = f"{self._here}/kept"
            problem = wait_for(self._liveness, key, late, lambda: [self._compiler], compiling=self._compiler)
        if problem:
            raise RanksDiffer(problem)

    def say_that_code_is_kept(self, problem: str = "") -> None:
        """Tell the ranks that wait for this one's code to look into the cache; or why it will never be there."""
        if not self.is_awaited:
            return
        self.is_awaited = False
        try:
            self._liveness.store.set(f"{self._here}/kept", problem)
        except dist.DistError as unreachable:  # what follows says more
            log.warning("the ranks that wait for code could not be told of it: %s", unreachable)
