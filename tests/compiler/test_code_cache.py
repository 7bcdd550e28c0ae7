"""Code from AOTAutograd's cache: all ranks take it or none, and with it come the plans, reports and counts."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters

from compiled_fsdp import count_communication, explain, fully_shard
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.compiler.cached_code import CachedCode, Decision, taken_by_all
from compiled_fsdp.ranks import agreement
from tests.harness import compiled, run_ranks


class Seen(NamedTuple):
    """What one rank saw of one run in a process that knows nothing but the cache."""

    from_cache: list[bool]
    hits: int
    grads: list[torch.Tensor]
    plans: list[str]
    numbers: list[str]
    traffic: str
    warnings: list[str]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def as_new_process() -> None:
    """Forget what ranks have agreed on and what Dynamo has compiled."""
    torch.compiler.reset()
    counters.clear()
    agreement._agreements.clear()
    dist.barrier()


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))
    fully_shard(model[0])
    fully_shard(model)
    return model


def run(rank: int, *sizes: int, **options: Any) -> Seen:
    """Train a small model with batches of these sizes."""
    model, handler = build(), Warnings()
    log = logging.getLogger("compiled_fsdp")
    log.addHandler(handler)
    try:
        step, grads = compiled(model, codegen="inductor", **options), []
        for size in sizes:
            model.zero_grad()
            step(torch.full((size, 4), rank + 1.0)).square().sum().backward()
            grads += [p.grad.full_tensor() for p in model.parameters()]
        loss = step(torch.full((sizes[-1], 4), rank + 1.0)).square().sum()
        for retains in (True, False):  # which may not write to what is saved
            model.zero_grad()
            loss.backward(retain_graph=retains)
            assert all(
                torch.equal(p.grad.full_tensor(), g) for p, g in zip(model.parameters(), grads[-4:], strict=True)
            )
        with count_communication() as counted:
            step(torch.full((sizes[-1], 4), rank + 1.0)).square().sum().backward()
    finally:
        log.removeHandler(handler)
    graphs = explain(model).graphs
    return Seen(
        [graph.from_cache for graph in graphs],
        counters["aot_autograd"]["autograd_cache_hit"],
        grads,
        [str(graph.plan) for graph in graphs],
        [f"{graph.numbers}; {graph.sensitivity}" for graph in graphs],
        str(counted),
        [line for line in handler.lines if "no code from the cache" in line],
    )


def scenarios(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    """Each rank has a cache of its own, as on a machine of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = own = f"{folder}/{rank}"
    results = {}

    def next_process(name: str, *sizes: int, **options: Any) -> None:
        as_new_process()
        results[name] = run(rank, *(sizes or (2,)), **options)

    next_process("cold")
    next_process("warm")
    for lost in ("aotautograd", "compiled_fsdp") if rank == 1 else ():
        shutil.rmtree(Path(own, lost))
    next_process("one rank's cache is lost")
    next_process("warm again")
    if rank == 0:
        for path in Path(own, "compiled_fsdp").iterdir():
            path.write_text(path.read_text()[:100])
    next_process("rank 0's notes are damaged")
    next_process("other options", bucket="parameter")
    next_process("rank 1 compiles a variant", *((2, 5) if rank == 1 else (2, 2)))
    next_process("rank 1 finds the variant", *((2, 5) if rank == 1 else (2, 2)))
    return results


