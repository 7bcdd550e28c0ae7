"""One rank of each machine compiles, and the others take its code from the folder of compiled code."""

import os
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compat import code_cache
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.errors import RanksDiffer
from compiled_fsdp.ranks.agreement import Agreement
from tests.compiler.test_code_cache import as_new_process
from tests.harness import compiled, run_ranks


class Seen(NamedTuple):
    """What one rank saw: whether each graph's code was taken, how many graphs were planned, whether the rank waited for
    another one, and the results."""

    from_cache: list[bool]
    generated: int
    waited: bool
    grads: list[Tensor]
    plans: list[str]


class Net(nn.Module):
    def __init__(self, wide: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, wide), nn.Linear(wide, 3)
        self.doubles = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x * 2 if self.doubles else x)


def run(rank: int, doubles: bool = False, calls: int = 1, **options: Any) -> Seen:
    """Train a new model for a step or two, with another batch on each rank."""
    torch.manual_seed(0)
    model = Net()
    model.doubles = doubles
    for unit in (model.first, model):
        fully_shard(unit)
    generated: list[None] = []
    waited: list[None] = []

    def noting(kind: type, name: str, notes: list[None]) -> Any:
        function = getattr(kind, name)
        return mock.patch.object(kind, name, lambda *given: notes.append(None) or function(*given))

    with noting(Compilation, "rewrite", generated), noting(Agreement, "take_part_until_code", waited):
        step, grads = compiled(model, codegen="inductor", **options), []
        for size in range(2, 2 + calls):
            model.zero_grad()
            step(torch.full((size, 4), rank + 1.0)).square().sum().backward()
            grads += [p.grad.full_tensor() for p in model.parameters()]
    graphs = explain(model).graphs
    plans = [str(graph.plan) for graph in graphs]
    return Seen([graph.from_cache for graph in graphs], len(generated), bool(waited), grads, plans)


def scenarios(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    results: dict[str, Seen] = {}

    def next_process(name: str, where: str, **given: Any) -> None:
        as_new_process()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{where}"
        results[name] = run(rank, **given)

    next_process("each", "each", one_rank_compiles=False)
    next_process("one folder", "one")
    next_process("warm", "one")
    next_process("a folder for each", f"own_{rank}")
    next_process("other sizes later", "sizes", calls=3)
    next_process("other sizes later, each", "sizes_each", calls=3, one_rank_compiles=False)
    next_process("another graph", "another", doubles=rank == 1)
    next_process("another graph, each", "another_each", doubles=rank == 1, one_rank_compiles=False)
    with mock.patch.object(Compilation, "_keep"):
        next_process("nothing is kept", "nothing")
    with mock.patch.object(code_cache, "_key", return_value="the same"):
        next_process("another graph, unnoticed", "unnoticed", doubles=rank == 1)
    with torch.compiler.config.patch(force_disable_caches=True):
        next_process("caches are off", "off")
    return results


@pytest.fixture(scope="module")
def seen():
    """By scenario what both ranks saw."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
        by_rank = run_ranks(scenarios, 2, folder)
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


def same_step(seen: list[Seen], expected: list[Seen]) -> bool:
    return all(
        mine.plans == other.plans
        and len(mine.grads) == len(other.grads)
        and all(map(torch.equal, mine.grads, other.grads))
        for mine, other in zip(seen, expected, strict=True)
    )


def test_rank_0_compiles(seen):
    first, second = seen["one folder"]
    assert (first.from_cache, first.generated, first.waited) == ([False, False], 2, False)
    assert (second.from_cache, second.generated, second.waited) == ([True, True], 0, True)
    assert same_step(seen["one folder"], seen["each"])


def test_each_compiles_if_told_so(seen):
    assert [rank.generated for rank in seen["each"]] == [2, 2]


def test_a_later_start_compiles_nothing(seen):
    assert [rank.generated for rank in seen["warm"]] == [0, 0]
    assert same_step(seen["warm"], seen["each"])


def test_a_folder_for_each_rank(seen):
    """Rank 1 does not wait for code that it cannot find."""
    assert [(rank.generated, rank.waited) for rank in seen["a folder for each"]] == [(2, False)] * 2
    assert same_step(seen["a folder for each"], seen["each"])


def test_variants(seen):
    """Code for other sizes is compiled by each rank when it needs it."""
    assert seen["other sizes later"][1].waited
    assert same_step(seen["other sizes later"], seen["other sizes later, each"])


@pytest.mark.parametrize(("name", "waits"), [("another graph", False), ("another graph, unnoticed", True)])
def test_a_rank_with_another_graph(seen, name, waits):
    """If it waits although it has another graph, it then compiles its own with the collectives that are agreed on."""
    assert [(rank.generated, rank.waited) for rank in seen[name]] == [(2, False), (2, waits)]
    assert all(
        all(map(torch.equal, mine.grads, other.grads))
        for mine, other in zip(seen[name], seen["another graph, each"], strict=True)
    )


def test_code_that_is_not_in_the_cache_after_all(seen):
    assert [(rank.generated, rank.waited) for rank in seen["nothing is kept"]] == [(2, False), (2, True)]
    assert same_step(seen["nothing is kept"], seen["each"])


def test_without_a_cache_nobody_waits(seen):
    assert [(rank.generated, rank.waited) for rank in seen["caches are off"]] == [(2, False)] * 2


def failures(rank: int, world_size: int, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder

    def break_down(gm: Any, ctx: Any) -> Any:
        raise KeyError("out of luck")

    for _ in range(2):  # the ranks can go on afterwards
        as_new_process()
        error, match = (Exception, "out of luck") if rank == 0 else (RanksDiffer, "rank 0 of the group failed")
        with (
            mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (break_down,)),
            pytest.raises(error, match=match),
        ):
            run(rank)
    as_new_process()
    assert run(rank).generated == (0 if rank else 2)


@pytest.mark.more
def test_the_rank_that_compiles_fails(monkeypatch, tmp_path):
    """The other one says who it was."""
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    run_ranks(failures, 2, str(tmp_path))
