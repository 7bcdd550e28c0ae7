"""The memory budget, and what stays unsharded under it. Rows N10, R1, C10."""

from dataclasses import replace

import pytest
import torch

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.cost import PROFILES, Wires
from compiled_fsdp.passes.plan.search import OverBudget
from tests.harness import Transformer, assert_same, batch, compiled, distributed, fsdp2, shard, train
from tests.harness.fake import fake_group

SIZE = 32


def planned(world: int = 8, **options):
    """The forward's and backward's reports of a 6-layer model."""
    with fake_group(world):
        model = shard(Transformer(dim=64, blocks=6), fully_shard)
        compiled(model, **options)(batch(0, 0, size=SIZE)[0]).sum().backward()
        return explain(model).graphs


def test_without_a_budget_the_peak_is_at_most_two_units_above_the_graph_without_buckets():
    plain = planned(bucket="none", overlap=False)
    for ours, alone in zip(planned(), plain, strict=True):
        assert ours.simulation.peak <= alone.simulation.peak + 2 * ours.tasks.unit_bytes


def test_a_budget_between_the_bound_and_the_default_is_kept():
    """N10, as simulated."""
    default = planned()
    least = max(graph.numbers.least_peak for graph in default)
    peak = max(graph.simulation.peak for graph in default)
    budget = (least + peak) // 2
    graphs = planned(memory_budget=budget)
    assert all(graph.simulation.peak <= budget for graph in graphs)
    assert all(graph.budget == budget for graph in graphs)


def test_a_budget_below_the_bound_is_an_error_that_gives_it():
    """N10: under `suppress_errors`, too; the number given is enough."""
    with fake_group(8):
        model = shard(Transformer(dim=64, blocks=2), fully_shard)
        run = compiled(model, memory_budget=10_000)
        with (
            torch._dynamo.config.patch(suppress_errors=True),
            pytest.raises(OverBudget, match=r"'memory_budget'.*needs .* bytes") as error,
        ):
            run(batch(0, 0, size=SIZE)[0])
        least = error.value.least
        assert f"{least:,}" in str(error.value)
        torch.compiler.reset()
        compiled(model, memory_budget=least)(batch(0, 0, size=SIZE)[0]).sum().backward()


def test_a_small_budget_makes_the_partitioner_recompute():
    """Activations are part of the peak: the partitioner's choice is inside the loop."""
    default = planned()
    activations = planned(memory_budget=int(0.6 * max(graph.simulation.peak for graph in default)))
    assert max(g.simulation.peak for g in activations) <= 0.6 * max(g.simulation.peak for g in default)


def test_a_fraction_is_of_the_devices_memory():
    (forward, _) = planned(memory_budget=0.5)
    assert 2**28 < forward.budget < 2**50
    assert forward.simulation.peak <= forward.budget


def test_what_stays_unsharded_saves_exposed_time_under_the_budget():
    default = planned()
    auto = planned(reshard_after_forward="auto")
    assert auto[1].count("gather") < default[1].count("gather")
    seconds = [sum(graph.simulation.seconds for graph in graphs) for graphs in (auto, default)]
    assert seconds[0] < seconds[1]
    limit = max(g.simulation.peak for g in planned(bucket="none", overlap=False)) + 2 * default[0].tasks.unit_bytes
    assert max(g.simulation.peak for g in auto) <= limit
    with_room = planned(reshard_after_forward="auto", memory_budget=10 * limit)
    assert with_room[1].count("gather") == 0 or with_room[1].simulation.exposed < 1e-3 * with_room[1].simulation.seconds


def test_overlap_on_quick_wires():
    """C10: where communication takes no longer than compute, at most a gather is exposed in forward, and a gather and a
    reduction in backward; no other wait stands right behind its launch."""
    quick = replace(PROFILES["cpu"], latency=1e-6, each=1e-6, inside=Wires(1e-6, 20e9), kernel=0.0, contention=0.0)
    forward, backward = planned(hardware=quick)
    assert sum(f.exposed > 0 for f in forward.flights) <= 1
    for kind in ("gather", "reduce"):
        assert sum(f.exposed > 0 for f in backward.flights if f.bucket.kind == kind) <= 1


# ---- measured --------------------------------------------------------------------------------------------------------
@distributed(world_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": "auto"},
        {"memory_budget": 3_000_000},
        {"bucket": 0.02},
        {"bucket": [["blocks.0.*"], ["blocks.*"]]},
    ],
)
def test_every_way_to_plan_trains_as_fsdp2(rank, world_size, options):
    expected = train(fsdp2(Transformer()))
    model = shard(Transformer(), fully_shard)
    assert_same(train(compiled(model, **options)), expected)
