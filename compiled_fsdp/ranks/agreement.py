"""The agreement of ranks on a region's plan, through the process group's key-value store, without a collective.

Ranks may compile at different times and compile different variants. For example, one rank compiles again because its
batch size is new. A collective inside the compiler would then pair with another rank's training collective. So when a
region is compiled for the first time, all ranks meet (``meeting.py``): either all compile the same region, or one of
them leads and the others follow its plan. Then they agree in numbered rounds. In each round the leader, usually the
group's first rank, posts a decision, for example the plan of a graph. Every rank compares the region with its own, and
adds one to a counter if they fit. Later variants take the plan without asking.

More than 400 lines: a round has two sides, one that leads and one that follows, and both must be read together.
"""

# Why: docs/design/ranks.md, "All ranks share one plan for a region"
# Why: docs/design/ranks.md, "Equal models share plans"
# Why: docs/design/ranks.md, "Ranks with other code follow the agreed plan"

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.base.plain_data import Unfit
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.ranks.failures import RanksDiffer, naming_a_lost_store
from compiled_fsdp.ranks.heartbeat import Gone
from compiled_fsdp.ranks.journal import Journal
from compiled_fsdp.ranks.liveness import Liveness, all_signed_in, sign_in
from compiled_fsdp.ranks.meeting import heard_at, meet
from compiled_fsdp.ranks.question import Posted, Question, Signature
from compiled_fsdp.ranks.shared_compile import SharedCompile
from compiled_fsdp.ranks.statement import Outcome, Statement, other_regions
from compiled_fsdp.ranks.waiting import not_come_to, post_progress, wait_for

if TYPE_CHECKING:
    from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)

_TOLD = "_compiled_fsdp_told"  # an attribute of errors that the other ranks have been told

# The numbers of rounds by group name. They never start again, because the store outlives the models of its group.
_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

CACHED_CODE = "cached code"
"""The topic of the question whether all ranks take code from their caches."""
CODE = "code"
"""The topic of a region's last round, in which every rank says that it has code."""


class Follows(Exception):
    """This rank's graph does not have the agreed collectives, so the rank has to follow the plan in other code.

    It is not an error: the backend catches it.
    """


