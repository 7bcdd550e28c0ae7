"""How ranks agree on a region's plan without a collective: through the process group's key-value store.

Ranks may compile at different times and compile different variants: another batch size on one rank, one rank compiling
again alone. A collective inside the compiler would then pair with another rank's training collective. So the first time
a region is planned, the group's first rank posts its plan and every rank says in one counter whether it fits; later
variants take the plan without asking. First plannings happen in the same order on all ranks (their collectives do), so
they are numbered, and a rank with another region finds out at once: an error on every rank that names the first
difference, not a hang.
"""

# Why: docs/design.md, note N31; docs/design.md, note N33

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch.distributed as dist

from compiled_fsdp.sharding.liveness import Liveness, all_signed_in, sign_in

if TYPE_CHECKING:
    from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)

Signature = tuple[str, ...]

_FAILED = "failed"
_TOLD = "_compiled_fsdp_told"  # set on an error that the other ranks know of

# Rounds of agreement by group name. A store outlives the models that are sharded over its group, so numbers go on.
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

_LONGEST_PAUSE = 0.2  # seconds between two looks into the store
_SECONDS_BETWEEN_LIVENESS_CHECKS = 1.0
_MOST_RANKS_NAMED = 4  # in an error about ranks that did not come


class RanksDiffer(RuntimeError):
    """The ranks of a process group compile different regions, or one of them failed."""


class _Question(NamedTuple):
    """What the ranks agree on in one round, as far as all of them must ask the same.

    Attributes:
        topic: a phase, or what else is decided for a region.
        signature: the region's options, its kind, and a line for each read.
        collectives: what the decision is about, a line for each.
        param_names: of the parameters that are read, in the order of the reads.
    """

    topic: str
    signature: Signature
    collectives: Signature
    param_names: Signature

    def __str__(self) -> str:
        return f"{self.topic} of {_region_for_people(self.signature, self.param_names)}"


