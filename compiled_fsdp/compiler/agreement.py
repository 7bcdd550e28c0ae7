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
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from compiled_fsdp.comm.plain_data import Unfit, from_json
from compiled_fsdp.compiler.question import Posted, Question, Signature
from compiled_fsdp.sharding.failures import RanksDiffer, lost_store, problem_key
from compiled_fsdp.sharding.heartbeat import Gone, Watch
from compiled_fsdp.sharding.liveness import Liveness, all_signed_in, sign_in
from compiled_fsdp.state.outline import difference_of_outlines

if TYPE_CHECKING:
    from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)

_TOLD = "_compiled_fsdp_told"  # set on an error that the other ranks know of

# Rounds of agreement by group name. A store outlives the models that are sharded over its group, so numbers go on.
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2  # seconds between two looks into the store
_PAUSE = 1 / 16  # of the time waited so far: what a wait may be longer than it has to be
_SECONDS_BETWEEN_LIVENESS_CHECKS = 1.0
_MOST_RANKS_NAMED = 4  # in an error about ranks that did not come


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
            question = Question(topic, signature, collectives, param_names)
            limit = self.liveness.timeout if timeout is None else min(timeout, self.liveness.timeout)
            with _naming_a_lost_store(question, self.liveness):
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
        question = Question(topic, signature, (), param_names)
        with _naming_a_lost_store(question, self.liveness):
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
    def _decide(self, question: Question, propose: Callable[[], str], limit: timedelta, model: Signature) -> str:
        if self.liveness.alone:
            return propose()
        return self._round(question, propose, limit, model)[1]

    def _round(
        self,
        question: Question,
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
        self._post_progress(number, f"came to the {question}")
        try:
            if self._rank == 0:
                decision = self._propose(name, question, propose, model)
            else:
                decision = self._follow(name, question, limit, model)
            if mine is not None and decision != mine:
                self._store.add(f"{name}/others", 1)
            if self._store.add(f"{name}/fits", 1) == self._size:
                self._store.set(f"{name}/done", "")
            missing = f"not all {self._size} ranks of the group came to the {question}"
            problem = self._wait(name, "done", missing, limit)
        except (RanksDiffer, dist.DistError):
            raise
        except BaseException as error:  # an interrupt, too: the others wait in this round already
            if self.liveness.value(f"{name}/done") is None:
                self._post_failure(name, error)
                setattr(error, _TOLD, True)
            raise
        if problem:
            raise RanksDiffer(problem)
        self.liveness.look()
        reads = len(question.signature) - 2
        log.debug("%s of a region of %d reads agreed on by %d ranks as %s", question.topic, reads, self._size, name)
        return name, decision

    def _propose(self, name: str, question: Question, propose: Callable[[], str], model: Signature) -> str:
        """Post this rank's decision for all."""
        try:
            decision = propose()
        except RanksDiffer as error:  # in a round of its own
            self._post_failure(name, error)
            raise
        self._store.set(f"{name}/plan", Posted(question, self._post_model(model), decision).to_json())
        return decision

    def _follow(self, name: str, question: Question, limit: timedelta, model: Signature) -> str:
        """Rank 0's decision, if it was asked the same."""
        text = self._wait(name, "plan", f"rank 0 of the group posted no plan for the {question}", limit)
        try:
            posted = Posted.from_json(text)
            if posted.problem:
                raise RanksDiffer(posted.problem)
            difference = self._difference(question, model, posted)
        except Unfit as error:
            problem = (
                f"compiled_fsdp: rank {self._rank} of the group cannot read what rank 0 has posted ({error}). Every "
                "rank must run the same version of compiled_fsdp."
            )
            self._end_round(name, problem, for_rank_0=False)
            raise RanksDiffer(problem) from error
        if difference is not None:
            problem = (
                f"compiled_fsdp: ranks compile different regions. Rank {self._rank} of the group has: {difference[0]}; "
                f"rank 0 has: {difference[1]}. Every rank must run the same sharded model with the same options."
            )
            self._end_round(name, problem, for_rank_0=False)
            raise RanksDiffer(problem)
        return posted.decision

    def _post_model(self, model: Signature) -> str:
        """The model's digest; its text is in the store under it."""
        text = json.dumps(model)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._rank == 0 and digest not in self._posted_models:
            self._store.set(f"{self._prefix}/model/{digest}", text)
            self._posted_models.add(digest)
        return digest

    def _difference(self, mine: Question, model: Signature, posted: Posted) -> tuple[str, str] | None:
        """The first difference from what rank 0 has posted: this rank's, rank 0's; None if there is none."""
        difference = mine.difference(posted.question)
        if difference or self._post_model(model) == posted.model:
            return difference
        text = self._store.get(f"{self._prefix}/model/{posted.model}").decode()
        return difference_of_outlines(model, from_json(tuple[str, ...], text))

    def _post_failure(self, name: str, error: BaseException) -> None:
        """End a round with an error of this rank's."""
        problem = f"compiled_fsdp: rank {self._rank} of the group failed to compile: {type(error).__name__}: {error}"
        self._end_round(name, problem, for_rank_0=self._rank == 0)

    def _end_round(self, name: str, problem: str, *, for_rank_0: bool) -> None:
        """End a round with a problem, on all ranks; ``for_rank_0``: rank 0 will post no plan."""
        if for_rank_0:
            self._store.set(f"{name}/plan", Posted(problem=problem).to_json())
        self._store.set(f"{name}/done", problem)

    # ---- waiting for the others --------------------------------------------------------------------------------------
    def _wait(self, name: str, key: str, waiting_for: str, limit: timedelta) -> str:
        """What is posted under a round's key. While it is waited for, whether the other ranks' processes still run."""
        began = checked = time.monotonic()
        deadline = began + limit.total_seconds()
        watch = Watch(self.liveness)
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
                if (gone := watch.gone()) is not None and self.liveness.value(f"{name}/{key}") is None:
                    self._raise_for_gone(name, gone)
            pause = min(max(_PAUSE * (now - began), _SHORTEST_PAUSE), _LONGEST_PAUSE)
            time.sleep(min(pause, max(deadline - now, 0.0)))
        return value

    def _raise_for_gone(self, name: str, gone: Gone) -> NoReturn:
        """End a round because a rank is gone. Before that, it may have posted why."""
        posted = self.liveness.value(f"{name}/done") or self.liveness.value(problem_key(self.liveness))
        problem = posted or (
            f"compiled_fsdp: rank {gone.rank} of the group {gone.how} while others waited for it to compile: it was "
            f"killed, or an error ended it, which it has shown. {self._last_seen([gone.rank])}"
        )
        self._end_round(name, problem, for_rank_0=gone.rank == 0)
        raise RanksDiffer(problem)

    def _post_progress(self, number: int, text: str) -> None:
        """Where this rank is, for the others' errors."""
        self._store.set(f"{self._prefix}/at/{self._rank}", json.dumps([number, text]))

    def _progress(self, rank: int) -> tuple[int, str]:
        """The last round that a rank came to, and what it posted there."""
        posted = self.liveness.value(f"{self._prefix}/at/{rank}")
        if posted is None:
            return -1, "did nothing here: it has never come to an agreement of this group"
        progress: tuple[int, str] = from_json(tuple[int, str], posted)
        return progress

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round."""
        return [rank for rank in range(self._size) if self._progress(rank)[0] < number]

    def _last_seen(self, ranks: list[int]) -> str:
        """Where ranks were last seen."""
        named = [f"Rank {rank} last {self._progress(rank)[1]}." for rank in ranks[:_MOST_RANKS_NAMED]]
        more = len(ranks) - _MOST_RANKS_NAMED
        return " ".join(named) + (f" So did {more} more ranks not come." if more > 0 else "")


@contextlib.contextmanager
def _naming_a_lost_store(question: Question, liveness: Liveness) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RanksDiffer(
            f"compiled_fsdp: while this rank agreed with the others on the {question}, the process group's "
            f"store could not be reached: {lost_store(liveness)}. {error}"
        ) from error


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
