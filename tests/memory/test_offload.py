"""Activations that wait for backward in host memory, under a memory budget."""

import functools
import re
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from compiled_fsdp import Options, compiled_autograd, explain, fully_shard
from compiled_fsdp.passes import cut
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.plan.unsharded_choice import choose_unsharded
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import assert_same, batch, compiled, distributed, loss_of, shard, train, variants
from tests.harness.fake import fake_group
from tests.harness.models import Broken, Checkpointed, small
from tests.harness.reference import Step
from tests.memory.test_budget import measured_peak

SIZE = 32
# A slow GPU: small tensors are worth a copy, and compute hides some of the copies.
SLOW = replace(PROFILES["h100"], flops={"float32": 200e9}, copy=50e9, host_copy=5e9)


def forward_backward(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model, dist.get_rank(), index, size=SIZE)
    loss.backward()
    return loss.detach()


def copies(model: nn.Module) -> Counter[str]:
    """The number of copies to host memory and back in a model's graphs."""
    kinds = (of.kind for graph in explain(model).graphs for of in graph.tasks.model_collectives)
    return Counter(kind for kind in kinds if kind in ("offload", "reload"))


def trained(model: nn.Module, step: Step = forward_backward, **options):
    torch.compiler.reset()
    model = shard(model, fully_shard)
    return train(compiled(model, hardware=SLOW, **options), step, steps=2), model


def peak_of(model: nn.Module) -> int:
    return max(graph.simulation.peak for graph in explain(model).graphs)


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_offloading_changes_no_bit(rank, world_size, codegen):
    """At budgets that are kept by copies alone, and by copies and computing again."""
    expected, model = trained(small(dim=64, blocks=3), codegen=codegen)
    peak, found = peak_of(model), []
    for share in (0.9, 0.55):
        actual, model = trained(small(dim=64, blocks=3), codegen=codegen, memory_budget=int(share * peak))
        assert_same(actual, expected)
        found.append(copies(model))
        assert found[-1]["offload"] == found[-1]["reload"]
    assert 0 < found[0]["offload"] < found[1]["offload"], found
    for_backward = explain(model).graphs[0].for_backward
    assert for_backward.offloaded == found[1]["offload"]
    assert for_backward.saved + for_backward.offloaded_bytes <= for_backward.saved_without_budget


def twice(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model, dist.get_rank(), index, size=SIZE)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def accumulating(model: nn.Module, index: int) -> torch.Tensor:
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        loss = loss_of(model, dist.get_rank(), 2 * index + part, size=SIZE)
        loss.backward()
    return loss.detach()


def smaller_batches(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model, dist.get_rank(), index, size=SIZE - 4 * index)
    loss.backward()
    return loss.detach()


def in_compiled_autograd(model: nn.Module, index: int) -> torch.Tensor:
    with compiled_autograd(codegen="aot_eager"):
        return forward_backward(model, index)