class Agreement:
    """What the ranks of one group have agreed on so far."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._store = liveness.store
        self._rank, self._size, self._prefix = liveness.rank, liveness.size, liveness.prefix
        self._decisions: dict[tuple[Signature, str, Signature], str] = {}
        self._posted_models: set[str] = set()

    def agree(
        self,
        signature: Signature,
        topic: str,
        propose: Callable[[], str],
        collectives: Signature = (),
        param_names: Signature = (),
        timeout: timedelta | None = None,
        model: Callable[[], Signature] = tuple,
    ) -> str:
        """The group's decision on a topic for the region with this signature.

        Args:
            signature: has to be the same on all ranks.
            topic: what is decided: the plan of a phase, or the set of parameters that are gathered again.
            propose: called on the first rank, whose proposal is the decision, and wherever there is no other rank.
            collectives: those that the decision is about; they have to be the same, too.
            param_names: of the reads; they have to be the same the first time. Equal layers share regions, and ranks
                that run different layers would mix them up.
            timeout: how long to wait for the others where they may not come; the group's timeout if that is less, or
                None.
            model: all parameters ("name: what it is") of the models that are read, which have to be the same the first
                time. One more equal layer compiles nothing, so nothing else would notice it.

        Raises:
            RanksDiffer: another rank is at another region, failed, or did not come within the timeout.
        """
        key = (signature, topic, collectives)
        if key not in self._decisions:
            question = _Question(topic, signature, collectives, param_names)
            limit = self.liveness.timeout if timeout is None else min(timeout, self.liveness.timeout)
            with _naming_a_lost_store(question):
                self._decisions[key] = self._decide(question, propose, limit, model())
        return self._decisions[key]

    def have_all_the_same(
        self,
        signature: Signature,
        topic: str,
        value: str,
        param_names: Signature = (),
        model: Callable[[], Signature] = tuple,
    ) -> bool:
        """Whether ``value`` is the same on all ranks of the group, which is asked anew each time.

        Other arguments and errors are those of ``agree``.
        """
        if self.liveness.alone:
            return True
        question = _Question(topic, signature, (), param_names)
        with _naming_a_lost_store(question):
            name, decision = self._round(question, lambda: value, self.liveness.timeout, model(), mine=value)
            return decision == value and self._store.add(f"{name}/others", 0) == 0

    def adopt(self, signature: Signature, topic: str, collectives: Signature, decision: str) -> None:
        """Take a decision that all ranks have in common in another way."""
        self._decisions[signature, topic, collectives] = decision

    def decision(self, signature: Signature, topic: str, collectives: Signature = ()) -> str | None:
        """The earlier decision that ``agree`` would return without asking a rank; None if there is none."""
        return self._decisions.get((signature, topic, collectives))

    def already_agreed(self, signature: Signature, topic: str, collectives: Signature = ()) -> bool:
        """Whether there is an earlier decision."""
        return self.decision(signature, topic, collectives) is not None

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, which come to the next round or wait in it, that this rank failed to compile."""
        if self.liveness.alone or hasattr(error, _TOLD):
            return
        number = next(_rounds[self.liveness.name])
        try:
            self._post_progress(number, f"failed to compile: {type(error).__name__}")
            self._post_failure(f"{self._prefix}/{number}", error)
        except dist.DistError as unreachable:  # this rank's own error says more
            log.warning("the other ranks could not be told of an error: %s", unreachable)

    # ---- one round ---------------------------------------------------------------------------------------------------
    def _decide(self, question: _Question, propose: Callable[[], str], limit: timedelta, model: Signature) -> str:
        if self.liveness.alone:
            return propose()
        return self._round(question, propose, limit, model)[1]

    def _round(
        self,
        question: _Question,
        propose: Callable[[], str],
        limit: timedelta,
        model: Signature,
        mine: str | None = None,
    ) -> tuple[str, str]:
        """The round's name in the store, where the ranks that have another value than ``mine`` are counted, and rank
        0's proposal.
        """
        number = next(_rounds[self.liveness.name])
        name = f"{self._prefix}/{number}"
        store, rank = self._store, self._rank
        self._post_progress(number, f"came to the {question}")
        if rank == 0:
            try:
                decision = propose()
            except BaseException as error:  # the others wait in this round already
                self._post_failure(name, error)
                setattr(error, _TOLD, True)
                raise
            store.set(f"{name}/plan", json.dumps([*question, self._post_model(model), decision]))
        else:
            posted = self._wait(name, "plan", f"rank 0 of the group posted no plan for the {question}", limit)
            theirs = json.loads(posted)
            if theirs[0] == _FAILED:
                raise RanksDiffer(theirs[-1])
            if difference := self._difference(question, model, theirs):
                problem = (
                    f"compiled_fsdp: ranks compile different regions. Rank {rank} of the group has: {difference[0]}; "
                    f"rank 0 has: {difference[1]}. Every rank must run the same sharded model with the same options."
                )
                self._end_round(name, problem, for_rank_0=False)
                raise RanksDiffer(problem)
            decision = theirs[-1]
        if mine is not None and decision != mine:
            store.add(f"{name}/others", 1)
        if store.add(f"{name}/fits", 1) == self._size:
            store.set(f"{name}/done", "")
        problem = self._wait(name, "done", f"not all {self._size} ranks of the group came to the {question}", limit)
        if problem:
            raise RanksDiffer(problem)
        reads = len(question.signature) - 2
        log.debug("%s of a region of %d reads agreed on by %d ranks as %s", question.topic, reads, self._size, name)
        return name, decision

    def _post_model(self, model: Signature) -> str:
        """The model's digest; its text is in the store under it."""
        text = json.dumps(model)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._rank == 0 and digest not in self._posted_models:
            self._store.set(f"{self._prefix}/model/{digest}", text)
            self._posted_models.add(digest)
        return digest

    def _difference(self, mine: _Question, model: Signature, posted: list[Any]) -> tuple[str, str] | None:
        """The first difference from what rank 0 has posted: this rank's, rank 0's; None if there is none.

        Regions are compared before topics, which differ with options and layers.
        """
        topic, signature, collectives, param_names, digest, _ = posted
        theirs = _Question(topic, tuple(signature), tuple(collectives), tuple(param_names))
        difference = None
        if mine.signature != theirs.signature:
            named = _with_names(mine.signature, mine.param_names), _with_names(theirs.signature, theirs.param_names)
            difference = _first_difference(*named, "read", 2)
        difference = difference or _first_difference((mine.topic,), (theirs.topic,), "", 1)
        difference = difference or _first_difference(mine.collectives, theirs.collectives, "collective", 0)
        difference = difference or _first_difference(mine.param_names, theirs.param_names, "parameter", 0)
        if difference or self._post_model(model) == digest:
            return difference
        return _difference_of_models(model, json.loads(self._store.get(f"{self._prefix}/model/{digest}").decode()))

    def _post_failure(self, name: str, error: BaseException) -> None:
        """End a round with an error of this rank's."""
        problem = f"compiled_fsdp: rank {self._rank} of the group failed to compile: {type(error).__name__}: {error}"
        self._end_round(name, problem, for_rank_0=self._rank == 0)

    def _end_round(self, name: str, problem: str, *, for_rank_0: bool) -> None:
        """End a round with a problem, on all ranks; ``for_rank_0``: rank 0 will post no plan."""
        if for_rank_0:
            self._store.set(f"{name}/plan", json.dumps([_FAILED, [], [], [], "", problem]))
        self._store.set(f"{name}/done", problem)

    # ---- waiting for the others --------------------------------------------------------------------------------------
    def _wait(self, name: str, key: str, waiting_for: str, limit: timedelta) -> str:
        """What is posted under a round's key. While it is waited for, whether the other ranks' processes still run."""
        deadline = time.monotonic() + limit.total_seconds()
        checked, pause = time.monotonic(), 0.001
        # Not the store's own wait: a TCPStore writes two warnings for each one that ends without an answer.
        while (value := self.liveness.value(f"{name}/{key}")) is None:
            now = time.monotonic()
            if now >= deadline:
                missing = self._last_seen(self._missing(int(name.rpartition("/")[2])))
                raise RanksDiffer(
                    f"compiled_fsdp: {waiting_for} within {limit}; another rank failed, runs another model, or "
                    "compiles for longer than the process group's timeout (init_process_group(timeout=...)). "
                    f"{missing}"
                )
            if now - checked >= _SECONDS_BETWEEN_LIVENESS_CHECKS:
                checked = now
                if (ended := self.liveness.ended()) is not None and self.liveness.value(f"{name}/{key}") is None:
                    self._raise_for_ended(name, *ended)
            time.sleep(min(pause, max(deadline - now, 0.0)))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return value

    def _raise_for_ended(self, name: str, rank: int, pid: int) -> NoReturn:
        """End a round because a rank's process has ended. Before it ended, that rank may have posted why."""
        problem = self.liveness.value(f"{name}/done") or (
            f"compiled_fsdp: rank {rank} of the group has ended (process {pid}) while others waited for it to compile: "
            f"it was killed, or an error ended it, which it has shown. {self._last_seen([rank])}"
        )
        self._end_round(name, problem, for_rank_0=rank == 0)
        raise RanksDiffer(problem)

    def _post_progress(self, number: int, text: str) -> None:
        """Where this rank is, for the others' errors."""
        self._store.set(f"{self._prefix}/at/{self._rank}", json.dumps([number, text]))

    def _progress(self, rank: int) -> tuple[int, str]:
        """The last round that a rank came to, and what it posted there."""
        posted = self.liveness.value(f"{self._prefix}/at/{rank}")
        if posted is None:
            return -1, "did nothing here: it has never come to an agreement of this group"
        number, text = json.loads(posted)
        return number, text

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round."""
        return [rank for rank in range(self._size) if self._progress(rank)[0] < number]

    def _last_seen(self, ranks: list[int]) -> str:
        """Where ranks were last seen."""
        named = [f"Rank {rank} last {self._progress(rank)[1]}." for rank in ranks[:_MOST_RANKS_NAMED]]
        more = len(ranks) - _MOST_RANKS_NAMED
        return " ".join(named) + (f" So did {more} more ranks not come." if more > 0 else "")


@contextlib.contextmanager
def _naming_a_lost_store(question: _Question) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RanksDiffer(
            f"compiled_fsdp: while this rank agreed with the others on the {question}, the process group's "
            f"store could not be reached: the process that serves it, mostly rank 0's, has ended. {error}"
        ) from error


# ---- differences, for people -----------------------------------------------------------------------------------------
def _region_for_people(signature: Signature, param_names: Signature) -> str:
    """A region in words: ``signature`` has its options and its kind before the reads."""
    reads, kind = signature[2:], signature[1] if len(signature) > 1 else "no kind"
    first = f", the first: {_with_names(signature, param_names)[2]}" if reads else ""
    return f"this region ({kind}, {len(reads)} reads{first})"


def _with_names(signature: Signature, param_names: Signature) -> Signature:
    names = itertools.chain(param_names, itertools.repeat(""))
    reads = (f"{name} {read}" if name else read for read, name in zip(signature[2:], names, strict=False))
    return (*signature[:2], *reads)


def _difference_of_models(mine: Signature, theirs: list[str]) -> tuple[str, str]:
    """A parameter that only one of both has, or that they have differently."""
    ours, others = [dict(line.split(": ", 1) for line in model) for model in (mine, theirs)]
    name = next((name for name in ours | others if ours.get(name) != others.get(name)), None)
    if name is None:  # two models with equal names
        extra = list((Counter(mine) - Counter(theirs)).elements()), list((Counter(theirs) - Counter(mine)).elements())
        return tuple(lines[0] if lines else "nothing more" for lines in extra)  # type: ignore[return-value]
    mine_is, theirs_is = (f"{name}: {of[name]}" if name in of else f"no {name}" for of in (ours, others))
    return mine_is, theirs_is


def _first_difference(mine: Signature, theirs: Signature, noun: str, first: int) -> tuple[str, str] | None:
    """The first entries that differ; of entries with several lines only the lines that do.

    Entries from number ``first`` on are called ``noun`` and a number. Without a noun the entry is a topic.
    """
    for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs, fillvalue="nothing more")):
        if a != b:
            where = f"{noun} {i - first}: " if i >= first else "" if noun else "the plan of its "
            lines = [(x, y) for x, y in itertools.zip_longest(a.splitlines(), b.splitlines(), fillvalue="") if x != y]
            return where + ", ".join(x for x, _ in lines), where + ", ".join(y for _, y in lines)
    return None


# ---- by group --------------------------------------------------------------------------------------------------------
# By the group's name, as long as its processes are known by the same ``Liveness``.
_agreements: dict[str, Agreement] = {}


def agreement_of(group: ShardGroup) -> Agreement:
    """The agreement among the ranks of ``group``."""
    return _agreement_with(sign_in(group))


def abandon_all(error: BaseException) -> None:
    """Tell the ranks of all groups with sharded models that this rank failed, as ``Agreement.abandon`` does."""
    for liveness in all_signed_in():
        _agreement_with(liveness).abandon(error)


def _agreement_with(liveness: Liveness) -> Agreement:
    agreement = _agreements.get(liveness.name)
    if agreement is None or agreement.liveness is not liveness:
        agreement = _agreements[liveness.name] = Agreement(liveness)
    return agreement
