"""The protocol by which ranks agree, on threads: an error on every rank that names the first difference, and no
hang."""

import gc
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp.ranks.agreement import Agreement, agreement_of
from compiled_fsdp.ranks.failures import RankEnded, RanksDiffer, naming_ended_ranks
from compiled_fsdp.ranks.liveness import Liveness, machine_id, start_time
from compiled_fsdp.ranks.statement import Statement
from compiled_fsdp.sharding.process_groups import shard_group
from tests.harness.fake import fake_group

SIGNATURE = ("options of ours", "training", "read a", "read b")
_groups = itertools.count()


class Group:
    """Agreements of `size` ranks over one store, and a call on some of them at once."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.store = dist.HashStore()
        # rounds are counted by name, in a dictionary of the process that a rank usually has for itself; an id() may
        # come again
        number = next(_groups)
        with mock.patch("compiled_fsdp.ranks.liveness.store_of", return_value=(self.store, timedelta(seconds=timeout))):
            self.ranks = [
                Agreement(
                    Liveness(
                        SimpleNamespace(
                            place=rank, ranks=range(size), group_of_all=SimpleNamespace(group_name=f"{number} {rank}")
                        )
                    )
                )
                for rank in range(size)
            ]

    def run(self, call: Callable[[int, Agreement], Any], *only: int) -> list[Any]:
        """What `call(rank, agreement)` returns or raises on each rank; None on those that do not take part."""
        outcomes: list[Any] = [None] * len(self.ranks)

        def body(rank: int) -> None:
            try:
                outcomes[rank] = call(rank, self.ranks[rank])
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in only or range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in threads), "hangs"
        return outcomes


def same_error(outcomes: list[Any]) -> str:
    """The message of the RanksDiffer that every rank has."""
    assert [type(outcome) for outcome in outcomes] == [RanksDiffer] * len(outcomes)
    (message,) = {str(outcome) for outcome in outcomes}
    return message


def test_a_rank_is_named_when_the_store_is_gone_too():
    """Rank 1 was killed, and rank 0, which serves the store, ended because of it before rank 2 could ask."""
    group = Group(3)
    last = group.ranks[2]
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    entry = json.dumps([1, victim.pid, start_time(victim.pid)])
    group.store.set(f"{last.liveness.prefix}/on {machine_id()}/2", entry)  # in the place of this process
    group.run(lambda rank, mine: mine.agree(SIGNATURE, "forward", lambda: "plan"))
    victim.kill()
    victim.wait()
    gone = mock.Mock()
    for name in ("add", "check", "get", "set", "compare_set", "has_extended_api"):
        getattr(gone, name).side_effect = dist.DistNetworkError("connection reset")
    found = f"the process that serves.*has ended; rank 1 of the group has ended .process {victim.pid}."
    with mock.patch.object(last.liveness, "store", gone), mock.patch.object(last, "_store", gone):
        with (
            mock.patch("compiled_fsdp.ranks.failures.all_signed_in", return_value=[last.liveness]),
            pytest.raises(RankEnded, match=found),
            naming_ended_ranks,
        ):
            raise RuntimeError("gloo: connection closed by peer")
        with pytest.raises(RanksDiffer, match=found):
            last.agree(SIGNATURE, "backward", lambda: "plan")


def test_the_first_rank_decides():
    group = Group(3)
    asked = []

    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(SIGNATURE, "forward", lambda: asked.append(rank) or f"plan of rank {rank}")

    assert group.run(call) == ["plan of rank 0"] * 3
    assert asked == [0]
    keys = group.store.num_keys()
    for rank in (2, 0, 1):  # a later variant: alone, whenever it likes
        assert group.run(call, rank)[rank] == "plan of rank 0"
    assert asked == [0]
    assert group.store.num_keys() == keys


def test_other_regions_and_phases_are_other_rounds():
    group = Group(2)
    for region, what in [("a", "forward"), ("a", "backward"), ("b", "forward")]:
        text = f"{region} {what}"
        assert group.run(lambda rank, mine, r=region, w=what, t=text: mine.agree((r,), w, lambda: t)) == [text] * 2


@pytest.mark.parametrize(
    ("theirs", "ours_says", "theirs_says"),
    [
        (("other options", *SIGNATURE[1:]), "options of ours", "other options"),
        ((*SIGNATURE[:2], "read c", "read b"), "read 0: read a", "read 0: read c"),
        (SIGNATURE[:3], "read 1: read b", "read 1: nothing more"),
        ((*SIGNATURE, "read d"), "read 2: nothing more", "read 2: read d"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_first_difference_is_named_everywhere(theirs, ours_says, theirs_says, odd):
    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(theirs if rank == odd else SIGNATURE, "forward", lambda: "plan")

    outcomes = Group(3).run(call)
    one, other = (theirs_says, ours_says) if odd == 2 else (ours_says, theirs_says)
    for outcome in outcomes:
        assert isinstance(outcome, RanksDiffer)
        assert f"of the group has: {one}; rank 0 has: {other}." in str(outcome)
        assert odd == 0 or "Rank 2 of the group" in str(outcome)


def test_other_layers_of_one_kind_are_a_difference_the_first_time():
    group = Group(2)

    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(SIGNATURE, "forward", lambda: "plan", param_names=(f"layers.{rank}.weight",))

    message = same_error(group.run(call))
    assert "has: parameter 0: layers.1.weight; rank 0 has: parameter 0: layers.0.weight." in message
    group = Group(2)
    for layer in "01":  # later it is a region that is known

        def call_one(rank: int, mine: Agreement, layer: str = layer) -> str:
            return mine.agree(SIGNATURE, "forward", lambda: "plan", param_names=(layer,))

        assert group.run(call_one) == ["plan"] * 2


def test_another_phase_is_a_difference():
    message = same_error(
        Group(2).run(lambda rank, mine: mine.agree(SIGNATURE, ["forward", "backward"][rank], lambda: ""))
    )
    assert "Rank 1 of the group has: the plan of its backward; rank 0 has: the plan of its forward" in message


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        (0, "rank 0 of the group posted no plan"),
        pytest.param(2, "not all 3 ranks of the group came", marks=pytest.mark.more),
    ],
)
def test_a_rank_that_never_comes(missing, match):
    here = [rank for rank in range(3) if rank != missing]
    outcomes = Group(3, timeout=3).run(lambda rank, mine: mine.agree(SIGNATURE, "forward", lambda: "plan"), *here)
    for rank in here:
        assert isinstance(outcomes[rank], RanksDiffer)
        assert "within 0:00:03" in str(outcomes[rank])
    assert match in str(outcomes[1])


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("rounds", [None, 0, 1])
def test_a_rank_that_fails(failing, rounds):
    """Before the ranks meet for a region (None), after that, and after a round."""
    reads = ("read a", "read b")
    statement = Statement("compiles", "options of ours", "training", reads, reads, reads)

    def call(rank: int, mine: Agreement) -> str:
        if rounds is not None:
            assert mine.meet(statement) is None
        for i in range(rounds or 0):
            mine.agree(SIGNATURE, f"round {i}", lambda: "")
        if rank == failing:
            mine.abandon(KeyError("who knows"))
            raise RanksDiffer(f"compiled_fsdp: rank {failing} of the group failed to compile: KeyError: 'who knows'")
        if rounds is None:
            mine.meet(statement)
        return mine.agree(SIGNATURE, "forward", lambda: "plan")

    assert "KeyError: 'who knows'" in same_error(Group(3).run(call))


def test_nothing_is_asked_of_a_store_in_a_group_of_one():
    assert Group(1).run(lambda rank, mine: mine.agree(SIGNATURE, "forward", lambda: "mine")) == ["mine"]
    group = Group(1)
    group.run(lambda rank, mine: (mine.agree(SIGNATURE, "forward", str), mine.abandon(KeyError())))
    assert group.store.num_keys() == 0


def test_an_agreement_lives_as_long_as_its_process_group():
    """Not as long as the models: when a model is collected differs between ranks, and what they know must not."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        first = agreement_of(shard_group(mesh))
        gc.collect()
        assert agreement_of(shard_group(mesh)) is first
