"""How ranks agree on a region's plan without a collective: through the process group's key-value store.

Ranks compile at different times and different variants, legally: another batch size on one rank, one rank compiling again
alone. A collective inside the compiler would then pair with another rank's training collective. So the first time a region
is planned, the group's first rank posts its plan and every rank says in one counter whether it fits; later variants take
the plan locally. First plannings happen in the same order on all ranks (their collectives do), so they are numbered, and a
rank with another region finds out at once: an error on every rank that names the first difference, not a hang.
"""

# Why: docs/design.md, note N31; docs/design.md, note N33

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from compiled_fsdp.compat import store_of
from compiled_fsdp.compiler.processes import born, machine

if TYPE_CHECKING:
    from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)

Signature = tuple[str, ...]

_FAILED = "failed"
_TOLD = "_compiled_fsdp_told"  # on an error that the other ranks know of

# Rounds of agreement by group name. A store outlives the models that are sharded over its group, so numbers go on.
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


_PAUSE = 0.2  # seconds between two looks for what is waited for, at most
_LOOKS = 1.0  # seconds between two looks at whether the others' processes still run
_NAMED = 4  # of several ranks that did not come


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
        self._posted: set[str] = set()
        self._sign_in()

    def _sign_in(self) -> None:
        """Say which process this rank is, for the others on this machine."""
        if self._store is not None and self._size > 1 and machine() is not None:
            here = f"{self._prefix}/on {machine()}"
            number = self._store.add(here, 1)
            self._store.set(f"{here}/{number}", json.dumps([self._rank, os.getpid(), born(os.getpid())]))

    def agree(
        self, signature: Signature, what: str, propose: Callable[[], str], detail: Signature = (), who: Signature = (),
        patience: timedelta | None = None, model: Callable[[], Signature] = tuple,
    ) -> str:  # fmt: skip
        """The group's decision on ``what`` (a phase, or the set of re-gathers) for the region with this signature.

        ``detail`` has to agree, too: the buckets that the decision is about. So has ``who`` the first time: the parameters'
        names. Equal layers share regions, and ranks that run different ones would mix them up. And ``model``, all parameters ("name: what
        it is") of the models that are read: one more equal layer compiles nothing, and so is asked about nowhere else.

        ``patience``: how long to wait for the others where they may not come; the group's timeout if that is less, or None.

        ``propose`` is called on the first rank (its proposal is the decision) and wherever there is no other rank.

        Raises:
            RanksDiffer: another rank is at another region, failed, or did not come within the group's timeout.
        """
        key = (signature, what, detail)
        if key not in self._known:
            limit = self._timeout if patience is None else min(patience, self._timeout)
            try:
                self._known[key] = self._decide(signature, what, propose, detail, who, limit, model())
            except dist.DistError as error:
                raise RanksDiffer(
                    f"compiled_fsdp: while this rank agreed with the others on the {what} of {_named(signature, who)}, the process group's store "
                    f"could not be reached: the process that serves it, mostly rank 0's, has ended. {error}"
                ) from error
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
        model: Signature,
    ) -> str:
        if self._store is None or self._size == 1:
            return propose()
        number = next(_rounds[self._name])
        name = f"{self._prefix}/{number}"
        store, rank = self._store, self._rank
        self._note(number, f"came to the {what} of {_named(signature, who)}")
        if rank == 0:
            try:
                decision = propose()
            except BaseException as error:  # the others wait in this round already
                self._tell(name, error)
                setattr(error, _TOLD, True)
                raise
            store.set(f"{name}/plan", json.dumps([what, signature, detail, who, self._post(model), decision]))
        else:
            posted = self._wait(
                name, "plan", f"rank 0 of the group posted no plan for the {what} of", signature, who, limit
            )
            theirs = json.loads(posted)
            if theirs[0] == _FAILED:
                raise RanksDiffer(theirs[-1])
            if difference := self._difference([what, signature, detail, who], model, theirs):
                self._fail(name, f"compiled_fsdp: ranks compile different regions. Rank {rank} of the group has: {difference[0]}; rank 0 has: "
                                 f"{difference[1]}. Every rank must run the same sharded model with the same options.")  # fmt: skip
            decision = theirs[-1]
        if store.add(f"{name}/fits", 1) == self._size:
            store.set(f"{name}/done", "")
        problem = self._wait(
            name, "done", f"not all {self._size} ranks of the group came to the {what} of", signature, who, limit
        )
        if problem:
            raise RanksDiffer(problem)
        log.debug("%s of a region of %d reads agreed on by %d ranks as %s", what, len(signature) - 2, self._size, name)
        return decision

    def _post(self, model: Signature) -> str:
        """The model's digest; its text is in the store under it."""
        text = json.dumps(model)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._rank == 0 and digest not in self._posted:
            assert self._store is not None
            self._store.set(f"{self._prefix}/model/{digest}", text)
            self._posted.add(digest)
        return digest

    def _difference(self, mine: list[Any], model: Signature, theirs: list[Any]) -> tuple[str, str] | None:
        """The first difference from what rank 0 has posted. Regions come before phases, which options and layers change."""
        what, signature, detail, who = mine
        their_what, their_signature, their_detail, their_who, digest, _ = theirs
        difference = None
        if list(signature) != their_signature:
            named = _with_names(signature, who), _with_names(tuple(their_signature), tuple(their_who))
            difference = _first_difference(*named, "read", 2)
        difference = difference or _first_difference((what,), (their_what,), "", 1)
        difference = difference or _first_difference(detail, tuple(their_detail), "collective", 0)
        difference = difference or _first_difference(who, tuple(their_who), "parameter", 0)
        if difference or self._post(model) == digest:
            return difference
        assert self._store is not None
        return _difference_of_models(model, json.loads(self._store.get(f"{self._prefix}/model/{digest}").decode()))

    def _note(self, number: int, text: str) -> None:
        """Where this rank is, for the others' errors."""
        assert self._store is not None
        self._store.set(f"{self._prefix}/at/{self._rank}", json.dumps([number, text]))

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, which come to the next round or wait in it, that this rank failed to compile."""
        if self._store is None or self._size == 1 or hasattr(error, _TOLD):
            return
        number = next(_rounds[self._name])
        try:
            self._note(number, f"failed to compile: {type(error).__name__}")
            self._tell(f"{self._prefix}/{number}", error)
        except dist.DistError as unreachable:  # this rank's own error says more
            log.warning("the other ranks could not be told of an error: %s", unreachable)

    def _tell(self, name: str, error: BaseException) -> None:
        problem = f"compiled_fsdp: rank {self._rank} of the group failed to compile: {type(error).__name__}: {error}"
        self._end(name, problem, in_place_of_rank_0=self._rank == 0)

    def _end(self, name: str, problem: str, *, in_place_of_rank_0: bool) -> None:
        """End a round with a problem, on all ranks."""
        assert self._store is not None
        if in_place_of_rank_0:
            self._store.set(f"{name}/plan", json.dumps([_FAILED, [], [], [], "", problem]))
        self._store.set(f"{name}/done", problem)

    def _fail(self, name: str, problem: str) -> None:
        self._end(name, problem, in_place_of_rank_0=False)
        raise RanksDiffer(problem)

    def _wait(self, name: str, key: str, what: str, signature: Signature, who: Signature, limit: timedelta) -> str:
        """What comes under a round's key; meanwhile, whether those who are waited for still live."""
        until = time.monotonic() + limit.total_seconds()
        looked, pause = time.monotonic(), 0.001
        # not the store's own wait: a TCPStore writes two warnings for each that ends without an answer
        while (value := self._value(f"{name}/{key}")) is None:
            now = time.monotonic()
            if now >= until:
                missing = self._where(self._missing(int(name.rpartition("/")[2])))
                raise RanksDiffer(
                    f"compiled_fsdp: {what} {_named(signature, who)} within {limit}; another rank failed, runs another model, or compiles for longer "
                    f"than the process group's timeout (init_process_group(timeout=...)). {missing}"
                )
            if now - looked >= _LOOKS:
                looked = now
                if (ended := self._ended()) is not None and self._value(f"{name}/{key}") is None:
                    rank, pid = ended
                    # before it ended it may have said why
                    problem = self._value(f"{name}/done") or (
                        f"compiled_fsdp: rank {rank} of the group has ended (process {pid}) while others waited for it to compile: it was killed, or "
                        f"an error ended it, which it has shown. {self._where([rank])}"
                    )
                    self._end(name, problem, in_place_of_rank_0=rank == 0)
                    raise RanksDiffer(problem)
            time.sleep(min(pause, max(until - now, 0.0)))
            pause = min(1.5 * pause, _PAUSE)
        return value

    def _value(self, key: str) -> str | None:
        """What is in the store under a key, if anything is."""
        assert self._store is not None
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _ended(self) -> tuple[int, int] | None:
        """A rank whose process was on this machine and runs no more, and that process."""
        assert self._store is not None
        if machine() is None:
            return None
        here = f"{self._prefix}/on {machine()}"
        entries = (self._value(f"{here}/{n + 1}") for n in range(self._store.add(here, 0)))
        newest = {rank: (pid, began) for rank, pid, began in (json.loads(entry) for entry in entries if entry)}
        return next(((rank, pid) for rank, (pid, began) in newest.items() if born(pid) != began), None)

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round."""
        return [rank for rank in range(self._size) if self._at(rank)[0] < number]

    def _where(self, ranks: list[int]) -> str:
        """Where ranks were last seen."""
        said = [f"Rank {rank} last {self._at(rank)[1]}." for rank in ranks[:_NAMED]]
        return " ".join(said) + (f" So did {len(ranks) - _NAMED} more ranks not come." if len(ranks) > _NAMED else "")

    def _at(self, rank: int) -> tuple[int, str]:
        noted = self._value(f"{self._prefix}/at/{rank}")
        if noted is None:
            return -1, "did nothing here: it has never come to an agreement of this group"
        number, text = json.loads(noted)
        return number, text


def _named(signature: Signature, who: Signature) -> str:
    """A region, for people: ``signature`` has its options and its kind ahead of the reads."""
    reads, kind = signature[2:], signature[1] if len(signature) > 1 else "no kind"
    first = f", the first: {_with_names(signature, who)[2]}" if reads else ""
    return f"this region ({kind}, {len(reads)} reads{first})"


def _with_names(signature: Signature, who: Signature) -> Signature:
    names = itertools.chain(who, itertools.repeat(""))
    reads = (f"{name} {read}" if name else read for read, name in zip(signature[2:], names, strict=False))
    return (*signature[:2], *reads)


def _difference_of_models(mine: Signature, theirs: list[str]) -> tuple[str, str]:
    """A parameter that only one of both has, or that they have differently."""
    ours, others = [dict(line.split(": ", 1) for line in model) for model in (mine, theirs)]
    name = next((name for name in ours | others if ours.get(name) != others.get(name)), None)
    if name is None:  # two models with equal names
        extra = list((Counter(mine) - Counter(theirs)).elements()), list((Counter(theirs) - Counter(mine)).elements())
        return tuple(lines[0] if lines else "nothing more" for lines in extra)  # type: ignore[return-value]
    return tuple(f"{name}: {of[name]}" if name in of else f"no {name}" for of in (ours, others))  # type: ignore[return-value]


def _first_difference(mine: Signature, theirs: Signature, what: str, first: int) -> tuple[str, str] | None:
    """The first entries that differ, and of entries with several lines only the lines that do; from entry ``first`` on they are numbered
    as ``what``. Without a name it is a plan."""
    for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs, fillvalue="nothing more")):
        if a != b:
            where = f"{what} {i - first}: " if i >= first else "" if what else "the plan of its "
            lines = [(x, y) for x, y in itertools.zip_longest(a.splitlines(), b.splitlines(), fillvalue="") if x != y]
            return where + ", ".join(x for x, _ in lines), where + ", ".join(y for _, y in lines)
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