class Agreement:
    """The decisions on which the ranks of one group have agreed so far."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.journal = Journal(liveness)
        self._store = liveness.store
        self._rank, self._size, self._prefix = liveness.rank, liveness.size, liveness.prefix
        self._decisions: dict[tuple[Signature, str, Signature], str] = {}
        # The rank that posts the decisions about the region that is compiled now.
        self._leader = 0
        # The digest of this rank's statement in the meeting for that region; None between regions.
        self._met: str | None = None
        # Whether other ranks have different code for this region and follow the plan that this rank posts.
        self.others_follow = False
        # The last round about a region that this rank follows, while this rank makes its code; else None.
        self._last_round: str | None = None
        # Which rank compiles for the others of its machine.
        self.sharing = SharedCompile(liveness)

    # ---- meetings ----------------------------------------------------------------------------------------------------
    def meet(self, statement: Statement) -> Outcome | None:
        """Say what this rank does next, and hear what all ranks do.

        Returns: the outcome to follow; None if all ranks say the same, or if the outcome is this rank's statement.

        Raises:
            RanksDiffer: see ``meeting.meet``.
        """
        digest = statement.digest()
        begins_anew = self._met == digest and statement.what == "compiles"  # Dynamo has restarted on the same region
        if self.liveness.alone or begins_anew:
            return None
        self.journal.answer()
        outcome = meet(self.liveness, self.journal.next_meeting(), statement)
        leads = outcome is None or (outcome.leader is not None and outcome.statement == statement)
        self._leader = 0 if outcome is None or outcome.leader is None else outcome.leader
        self._met = digest if outcome is None or statement.what == "compiles" else None
        self.others_follow = leads and outcome is not None
        return None if leads else outcome

    @property
    def waits_for_code(self) -> bool:
        """Whether other ranks wait for this rank's code for a plan that it follows."""
        return self._last_round is not None

    def end_region(self) -> None:
        """End the agreement on a region: all is agreed on, or nothing had to be."""
        self._leader, self._met, self._last_round, self.others_follow = 0, None, None, False
        self.sharing.say_that_code_is_kept()  # nobody is left waiting

    # ---- decisions ---------------------------------------------------------------------------------------------------
    def agree(
        self,
        signature: Signature,
        topic: str,
        propose: Callable[[], str],
        collectives: Signature = (),
        param_names: Signature = (),
    ) -> str:
        """The group's decision on a topic, for the region with this signature. A known decision is returned at once.

        Args:
            signature: the region's; it has to be the same on all ranks.
            topic: the phase whose plan is decided, or another subject, for example the parameters to gather again.
            propose: makes a proposal, which becomes the decision. Only the rank that leads (or is alone) calls it.
            collectives: the collectives of this rank's graph, if the decision is about them.
            param_names: the names of the parameters that are read. In the first agreement they have to be the same on
                all ranks, because equal layers share regions, and ranks that run different layers would mix them up.

        Raises:
            Follows: the decision is about other collectives.
            RanksDiffer: another rank is at another region, failed, or did not come within the timeout.
        """
        key = (signature, topic, collectives)
        if key not in self._decisions:
            question = Question(topic, signature, collectives, param_names)
            with naming_a_lost_store(f"agreed with the others on the {question}", self.liveness):
                self._decisions[key] = propose() if self.liveness.alone else self._round(question, propose)[1]
        return self._decisions[key]

    def have_all_the_same(self, signature: Signature, topic: str, value: str, param_names: Signature = ()) -> bool:
        """Whether ``value`` is the same on all ranks of the group. Each call asks the ranks again.

        The other arguments and the errors are those of ``agree``.
        """
        if self.liveness.alone:
            return True
        question = Question(topic, signature, (), param_names)
        with naming_a_lost_store(f"agreed with the others on the {question}", self.liveness):
            name, decision = self._round(question, lambda: value, mine=value)
            self.sharing.begin(name, self._leader)
            return decision == value and self._store.add(f"{name}/others", 0) == 0

    def adopt(self, signature: Signature, topic: str, collectives: Signature, decision: str) -> None:
        """Store a decision that all ranks have in common without a round, for example from cached code."""
        self._decisions[signature, topic, collectives] = decision

    def decision(self, signature: Signature, topic: str, collectives: Signature = ()) -> str | None:
        """The decision that ``agree`` would return without asking the ranks; None if there is none."""
        return self._decisions.get((signature, topic, collectives))

    def collectives_agreed_on(self, signature: Signature, topic: str) -> list[Signature]:
        """The collectives of each decision on a topic of the region."""
        return [collectives for own, what, collectives in self._decisions if (own, what) == (signature, topic)]

    def forget(self, signature: Signature, topic: str | None = None) -> None:
        """Drop the decisions on a topic of the region, or on all topics, so that the ranks agree on them again."""
        for key in [key for key in self._decisions if key[0] == signature and topic in (None, key[1])]:
            del self._decisions[key]

    def plan_of(self, signature: Signature) -> AgreedPlan:
        """The latest plan for the region, which equal layers share."""
        return AgreedPlan.from_json(self._decisions[signature, CODE, ()])

    def agree_on_code(self, signature: Signature, plan: Callable[[], AgreedPlan], param_names: Signature = ()) -> None:
        """Say that this rank has code for the region, and wait until all ranks have code.

        ``plan``: returns the region's plan as data that different code can follow. The rank that leads posts it.
        """
        self.agree(signature, CODE, lambda: plan().to_json(), param_names=param_names)
        self.end_region()

    def follow_rounds(self) -> AgreedPlan:
        """Take part in all rounds about another rank's region, accept every decision, and return the region's plan.

        The last round stays open until this rank has code, too. The caller calls ``end_last_round`` then.
        """
        question = Question("plan that this rank follows")
        with naming_a_lost_store(f"agreed with the others on the {question}", self.liveness):
            while True:
                name = self._begin_round(f"came to the {question}")
                with self._telling_of_errors(name):
                    posted = self._posted(name, question, compiling=self._leader)
                    if posted.question.topic == CODE:
                        self._last_round = name
                        self._decisions[posted.question.signature, CODE, ()] = posted.decision
                        return AgreedPlan.from_json(posted.decision)
                    if posted.question.topic == CACHED_CODE:
                        # this rank compiles, so all do: the leader then posts plans
                        self._store.add(f"{name}/others", 1)
                    if self._come_to_the_end(name, question):
                        posted = self._posted(f"{name}/again", question)
                asked = posted.question
                if asked.topic != CACHED_CODE:
                    self._decisions[asked.signature, asked.topic, asked.collectives] = posted.decision

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks wait for this rank's code, or for the end of a round that it has not ended yet."""
        return self.sharing.is_awaited or self.waits_for_code

    def take_part_until_code(self) -> None:
        """Accept the decisions of the ranks that compile, until this machine's rank has put its code into its cache.

        The last round stays open until this rank has taken the code. The caller calls ``end_last_round`` then.

        Raises:
            RanksDiffer: a rank that compiles has failed or is gone.
        """
        self.follow_rounds()
        self.sharing.wait_for_code()

    def end_last_round(self) -> None:
        """Say that this rank has code that follows the region's plan, and wait until all ranks have code."""
        name, self._last_round = self._last_round, None
        if name is not None:
            question = Question("code that follows a plan")
            with naming_a_lost_store(f"agreed with the others on the {question}", self.liveness):
                self._come_to_the_end(name, question)
        self.end_region()

    def _come_to_the_end(self, name: str, question: Question) -> bool:
        """Say that this rank fits into a round, and wait until all ranks do. Returns whether the leader has changed."""
        if self._store.add(f"{name}/fits", 1) == self._size:
            self._end_of_round(name)
        word = self._wait(name, "done", f"not all {self._size} ranks of the group came to the {question}")
        if word.startswith(_NEW_LEADER):
            self._leader = int(word.removeprefix(_NEW_LEADER))
        elif word:
            raise RanksDiffer(word)
        return bool(word)

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed to compile. They hear it in the next meeting or in a round."""
        if self.liveness.alone:
            return
        if hasattr(error, _TOLD):
            self.end_region()
            return
        problem = _failed(self._rank, error)
        try:
            self.sharing.say_that_code_is_kept(problem)
            if self._met is None:
                self._store.set(heard_at(self.liveness, self.journal.next_meeting()), problem)
            elif self._last_round is not None:
                self._end_round(self._last_round, problem, for_leader=False)
                self._last_round = None
            else:
                name = self._begin_round(f"failed to compile: {type(error).__name__}")
                self._end_round(name, problem, for_leader=self._rank == self._leader)
        except dist.DistError as unreachable:  # do not raise it, because this rank's own error says more
            log.warning("the other ranks could not be told of an error: %s", unreachable)
        self.end_region()

    # ---- one round ---------------------------------------------------------------------------------------------------
    def _begin_round(self, doing: str) -> str:
        """Begin the next round and return its name in the store; ``doing`` is for the error messages of other ranks."""
        number = next(_rounds[self.liveness.name])
        post_progress(self.liveness, number, doing)
        return f"{self._prefix}/{number}"

    def _round(self, question: Question, propose: Callable[[], str], mine: str | None = None) -> tuple[str, str]:
        """Take part in a round. Returns the round's name in the store, and the leader's proposal.

        With ``mine``, the ranks whose value differs from the proposal are counted under that name.
        """
        name = self._begin_round(f"came to the {question}")
        with self._telling_of_errors(name):
            decision, theirs = self._hear(name, question, propose)
            if question.needs_more(theirs):  # this rank may lead: a plan for more collectives is good for all ranks
                self._store.set(f"{name}/needs more {self._rank}", str(len(question.collectives)))
                self._store.add(f"{name}/need more", 1)
            if mine is not None and decision != mine:
                self._store.add(f"{name}/others", 1)
            has_new_leader = self._come_to_the_end(name, question)
        if has_new_leader:  # the rank that needs most collectives
            decision, theirs = self._hear(f"{name}/again", question, propose)
        self.liveness.look()
        reads = len(question.signature) - 2
        log.debug("%s of a region of %d reads agreed on by %d ranks as %s", question.topic, reads, self._size, name)
        if not question.has_same_collectives(theirs):
            raise Follows
        return name, decision

    @contextlib.contextmanager
    def _telling_of_errors(self, name: str) -> Iterator[None]:
        """End a round for all ranks if the body raises anything but what the round itself has told."""
        try:
            yield
        except (RanksDiffer, dist.DistError):
            raise
        except BaseException as error:  # an interrupt, too, because the other ranks wait in this round already
            if self.liveness.value(f"{name}/done") is None:
                self._end_round(name, _failed(self._rank, error), for_leader=self._rank == self._leader)
                setattr(error, _TOLD, True)
            raise

    def _hear(self, name: str, question: Question, propose: Callable[[], str]) -> tuple[str, Question]:
        """The leader's decision, and the question that it answers. On the leader: make and post it."""
        if self._rank == self._leader:
            return self._propose(name, question, propose), question
        return self._compare(name, question)

    def _end_of_round(self, name: str) -> None:
        """End a round to which all ranks have come. If a rank needs more collectives than the leader, it leads next."""
        if self._store.add(f"{name}/need more", 0) == 0:
            self._store.set(f"{name}/done", "")
            return
        needs = [(self.liveness.value(f"{name}/needs more {rank}"), rank) for rank in range(self._size)]
        most = max((int(number), -rank) for number, rank in needs if number is not None)
        self._store.set(f"{name}/done", f"{_NEW_LEADER}{-most[1]}")

    def _propose(self, name: str, question: Question, propose: Callable[[], str]) -> str:
        """Post this rank's decision for all ranks."""
        try:
            decision = propose()
        except RanksDiffer as error:  # from another round, inside of ``propose``
            self._end_round(name, _failed(self._rank, error), for_leader=True)
            raise
        self._store.set(f"{name}/plan", Posted(question, decision).to_json())
        return decision

    def _compare(self, name: str, question: Question) -> tuple[str, Question]:
        """The leader's decision and question. If its question is about another region, all ranks get an error."""
        posted = self._posted(name, question)
        difference = question.difference(posted.question)
        if difference is not None:
            problem = other_regions(self._rank, *difference, self._leader)
            self._end_round(name, problem, for_leader=False)
            raise RanksDiffer(problem)
        return posted.decision, posted.question

    def _posted(self, name: str, question: Question, *, compiling: int | None = None) -> Posted:
        """Wait for the leader's post in a round; ``compiling`` is that of ``wait_for``."""
        late = f"rank {self._leader} of the group posted no plan for the {question}"
        text = self._wait(name, "plan", late, compiling=compiling)
        try:
            posted = Posted.from_json(text)
        except Unfit as error:
            problem = (
                f"compiled_fsdp: rank {self._rank} of the group cannot read what rank {self._leader} has posted "
                f"({error}). Every rank must run the same version of compiled_fsdp."
            )
            self._end_round(name, problem, for_leader=False)
            raise RanksDiffer(problem) from error
        if posted.problem:
            raise RanksDiffer(posted.problem)
        return posted

    def _end_round(self, name: str, problem: str, *, for_leader: bool) -> None:
        """End a round with a problem on all ranks.

        ``for_leader``: post the problem also where the ranks wait for the leader's plan, because it will post none.
        """
        if for_leader:
            self._store.set(f"{name}/plan", Posted(problem=problem).to_json())
        self._store.set(f"{name}/done", problem)

    # ---- waiting for the others --------------------------------------------------------------------------------------
    def _wait(self, name: str, key: str, waiting_for: str, *, compiling: int | None = None) -> str:
        """Wait for the post under a round's key. If a rank is gone, end the round for all ranks."""
        number = int(name.removesuffix("/again").rpartition("/")[2])

        def end(gone: Gone, problem: str) -> None:
            self._end_round(name, problem, for_leader=gone.rank == self._leader)

        missing = partial(not_come_to, self.liveness, number)
        return wait_for(
            self.liveness,
            f"{name}/{key}",
            waiting_for,
            missing,
            told_at=[f"{name}/done"],
            on_gone=end,
            compiling=compiling,
        )


_NEW_LEADER = "leader "


def _failed(rank: int, error: BaseException) -> str:
    return f"compiled_fsdp: rank {rank} of the group failed to compile: {type(error).__name__}: {error}"


# ---- by group --------------------------------------------------------------------------------------------------------
# By the group's name. A new ``Liveness``, for a new process group of that name, gets a new agreement.
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
