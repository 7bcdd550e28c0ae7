"""Tests of the harness: it reports every kind of failure, and the references agree with each other."""

import atexit
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.utils.checkpoint

from tests.harness import (
    RankFailure,
    Transformer,
    alone,
    assert_same,
    batch,
    collectives_of,
    ddp,
    distributed,
    fsdp2,
    run_ranks,
    train,
)
from tests.harness.spawn import TIMEOUT, Ranks


def report(rank: int, world_size: int, offset: int) -> torch.Tensor:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return total * world_size


def gather(rank: int, world_size: int) -> tuple[torch.Tensor, list[str]]:
    mine, gathered = torch.full((2, 3), float(rank)), []
    ran = collectives_of(
        lambda: gathered.append(funcol.all_gather_tensor(mine, 0, dist.group.WORLD).wait()), "_c10d_functional::"
    )
    return gathered[0], [name.split()[0] for name in ran]


def fail_alone(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.zeros(1))  # waits for rank 1 forever


def die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)


def hang(rank: int, world_size: int) -> None:
    time.sleep(3600)


def exit_badly(rank: int, world_size: int) -> None:
    if rank == 1:
        atexit.register(os.abort)


def leave_state(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)


def state(rank: int, world_size: int) -> tuple[float, int, int]:
    return torch.rand(()).item(), torch.get_num_threads(), os.getpid()


def test_values_come_back_by_rank(ranks):
    assert [value.item() for value in ranks.get(2).run(report, offset=10)] == [42, 42]


def test_torchs_gather_in_our_place(ranks):
    expected = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    for gathered, ran in ranks.get(2).run(gather):
        assert torch.equal(gathered, expected)
        assert "all_gather_into_tensor_out" in ran, ran


def test_functions_of_one_spawn_do_not_see_each_other(ranks):
    before = ranks.get(2).run(state)
    ranks.get(2).run(leave_state)
    assert ranks.get(2).run(state) == before
    assert before[0][:2] == before[1][:2]
    assert before[0][1] == 1


def test_failure_of_one_rank_does_not_hang_the_other_and_does_not_spoil_the_next(ranks):
    used = ranks.get(2)
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        used.run(fail_alone)
    assert time.monotonic() - start < TIMEOUT / 2
    text = str(failure.value)
    assert "rank 1: Traceback" in text
    assert "ValueError: rank 1 has had enough" in text
    assert "rank 0: was still running" in text
    assert "in fail_alone" in text
    assert not used.alive
    assert [value.item() for value in ranks.get(2).run(report, offset=0)] == [2, 2]


def test_dead_and_hanging_ranks_are_reported():
    with pytest.raises(RankFailure, match="rank 0: exited with code 7"), Ranks(2) as ranks:
        ranks.run(die)
    with pytest.raises(RankFailure, match=r"(?s)limit 1 s.*rank 0: was still running.*in hang"), Ranks(1) as ranks:
        ranks.run(hang, timeout=1)


def test_bad_exit_code_is_reported():
    with pytest.raises(RankFailure, match=r"{'rank 1': -6}"):
        run_ranks(exit_badly, 2)


@distributed(world_size=2)
@pytest.mark.parametrize("value", [1, 2])
def test_cases_take_parameters_and_fixtures(rank, world_size, value, tmp_path):
    mine = tmp_path / f"{rank}"
    mine.write_text(str(value))
    dist.barrier()
    assert isinstance(tmp_path, Path)
    assert [(tmp_path / f"{r}").read_text() for r in range(world_size)] == [str(value)] * 2


@distributed(world_size=2)
def test_fsdp2_equals_ddp_and_a_single_process(rank, world_size):
    sharded = train(fsdp2(Transformer()))
    assert_same(sharded, train(ddp(Transformer())))
    if rank == 0:
        assert_same(sharded, train(Transformer(), alone(world_size)))


def test_model_and_data_are_the_same_everywhere():
    model = Transformer()
    assert len(list(model.parameters())) == 25
    assert len(list(Transformer(ties=True).parameters())) == 24
    torch.manual_seed(5)
    for ours, theirs in zip(model.parameters(), Transformer().parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(batch(1, 2)[0], batch(1, 2)[0])
    assert not torch.equal(batch(1, 2)[0], batch(0, 2)[0])


def test_assert_same_names_the_first_difference():
    record, other = (train(Transformer(), alone(1), steps=2) for _ in range(2))
    assert_same(record, other)
    other.gradients[1]["blocks.0.up.weight"].view(-1)[3] += 1e-3
    with pytest.raises(AssertionError, match=r"step 1: gradients of blocks\.0\.up\.weight: differs by 0.001"):
        assert_same(record, other)
    assert_same(record, other, rtol=1.0)
    other.gradients[0]["head.weight"] = None
    with pytest.raises(AssertionError, match=r"step 0: gradients of head\.weight: torch.float32 \[61, 32\], not None"):
        assert_same(record, other, rtol=1.0)
    other.losses[0] = other.losses[0] * float("nan")
    with pytest.raises(AssertionError, match="step 0: loss"):
        assert_same(record, other, rtol=1.0)


def test_batches_differ_between_ranks():
    """Otherwise every comparison above would be of equal gradients."""
    assert not torch.equal(batch(0, 0)[0], batch(1, 0)[0])