STEPS = {
    "two backwards": twice,
    "accumulation": accumulating,
    "other sizes": smaller_batches,
    "compiled autograd": in_compiled_autograd,
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", variants(STEPS, "compiled autograd"))
def test_every_backward_takes_its_copies_back(rank, world_size, name):
    expected, model = trained(small(dim=64, blocks=3), STEPS[name])
    actual, model = trained(small(dim=64, blocks=3), STEPS[name], memory_budget=int(0.8 * peak_of(model)))
    assert_same(actual, expected)
    assert copies(model)["reload"] >= copies(model)["offload"] > 0


@pytest.mark.more
@distributed(world_size=2)
def test_parts_of_a_broken_forward_offload_what_they_save(rank, world_size):
    """Each graph within the budget, and a checkpoint's region is computed again as the user has it."""
    for change in (Broken, Checkpointed):
        expected, model = trained(changed(change))
        refused = None
        for budget in (0.98 * peak_of(model), 10_000):
            try:
                actual, _ = trained(changed(change), memory_budget=int(budget))
                assert_same(actual, expected)
            except (OverBudget, RanksDiffer) as error:
                refused = error
        assert refused is not None
        least = int(re.findall(r"needs ([\d,]+) bytes", str(refused))[0].replace(",", ""))
        actual, model = trained(changed(change), memory_budget=least)
        assert_same(actual, expected)
        assert peak_of(model) <= least


def changed(cls: type[nn.Module]) -> nn.Module:
    model = small(dim=64, blocks=2)
    model.__class__ = cls
    return model


@distributed(world_size=2)
def test_the_measured_peak_is_within_the_budget(rank, world_size):
    """Without what is in host memory, which torch's allocator does not hold on the CPU."""
    measured, graphs = measured_peak(rank, hardware=SLOW)
    budget = int(0.7 * max(graph.simulation.peak for graph in graphs))
    assert measured > budget
    torch.compiler.reset()
    measured, graphs = measured_peak(rank, hardware=SLOW, memory_budget=budget)
    assert measured <= budget
    assert graphs[0].for_backward.offloaded > 0
    assert max(graph.simulation.peak for graph in graphs) <= budget


@functools.cache
def planned(budget: int | None = None, **options) -> tuple[GraphReport, ...]:
    with fake_group(8):
        model = shard(small(dim=64, blocks=3), fully_shard)
        torch.compiler.reset()
        compiled(model, hardware=SLOW, memory_budget=budget, **options)(batch(0, 0, size=SIZE)[0]).sum().backward()
        return explain(model).graphs


@pytest.mark.more
def test_more_memory_is_never_slower():
    """And with copies a step is at most as long as without."""
    peak = max(graph.simulation.peak for graph in planned())
    seconds = {}
    for offload in ("auto", False):
        for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            graphs = planned(int(share * peak), offload_activations=offload)
            seconds[offload, share] = sum(graph.simulation.seconds for graph in graphs)
    for (offload, share), took in seconds.items():
        assert took <= 1.001 * seconds[False, share]
        assert all(took >= 0.999 * more for (also, other), more in seconds.items() if also == offload and other > share)


def test_host_memory_is_limited():
    peak = max(graph.simulation.peak for graph in planned())
    free, limited = (planned(int(0.6 * peak), offload_activations=choice)[0].for_backward for choice in (True, 3e5))
    assert free.offloaded_bytes > 3e5 >= limited.offloaded_bytes > 0
    assert limited.seconds_again > free.seconds_again


def test_torchs_own_budget_is_refused_beside_ours():
    with (
        fake_group(2),
        torch._functorch.config.patch(activation_memory_budget=0.5),
        pytest.raises(ValueError, match=r"'memory_budget'.*activation_memory_budget=0.5.*or leave the option out"),
    ):
        compiled(shard(small(), fully_shard), memory_budget="1GB")(batch(0, 0)[0])


@pytest.mark.parametrize("choice", [0, -1, "much", None, 0.5])
def test_a_bad_choice_names_the_option(choice):
    with pytest.raises(ValueError, match=r"'offload_activations'.*but got"):
        Options(offload_activations=choice)


def test_copies_make_room_for_parameters_that_are_kept():
    """Compute hides copies, but not the gathers of a slow network: so activations leave, and parameters stay."""
    network = replace(SLOW.inside, bytes_per_second=0.5e9)
    hardware = replace(SLOW, inside=network, between=network)

    def graphs(budget: int | None) -> tuple[GraphReport, ...]:
        options = {"hardware": hardware, "reshard_after_forward": "auto", "offload_activations": True}
        with fake_group(4):
            model = shard(small(dim=64, blocks=3), fully_shard)
            compiled(model, memory_budget=budget, **options)(batch(0, 0, size=SIZE)[0]).sum().backward()
            return explain(model).graphs

    def seconds(graphs: tuple[GraphReport, ...]) -> float:
        return sum(graph.simulation.seconds for graph in graphs)

    def kept(graphs: tuple[GraphReport, ...]) -> int:
        return len(graphs[0].tasks.gathers) - len(graphs[1].tasks.gathers)

    peak = max(graph.simulation.peak for graph in graphs(None))
    budget = int(0.7 * peak)
    together = graphs(budget)

    def only_in_the_room_of(self: Any, first: Any) -> Any:
        yield choose_unsharded(*self.at(first, frozenset()).tasks, self.ctx.rules.budget)

    with mock.patch.object(cut._Search, "_may_be_kept", only_in_the_room_of):
        apart = graphs(budget)
    assert kept(together) > kept(apart)
    assert seconds(together) < seconds(apart)
    assert max(graph.simulation.peak for graph in together) <= budget
