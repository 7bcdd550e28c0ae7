"""One rank fails, dies or never compiles: the others say who it was, and nobody hangs."""

import os
import signal
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp import OverBudget
from compiled_fsdp.ranks.failures import RankEnded, RanksDiffer, naming_ended_ranks
from tests.harness import RankFailure, Ranks, compiled, distributed, variants
from tests.harness.ours import new_group, two_layers
from tests.harness.spawn import TIMEOUT


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_a_failure_of_one_rank_alone_that_is_caught(rank, world_size):
    """Of a variant that one rank compiles alone the others know nothing."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    run = torch.compile(two_layers(mesh=mesh), backend="compiled_fsdp", dynamic=False, options={"codegen": "aot_eager"})
    run(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        failing = mock.patch("compiled_fsdp.compiler.compilation.run_passes", side_effect=KeyError("no memory"))
        with failing, pytest.raises(Exception, match="no memory"):
            run(torch.ones(7, 4))
    for rows in (4, 3):  # the second one is a new region
        compiled(two_layers(rows=rows, mesh=mesh))(torch.ones(2, 4)).sum().backward()


def killed_while_compiling(rank: int, world_size: int, victim: int) -> None:
    def die(gm: Any, ctx: Any) -> Any:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return gm

    with (
        mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (die,)),
        pytest.raises(RanksDiffer, match=f"rank {victim} of the group has ended .process"),
    ):
        compiled(two_layers())(torch.ones(2, 4))
    raise ValueError("this rank knows")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_compiles(victim):
    """The others know within seconds: those of the harness, which ends them after the first failure."""
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(killed_while_compiling, victim, grace=TIMEOUT)
    assert "this rank knows" in str(caught.value)


def one_model_is_known(rank: int, world_size: int) -> None:
    compiled(two_layers())(torch.ones(2, 4)).sum().backward()
    torch.compiler.reset()
    with pytest.raises(RanksDiffer, match=r"Rank 1 of the group has: .*\[6, 4\].*; rank 0 has: .*\[4, 4\]"):
        compiled(two_layers(rows=4 + 2 * rank))(torch.ones(2, 4))
    if rank == 1:
        os._exit(7)
    raise ValueError("this rank knows")


@pytest.mark.timeout(0)
def test_a_rank_with_another_model_than_one_that_ranks_agreed_on():
    """Rank 0 asks nobody, because an equal model ran before, and waits in a collective. Rank 1 must not take part with
    tensors of another size: gloo would end the process."""
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(one_model_is_known, grace=TIMEOUT)
    assert "rank 1: exited with code 7" in str(caught.value)
    assert "this rank knows" in str(caught.value)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_fails_to_compile(rank, world_size, failing, phase):
    """That rank shows what happened, the others say who it was."""

    def break_down(gm: Any, ctx: Any) -> Any:
        if rank == failing and ctx.phase == phase:
            raise KeyError("out of luck")
        return gm

    error, match = (
        (Exception, "out of luck") if rank == failing else (RanksDiffer, f"rank {failing} of the group failed")
    )
    run = compiled(two_layers(mesh=new_group()))
    with (
        mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (break_down,)),
        pytest.raises(error, match=match) as caught,
    ):
        run(torch.ones(2, 4)).sum().backward()
    assert "out of luck" in str(caught.value)


@distributed(world_size=2, reset=True)
def test_a_budget_that_is_too_small_is_caught_and_the_next_call_trains(rank, world_size):
    """As the message advises: with a smaller batch, or a larger budget. A later error is told to all ranks, too."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    failed = partial(pytest.raises, (OverBudget, RanksDiffer), match="the training graph needs")

    def step(run: torch.nn.Module, batch: int) -> None:
        run(torch.ones(batch, 4)).sum().backward()

    run = compiled(two_layers(mesh=mesh), memory_budget=10_000)
    for _ in range(2):
        with failed():
            step(run, 4096)
    step(run, 4)
    with failed():
        step(compiled(two_layers(rows=5, mesh=mesh), memory_budget=1000), 4096)
    with pytest.raises(ValueError, match="no sharded parameter has a name that matches 'wieght'"):
        step(compiled(two_layers(rows=5, mesh=mesh), bucket=[["wieght"]]), 4)
    step(compiled(two_layers(rows=5, mesh=mesh)), 4)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("missing", variants([0, 1], 0))
def test_a_rank_that_never_compiles_is_noticed_within_the_groups_timeout(rank, world_size, missing):
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    run = compiled(two_layers(mesh=mesh))
    if rank != missing:
        known = rf"training with 4 parameters, the first: 0\.weight float32.*Rank {missing} has compiled nothing"
        with pytest.raises(RanksDiffer, match=f"{known}|Rank {missing} last came"):
            run(torch.ones(2, 4))
    dist.barrier()


def test_the_store_ends_while_it_is_asked():
    """The rank that has ended is known by then, and named; what it told of is not."""

    def value(key: str) -> None:
        if "/error/" in key:
            raise dist.DistNetworkError("Connection reset by peer")

    liveness = mock.Mock(alone=False, prefix="here", value=value, ended=lambda: (1, 4321))
    with (
        mock.patch("compiled_fsdp.ranks.failures.all_signed_in", return_value=[liveness]),
        pytest.raises(RankEnded, match=r"rank 1 of the group has ended \(process 4321\).*lost"),
        naming_ended_ranks,
    ):
        raise dist.DistNetworkError("gloo: connection lost")
