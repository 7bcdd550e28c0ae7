"""Meetings on threads: who comes, who is answered for by the journal's thread, and who never comes."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import fully_shard
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.ranks import journal as journals
from compiled_fsdp.ranks.agreement import Agreement, Follows, agreement_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.heartbeat import Gone, Watch
from compiled_fsdp.ranks.liveness import Liveness
from compiled_fsdp.ranks.meeting import SAME, Attendance, called_key
from compiled_fsdp.ranks.statement import Outcome, Statement
from tests.harness.fake import fake_group
from tests.harness.spawn import TIMEOUT
from tests.ranks.test_statement import ran, says

_groups = itertools.count()


@dataclass
class Noted:
    """A forward that has begun, in a journal."""

    says: Statement

    def statement(self) -> Statement:
        return self.says


@pytest.fixture(autouse=True)
def _quick_journals(monkeypatch):
    monkeypatch.setattr(journals, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr("compiled_fsdp.ranks.waiting._SECONDS_BEFORE_CALLING", 0.05)


def group(size: int, timeout: float = 30.0) -> list[Agreement]:
    """The ranks of one group, over one store."""
    number, store = next(_groups), dist.HashStore()
    with mock.patch("compiled_fsdp.ranks.liveness.store_of", return_value=(store, timedelta(seconds=timeout))):
        return [
            Agreement(
                Liveness(
                    SimpleNamespace(
                        place=rank, ranks=range(size), group_of_all=SimpleNamespace(group_name=f"m {number} {rank}")
                    )
                )
            )
            for rank in range(size)
        ]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises."""
    outcomes: list[Any] = [None] * len(calls)

    def body(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "hangs"
    return outcomes


def test_ranks_that_come_at_the_same_time():
    """Rank 1 comes between the two additions by which rank 0 says what it does and that it is there."""
    zero, one = (Attendance(rank.liveness, "1.1", says(names="ab")) for rank in group(2))
    store = zero._liveness.store

    def add(key: str, count: int) -> int:
        if key.endswith("/came"):
            one.come()
        return store.add(key, count)

    with mock.patch.object(zero._liveness, "store", mock.Mock(wraps=store, add=add)):
        zero.come()
    assert store.get(zero.heard).decode() == SAME


def test_ranks_that_say_the_same_post_nothing_else():
    ranks = group(3)
    assert at_once(*(lambda each=each: each.meet(says("ab")) for each in ranks)) == [None] * 3
    assert not ranks[0].liveness.store.check([f"{ranks[0].liveness.prefix}/meeting 0.1/says 0"])


def test_a_rank_that_compiles_less_follows():
    ranks = group(2)
    leader, follower = at_once(lambda: ranks[0].meet(says("abcd")), lambda: ranks[1].meet(says("ab")))
    assert leader is None
    assert follower == Outcome(0, says("abcd"))


def test_a_rank_that_runs_known_code_is_answered_for():
    """It does not come: it waits inside of a collective, perhaps for the rank that asks."""
    ranks = group(3)
    for each in ranks[1:]:
        each.journal.answer()
        each.journal.begin(Noted(ran("abcd")))
    (outcome,) = at_once(lambda: ranks[0].meet(says("ab")))
    assert outcome == Outcome(1, ran("abcd"))


def test_a_rank_that_is_behind_is_waited_for():
    """What it ran at another position says nothing of this one."""
    ranks = group(2)
    ranks[0].journal.begin(Noted(ran("x")))
    ranks[1].journal.answer()

    def late() -> None:
        time.sleep(0.3)
        ranks[1].journal.begin(Noted(ran("x")))
        time.sleep(0.3)
        ranks[1].journal.begin(Noted(ran("abcd")))

    outcome, _ = at_once(lambda: ranks[0].meet(says("ab")), late)
    assert outcome == Outcome(1, ran("abcd"))


def test_a_rank_that_runs_ahead_leaves_an_earlier_call(monkeypatch):
    """Each rank that waits calls once here, the one that is ahead last: its own meeting cannot end before the other."""
    monkeypatch.setattr("compiled_fsdp.ranks.waiting._SECONDS_BETWEEN_LIVENESS_CHECKS", 3600.0)
    behind, ahead, asked = group(3, timeout=10.0)
    for each in (ahead, asked):
        each.journal.begin(Noted(ran("abcd")))

    def first() -> Outcome | None:
        outcome = behind.meet(says("ab"))
        behind.journal.begin(Noted(ran("abcd")))
        assert behind.meet(says("x")) is None
        return outcome

    def second() -> Outcome | None:
        while behind.liveness.value(called_key(behind.liveness)) != "0.1":
            time.sleep(0.01)
        return ahead.meet(says("x"))

    def third() -> Outcome | None:
        while ahead.liveness.value(f"{ahead.liveness.prefix}/meeting 1.1/came") is None:
            time.sleep(0.01)
        time.sleep(0.5)  # both have called
        return asked.meet(says("x"))

    assert at_once(first, second, third) == [Outcome(1, ran("abcd")), None, None]


def test_a_call_that_is_over_gives_way():
    """Also one at an earlier position."""
    ranks = group(2)
    at_once(*(lambda each=each: each.meet(says("ab")) for each in ranks))
    early, late = (Attendance(ranks[0].liveness, name, says("ab")) for name in ("0.1", "7.1"))
    open_call, liveness = Attendance(ranks[0].liveness, "3.1", says("ab")), ranks[0].liveness
    for caller, expected in ((early, "0.1"), (late, "7.1"), (open_call, "3.1"), (late, "3.1")):
        caller.call()
        assert liveness.value(called_key(liveness)) == expected


def test_ranks_that_do_other_things_get_the_same_error():
    """Also the rank that runs known code, and sees no more than a lost connection."""
    ranks = group(3)
    ranks[2].journal.answer()
    ranks[2].journal.begin(Noted(ran("xy")))
    outcomes = at_once(lambda: ranks[0].meet(says("ab")), lambda: ranks[1].meet(says("ab")))
    assert {type(outcome) for outcome in outcomes} == {RanksDiffer}
    assert {str(outcome) for outcome in outcomes} == {ranks[2].liveness.value(f"{ranks[2].liveness.prefix}/problem")}


def test_a_rank_that_never_comes():
    ranks = group(2, timeout=1.0)
    (outcome,) = at_once(lambda: ranks[0].meet(says("ab")))
    assert isinstance(outcome, RanksDiffer)
    assert "not all 2 ranks" in str(outcome)


def test_a_rank_that_is_gone_ends_the_meeting_for_all(monkeypatch):
    """Rank 0 alone sees it, as ranks of other machines do not. They hear of it, and need not wait for the timeout."""
    ranks = group(3)

    def gone(watch: Watch) -> Gone | None:
        return Gone(2, "has ended (process 7)") if watch._liveness.rank == 0 else None

    monkeypatch.setattr(Watch, "gone", gone)
    outcomes = at_once(lambda: ranks[0].meet(says("ab")), lambda: ranks[1].meet(says("ab")))
    assert {type(outcome) for outcome in outcomes} == {RanksDiffer}
    assert all("rank 2 of the group has ended (process 7)" in str(outcome) for outcome in outcomes)


def test_a_rank_that_fails_before_it_meets():
    ranks = group(2)

    def fail() -> None:
        ranks[1].abandon(ValueError("no such option"))

    outcome, _ = at_once(lambda: ranks[0].meet(says("ab")), fail)
    assert isinstance(outcome, RanksDiffer)
    assert "rank 1 of the group failed to compile: ValueError: no such option" in str(outcome)


def test_a_restart_of_dynamos_analysis_meets_once():
    ranks = group(2)
    at_once(*(lambda each=each: each.meet(says("ab")) for each in ranks))
    assert ranks[0].meet(says("ab")) is None  # alone


def test_a_follower_hears_of_the_plan_in_rounds():
    """It takes part in the leader's rounds, and both wait for each other's code."""
    ranks = group(2)
    signature = ("options", "training", "a", "b")
    plan = AgreedPlan(signature, (), {})

    def lead() -> str:
        assert ranks[1].meet(says("ab")) is None
        decision = ranks[1].agree(signature, "forward", lambda: "a plan", ("gather of read 0",))
        ranks[1].agree_on_code(signature, lambda: plan)
        return decision

    def follow() -> AgreedPlan:
        assert ranks[0].meet(says("a")) == Outcome(1, says("ab"))
        found = ranks[0].follow_rounds()
        ranks[0].end_last_round()
        return found

    assert at_once(lead, follow) == ["a plan", plan]
    # from now on the follower knows the decisions, too
    assert ranks[0].agree(signature, "forward", lambda: "asks", ("gather of read 0",)) == "a plan"
    assert ranks[0].decision(signature, "code") is not None


@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_rank_that_needs_most_collectives_leads(more):
    ranks = group(3)
    signature = ("options", "training", "a", "b")
    collectives = [("gather of read 0",), ("gather of read 0",), ("gather of read 0",)]
    collectives[more] = ("gather of read 0", "gather of read 1")

    def call(rank: int) -> str:
        ranks[rank].meet(says("ab"))
        return ranks[rank].agree(signature, "backward", lambda: f"plan of rank {rank}", collectives[rank])

    outcomes = at_once(*(lambda rank=rank: call(rank) for rank in range(3)))
    assert outcomes[more] == f"plan of rank {more}"
    assert {type(outcome) for rank, outcome in enumerate(outcomes) if rank != more} == {Follows}


def test_a_journal_forgets(monkeypatch):
    """Old forwards, and keeps no more objects for new ones."""
    monkeypatch.setattr(journals, "_REMEMBERED", 3)
    journal = group(2)[0].journal
    for position in range(5):
        assert journal.statement_at(position) is None
        journal.begin(Noted(ran(str(position))))
    known = [journal.statement_at(position) for position in range(6)]
    assert known == [None, None, None, ran("3"), ran("4"), None]


def test_meshes_over_the_same_ranks_have_one_journal():
    """What is said at its positions stays in the default group's store, so they must not begin anew with each mesh."""
    with fake_group(4):
        found = []
        for _ in range(2):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            group = model._fsdp_unit.parameters[0].group
            assert len(group.ranks) == 4
            found.append((group, agreement_of(group).journal))
    (first, journal), (second, other) = found
    assert first.process_group is not second.process_group
    assert journal is other


PROGRAM_THAT_ENDS = """
import time
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from compiled_fsdp.ranks import journal

store = dist.TCPStore("localhost", 0, is_master=True)
asked = []

def value(key):  # waits in C++ for half a second
    asked.append(key)
    try:
        store.wait([key], timedelta(seconds=0.5))
    except dist.DistStoreError:
        return None

journal._FIRST_PAUSE = journal._LONGEST_PAUSE = 0.0
kept = journal.Journal(SimpleNamespace(alone=False, value=value, prefix="models"))
kept.answer()
while not asked:
    time.sleep(0.01)
"""


def test_a_process_ends_while_its_thread_asks_the_store():
    """A thread that comes back from C++ while the interpreter ends would abort the process (exit code -6)."""
    assert subprocess.run([sys.executable, "-c", PROGRAM_THAT_ENDS], timeout=TIMEOUT).returncode == 0
