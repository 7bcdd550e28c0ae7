"""Activations that wait for backward in host memory, under a memory budget."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.ranks.failures import RanksDiffer
from tests.harness import assert_same, compiled, distributed, loss_of, shard, train
from tests.harness.models import small
from tests.memory.test_budget import measured_peak

SIZE = 32
# A slow GPU: small tensors are worth a copy, and compute hides some of the copies.
SLOW = replace(PROFILES["h100"], flops={"float32": 200e9}, copy=50e9, host_copy=5e9)


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model, torch.distributed.get_rank(), index, size=SIZE)
    loss.backward()
    return loss.detach()


def copies(model: nn.Module) -> Counter[str]:
    """The number of copies to host memory and back in a model's graphs."""
    kinds = (of.kind for graph in explain(model).graphs for of in graph.tasks.model_collectives)
    return Counter(kind for kind in kinds if kind in ("offload", "reload"))


def least_budget(run: nn.Module) -> int:
    """The smallest budget of a compiled model with a budget that is too small, as the error has it."""
    with pytest.raises((OverBudget, RanksDiffer), match="needs .* bytes") as error:
        step(run, 0)
    (needed,) = re.findall(r"needs ([\d,]+) bytes", str(error.value))
    return int(needed.replace(",", ""))


def trained(model: nn.Module, **options):
    torch.compiler.reset()
    model = shard(model, fully_shard)
    return train(compiled(model, **options), step), model


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_offloading_changes_no_bit(rank, world_size, codegen):
    """At budgets that are kept by copies alone, and by copies and computing again."""
    expected, model = trained(small(dim=64, blocks=4), codegen=codegen, hardware=SLOW)
    peak = max(graph.simulation.peak for graph in explain(model).graphs)
    found = []
    for share in (0.95, 0.8, 0.5):
        actual, model = trained(
            small(dim=64, blocks=4), codegen=codegen, memory_budget=int(share * peak), hardware=SLOW
        )
        assert_same(actual, expected)
        found.append(copies(model))
        assert found[-1]["offload"] == found[-1]["reload"]
    assert 0 < found[0]["offload"] < found[1]["offload"], found
    assert found[2]["offload"] > 0


@distributed(world_size=2)
def test_the_least_budget_is_smaller_than_without(rank, world_size):
    least = {}
    for choice in (False, True):
        torch.compiler.reset()
        model = shard(small(dim=64, blocks=4), fully_shard)
        least[choice] = least_budget(compiled(model, memory_budget=10_000, offload_activations=choice))
    assert least[True] < 0.9 * least[False], least
