"""How ranks agree on a region's plan without a collective: through the process group's key-value store.

Ranks compile at different times and different variants, legally: another batch size on one rank, one rank compiling again
alone. A collective inside the compiler would then pair with another rank's training collective. So the first time a region
is planned, the group's first rank posts its plan and every rank says in one counter whether it fits; later variants take
the plan locally. First plannings happen in the same order on all ranks (their collectives do), so they are numbered, and a
rank with another region finds out at once: an error on every rank that names the first difference, not a hang.
"""

from __future__ import annotations

import itertools
import json
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.compat import store_of

if TYPE_CHECKING:
    from compiled_fsdp.group import ShardGroup

log = logging.getLogger(__name__)

Signature = tuple[str, ...]

_FAILED = "failed"
_TOLD = "_compiled_fsdp_told"  # on an error that the other ranks know of

# Rounds of agreement by group name. A store outlives the models that are sharded over its group, so numbers go on.
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class RanksDiffer(RuntimeError):
    """The ranks of a process group compile different regions, or one of them failed."""


class Agreement:
    """What the ranks of one group have agreed on so far."""

    def __init__(self, group: ShardGroup) -> None:
        # no reference to the group: it is the key under which this object is found
        self._name, self._rank, self._size = _name(group), group.place, len(group.ranks)
        own = self._size == group.size
        # ranks of a larger mesh than one process group's meet in the default group's store
        self._store, self._timeout = store_of(group.process_group if own else None)
        self._prefix = "compiled_fsdp" if own else f"compiled_fsdp/{self._name}"
        self._known: dict[tuple[Signature, str, Signature], str] = {}

    def agree(
        self, signature: Signature, what: str, propose: Callable[[], str], detail: Signature = (), who: Signature = (),
        patience: timedelta | None = None,
    ) -> str:  # fmt: skip
        """The group's decision on ``what`` (a phase, or the set of re-gathers) for the region with this signature.

        ``detail`` has to agree, too: the buckets that the decision is about. So has ``who`` the first time: the parameters'
        names. Equal layers share regions, and ranks that run different ones would mix them up.

        ``patience``: how long to wait for the others where they may not come; the group's timeout if that is less, or None.

        ``propose`` is called on the first rank (its proposal is the decision) and wherever there is no other rank.

        Raises:
            RanksDiffer: another rank is at another region, failed, or did not come within the group's timeout.
        """
        key = (signature, what, detail)
        if key not in self._known:
            limit = self._timeout if patience is None else min(patience, self._timeout)
            self._known[key] = self._decide(signature, what, propose, detail, who, limit)
        return self._known[key]

    def knows(self, signature: Signature, what: str, detail: Signature = ()) -> bool:
        """Whether ``agree`` would give an earlier decision, and ask no rank."""
        return (signature, what, detail) in self._known

    def _decide(
        self,
        signature: Signature,
        what: str,
        propose: Callable[[], str],
        detail: Signature,
        who: Signature,
        limit: timedelta,
    ) -> str:
        if self._store is None or self._size == 1:
            return propose()
        name = f"{self._prefix}/{next(_rounds[self._name])}"
        store, rank = self._store, self._rank
        if rank == 0:
            try:
                decision = propose()
            except BaseException as error:  # the others wait in this round already
                self._tell(name, error)
                setattr(error, _TOLD, True)
                raise
            store.set(f"{name}/plan", json.dumps([what, signature, detail, who, decision]))
        else:
            posted = self._wait(
                f"{name}/plan", f"rank 0 of the group posted no plan for the {what} of", signature, limit
            )
            their_what, their_signature, their_detail, their_who, decision = json.loads(posted)
            if their_what == _FAILED:
                raise RanksDiffer(decision)
            difference = _first_difference((what, *signature), (their_what, *their_signature), "read", 3)
            difference = difference or _first_difference(detail, tuple(their_detail), "collective", 0)
            difference = difference or _first_difference(who, tuple(their_who), "parameter", 0)
            if difference:
                mine, theirs = difference
                self._fail(name, f"compiled_fsdp: ranks compile different regions. Rank {rank} of the group has: {mine}; rank 0 has: {theirs}. "
                                 "Every rank must run the same sharded model with the same options.")  # fmt: skip
        if store.add(f"{name}/fits", 1) == self._size:
            store.set(f"{name}/done", "")
        problem = self._wait(
            f"{name}/done", f"not all {self._size} ranks of the group came to the {what} of", signature, limit
        )
        if problem:
            raise RanksDiffer(problem)
        log.debug("%s of a region of %d reads agreed on by %d ranks as %s", what, len(signature) - 1, self._size, name)
        return decision

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, which come to the next round or wait in it, that this rank failed to compile."""
        if self._store is None or self._size == 1 or hasattr(error, _TOLD):
            return
        self._tell(f"{self._prefix}/{next(_rounds[self._name])}", error)

    def _tell(self, name: str, error: BaseException) -> None:
        assert self._store is not None
        problem = f"compiled_fsdp: rank {self._rank} of the group failed to compile: {type(error).__name__}: {error}"
        if self._rank == 0:
            self._store.set(f"{name}/plan", json.dumps([_FAILED, [], [], [], problem]))
        self._store.set(f"{name}/done", problem)

    def _fail(self, name: str, problem: str) -> None:
        assert self._store is not None
        self._store.set(f"{name}/done", problem)
        raise RanksDiffer(problem)

    def _wait(self, key: str, what: str, signature: Signature, limit: timedelta) -> str:
        assert self._store is not None
        try:
            self._store.wait([key], limit)
            return self._store.get(key).decode()
        except (dist.DistStoreError, dist.DistError, RuntimeError) as error:
            raise RanksDiffer(
                f"compiled_fsdp: {what} this region ({len(signature) - 1} reads, the first: {signature[1] if len(signature) > 1 else 'none'}) "
                f"within {limit}; another rank failed, runs another model, or compiles for longer than the process group's timeout "
                "(init_process_group(timeout=...))."
            ) from error


def _first_difference(mine: Signature, theirs: Signature, what: str, first: int) -> tuple[str, str] | None:
    """The first lines that differ; from line ``first`` on they are numbered as ``what``."""
    for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs, fillvalue="nothing more")):
        if a != b:
            where = f"{what} {i - first}: " if i >= first else "the plan of its " if i == 0 else ""
            return where + a, where + b
    return None


# By name, as long as the process group lives: what a rank knows must not depend on when it collected a deleted model.
_agreements: dict[str, tuple[weakref.ref[dist.ProcessGroup], Agreement]] = {}


def agreement_of(group: ShardGroup) -> Agreement:
    """The agreement among the ranks of ``group``."""
    name = _name(group)
    reference, agreement = _agreements.get(name, (None, None))
    if agreement is None or reference is None or reference() is not group.process_group:
        agreement = Agreement(group)
        _agreements[name] = (weakref.ref(group.process_group), agreement)
    return agreement


def tell_everyone(error: BaseException) -> None:
    """Tell all ranks that this one agrees with on anything that it failed, as ``Agreement.abandon`` does."""
    for reference, agreement in _agreements.values():
        if reference() is not None:
            agreement.abandon(error)


def _name(group: ShardGroup) -> str:
    """The same on all ranks that agree."""
    return group.name if len(group.ranks) == group.size else f"ranks {','.join(map(str, group.ranks))}"