def in_new_process(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    return {"a new process": run(rank, 2)}


@pytest.fixture(scope="module")
def seen():
    """By scenario what both ranks saw."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
        first, second = run_ranks(scenarios, 2, folder), run_ranks(in_new_process, 2, folder)
        by_rank = [one | other for one, other in zip(first, second, strict=True)]
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


def assert_same_step(actual: Seen, expected: Seen) -> None:
    assert actual.plans == expected.plans
    assert actual.numbers == expected.numbers
    assert actual.traffic == expected.traffic
    for mine, other in zip(actual.grads, expected.grads, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["warm", "warm again", "a new process"])
def test_second_process_compiles_nothing(seen, name):
    for cold, warm in zip(seen["cold"], seen[name], strict=True):
        assert cold.from_cache == [False, False]
        assert warm.from_cache == [True, True]
        assert warm.hits == 1
        assert_same_step(warm, cold)


@pytest.mark.parametrize("name", ["one rank's cache is lost", "rank 0's notes are damaged"])
def test_all_compile_if_one_has_to(seen, name):
    for cold, lost in zip(seen["cold"], seen[name], strict=True):
        assert lost.from_cache == [False, False]
        assert_same_step(lost, cold)
    assert [len(rank.warnings) for rank in seen[name]] == ([1, 0] if "damaged" in name else [0, 0])


def test_other_options_have_other_code(seen):
    assert all(rank.from_cache == [False, False] for rank in seen["other options"])


def test_a_variant_of_one_rank(seen):
    """It asks nobody: neither when it is compiled nor when it is found."""
    first, second = seen["rank 1 compiles a variant"], seen["rank 1 finds the variant"]
    assert [rank.from_cache for rank in first] == [[True] * 2, [True] * 2 + [False] * 2]
    assert [rank.from_cache for rank in second] == [[True] * 2, [True] * 4]
    for warm, cold in zip(second, first, strict=True):
        assert_same_step(warm, cold)


def run_in_one_folder(rank: int, world_size: int) -> tuple[list[bool], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(7, 5))
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(rank))
    compiled(model, codegen="inductor")(x).square().sum().backward()
    return [graph.from_cache for graph in explain(model).graphs], [p.grad.to_local() for p in model.parameters()]


@pytest.mark.more
def test_three_ranks_on_one_machine(monkeypatch, tmp_path):
    """Each adds the pieces of its gradients in an order of its own: it must not take another rank's code."""
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cold, warm = run_ranks(run_in_one_folder, 3), run_ranks(run_in_one_folder, 3)
    for (_, grads), (found, same) in zip(cold, warm, strict=True):
        assert found == [True, True]
        assert all(map(torch.equal, same, grads))


PLAN = AgreedPlan((), (), {})


class Ranks:
    """An agreement whose ranks have decided this, and all have what this rank has."""

    def __init__(self, **decided: str) -> None:
        self.decided, self.asked = decided, False

    def decision(self, signature: Any, topic: str, collectives: Any) -> str | None:
        return self.decided.get(topic)

    def have_all_the_same(self, *question: Any) -> bool:
        self.asked = True
        return True

    def adopt(self, signature: Any, topic: str, collectives: Any, text: str) -> None:
        self.decided[topic] = text


@pytest.mark.parametrize(
    ("decided", "is_variant", "taken", "asked"),
    [
        ({}, False, True, True),  # the first time
        ({"forward": "as cached"}, False, True, True),  # an attempt that came so far
        ({"forward": "otherwise"}, False, False, True),
        ({"forward": "as cached", "backward": "as cached"}, True, True, False),
        ({"forward": "as cached", "backward": "otherwise"}, True, False, False),
        ({"forward": "as cached"}, True, False, False),  # a plan that this rank would have to ask for
    ],
)
def test_cached_code_follows_the_ranks_decisions(decided, is_variant, taken, asked):
    cached = CachedCode(tuple(Decision(topic, (), "as cached") for topic in ("forward", "backward")), (), PLAN)
    ranks = Ranks(**decided)
    found, can_share = taken_by_all(cached, ranks, (), (), is_variant=is_variant, key="a key")
    assert (found is cached, ranks.asked) == (taken, asked)
    # with code that it may not take, it is as a rank without code
    assert can_share == (decided == {"forward": "otherwise"})
    assert ranks.decided == ({"forward": "as cached", "backward": "as cached"} if taken else decided)


@pytest.mark.parametrize("key", ["a key", None])
def test_one_rank_may_compile_if_the_cache_will_have_its_code(key):
    assert taken_by_all(None, Ranks(), (), (), is_variant=False, key=key) == (None, key is not None)


def test_notes_are_plain_text():
    cached = CachedCode((Decision("forward", ("gather of read 0",), "a plan"),), ('{"phase": "forward"}',), PLAN)
    assert CachedCode.from_json(cached.to_json()) == cached
