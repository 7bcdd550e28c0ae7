"""Signs of life while ranks compile: a rank of another machine that is gone is named, one that is slow is not."""

import json
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp.passes.pipeline import GRAPH_PASSES
from compiled_fsdp.ranks import heartbeat
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.heartbeat import SILENCE, Gone, Watch, beating
from compiled_fsdp.ranks.liveness import Liveness
from tests.errors.test_agreement import SIGNATURE, Group
from tests.harness import RankFailure, Ranks, compiled, distributed
from tests.harness.ours import two_layers
from tests.harness.spawn import TIMEOUT


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def quick(monkeypatch):
    """Many beats a second; every rank on a machine of its own."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr("compiled_fsdp.ranks.liveness.machine_id", lambda: None)


@pytest.fixture
def clock(monkeypatch):
    """What ranks that watch others look at."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def wait_for_another_sign(liveness: Liveness) -> None:
    """Of the rank itself."""
    key = f"{liveness.prefix}/beat/{liveness.rank}"
    before, deadline = liveness.value(key), time.monotonic() + TIMEOUT
    while liveness.value(key) == before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_that_beats_is_there(quick, clock):
    """However long it compiles; and when it is done, silence is no sign of death."""
    first, second = (agreement.liveness for agreement in Group(2).ranks)
    watch = Watch(first)
    with beating(second):
        for _ in range(5):
            wait_for_another_sign(second)
            assert watch.gone() is None
            clock.now += 0.9 * SILENCE
    for _ in range(2):
        assert watch.gone() is None
        clock.now += 10 * SILENCE


def test_a_rank_that_stops_beating_is_gone(quick, clock):
    first, second, third = (agreement.liveness for agreement in Group(3).ranks)
    third.store.set(f"{third.prefix}/beat/2", json.dumps([7, "node-b", 4321]))
    watches = Watch(first), Watch(second)
    with beating(first), beating(second):
        assert [watch.gone() for watch in watches] == [None, None]
        clock.now += SILENCE + 1
        wait_for_another_sign(first)
        wait_for_another_sign(second)
        gone = watches[0].gone()
        assert watches[1].gone() is None, "rank 0 tells the others"
    assert gone == Gone(2, "has given no sign of life for 9 s (process 4321 on 'node-b')")


def test_compiles_leave_one_key_a_rank_and_no_thread(quick):
    group = Group(2)
    liveness = group.ranks[1].liveness
    for _ in range(20):
        with beating(liveness):
            wait_for_another_sign(liveness)
    for thread in threading.enumerate():
        if "heartbeat" in thread.name:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
    assert group.store.num_keys() == 1


def test_all_ranks_end_when_one_is_silent(quick, monkeypatch):
    """The last one has come to compile, and then nothing more of it."""
    monkeypatch.setattr("compiled_fsdp.ranks.waiting._SECONDS_BETWEEN_LIVENESS_CHECKS", 0.1)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.5)
    group = Group(3)
    last = group.ranks[2].liveness
    last.store.set(f"{last.prefix}/beat/2", json.dumps([7, "node-b", 4321]))

    def call(rank, mine):
        return mine.agree(SIGNATURE, "forward", lambda: "plan")

    for outcome in group.run(call, 0, 1)[:2]:
        assert isinstance(outcome, RanksDiffer)
        assert "rank 2 of the group has given no sign of life" in str(outcome)


def test_an_interrupted_rank_tells_the_others_in_the_round_in_which_they_wait(monkeypatch):
    group, came = Group(3), threading.Event()

    def call(rank, mine):
        if rank == 2:
            came.wait(60)
            raise_in = mock.patch.object(mine, "_compare", side_effect=KeyboardInterrupt)
            with raise_in, pytest.raises(KeyboardInterrupt):
                mine.agree(SIGNATURE, "forward", lambda: "plan")
            return None
        came.set()
        return mine.agree(SIGNATURE, "forward", lambda: "plan")

    for outcome in group.run(call)[:2]:
        assert isinstance(outcome, RanksDiffer)
        assert "rank 2 of the group failed to compile: KeyboardInterrupt" in str(outcome)


@pytest.mark.parametrize("posted", ["", "{", '["cut", [], [], [], "", "plan"]', '{"plan": 1}'])
def test_what_rank_0_posts_is_checked(posted):
    """Another version of the package posts other things."""
    group = Group(3)

    def call(rank, mine):
        return mine.agree(SIGNATURE, "forward", lambda: "plan")

    # around all threads: each would restore what another one has put there
    with mock.patch("compiled_fsdp.ranks.question.Posted.to_json", return_value=posted):
        outcomes = group.run(call)
    for outcome in outcomes:
        assert isinstance(outcome, RanksDiffer)
        assert "cannot read what rank 0 has posted" in str(outcome)
        assert "same version of compiled_fsdp" in str(outcome)


def killed_on_another_machine(rank: int, world_size: int, victim: int) -> None:
    """As `killed_while_compiling` in tests/errors, where no rank sees another one's process."""

    def die(gm, ctx):
        if rank == victim:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return gm

    with (
        mock.patch("compiled_fsdp.ranks.liveness.machine_id", return_value=f"machine {rank}"),
        mock.patch.object(heartbeat, "SILENCE", 4.0),
        mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (die,)),
        pytest.raises(RanksDiffer, match=f"rank {victim} of the group has given no sign of life .* on "),
    ):
        compiled(two_layers())(torch.ones(2, 4))
    raise ValueError("this rank knows")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.more)])
def test_a_rank_of_another_machine_that_is_killed_while_it_compiles(victim):
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(killed_on_another_machine, victim, grace=TIMEOUT)
    assert "this rank knows" in str(caught.value)


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_a_rank_of_another_machine_that_takes_long_to_compile(rank, world_size):
    """Longer than the silence after which it would count as gone."""

    def slow(gm, ctx):
        if rank == 1:
            time.sleep(9)
        return gm

    with (
        mock.patch("compiled_fsdp.ranks.liveness.machine_id", return_value=f"machine {rank}"),
        mock.patch("compiled_fsdp.ranks.liveness._signed_in", {}),
        mock.patch.multiple(heartbeat, BEAT=0.2, SILENCE=6.0),
        mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (*GRAPH_PASSES, slow)),
    ):
        model = two_layers(mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
        compiled(model)(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
