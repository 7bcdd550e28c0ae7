"""Which collectives a compiled step has, how many, and in which order: as planned, and as gloo ran them.

Counts and orders are those of `bucket="module"`, before lowering; what the planner makes of the same collectives is its
own choice, and only has to be complete.
"""

from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import CommDebugMode

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.base import logs
from compiled_fsdp.frontend import forward_hooks
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import (
    Transformer,
    assert_same,
    collectives_of,
    compiled,
    distributed,
    forward_backward,
    fsdp2_record,
    planned_ops,
    shard,
    train,
    variants,
)
from tests.harness.hardware import EXCHANGING, GROUPING, SCATTERING
from tests.harness.models import small


def counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(gathers, reductions) of each compiled graph before it is lowered, by phase; nothing else communicates in it."""
    found = {}
    for graph in explain(model).graphs:
        ops = planned_ops(graph)
        gathers, reductions = ops.pop("gather", 0), ops.pop("reduce", 0)
        assert ops.pop("wait_tensor", 0) == gathers + reductions, f"{graph.phase}: not one wait a collective"
        assert not ops.keys() - {"unpack_gather", "unpack_reduce"}, f"{graph.phase}: {ops}"
        assert (gathers, reductions) == (graph.count("gather"), graph.count("reduce")), f"{graph.phase}: not as lowered"
        assert graph.phase not in found, "compiled twice"
        found[graph.phase] = gathers, reductions
    return found


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("reshard_after_forward", "forward", "backward"),
    variants([(True, 3, 3), (False, 3, 0), (None, 3, 2)], (True, 3, 3), (None, 3, 2)),
)
def test_collectives_by_policy(rank, world_size, reshard_after_forward, forward, backward):
    """Three units, two blocks and the root."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=reshard_after_forward)
    forward_backward(compiled(model, bucket="module"), 0)
    assert counts(model) == {"forward": (forward, 0), "backward": (backward, 3)}


@distributed(world_size=2)
def test_what_backward_does_not_read_is_not_gathered_again(rank, world_size):
    """An embedding's backward does not read its weight."""
    model = small(blocks=2)
    fully_shard(model.embedding, reshard_after_forward=True)
    shard(model, fully_shard, reshard_after_forward=True)
    forward_backward(compiled(model, bucket="module"), 0)
    assert counts(model) == {"forward": (4, 0), "backward": (3, 4)}
    last = explain(model).graphs[-1]
    assert [f.names for f in last.collectives if f.bucket.kind == "gather" and "embedding.weight" in f.names] == []
    assert [f.names for f in last.collectives if f.bucket.kind == "reduce"][-1] == ("embedding.weight",)


@distributed(world_size=2, reset=True)
def test_the_whole_model_is_one_graph_each_way(rank, world_size):
    """`fullgraph=True` compiles a Python loop over sharded blocks."""
    counters.clear()
    model = shard(small(blocks=2), fully_shard)
    assert_same(train(compiled(model, fullgraph=True)), fsdp2_record(small(blocks=2)))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    explanation = explain(model)
    assert [graph.phase for graph in explanation.graphs] == ["forward", "backward"]
    assert explanation.graph_breaks == ()
    read = {read.name for graph in explanation.graphs for read in graph.reads}
    assert read == {name for name, _ in small(blocks=2).named_parameters()}


@pytest.mark.more
@distributed(world_size=4)
@pytest.mark.parametrize("bucket", ["auto", pytest.param("module", marks=pytest.mark.more)])
def test_all_ranks_plan_and_run_the_same(rank, world_size, bucket):
    """With 61 rows on 4 ranks. The planned graphs are equal as text, and so is what is then launched."""
    model = shard(small(), fully_shard)
    run = compiled(model, bucket=bucket)
    forward_backward(run, 0)
    planned = [graph.planned for graph in explain(model).graphs]
    assert len(planned) == 2
    assert all(planned)
    ran = collectives_of(lambda: forward_backward(run, 1), "_c10d_functional::")
    assert len(ran) == 2 * sum(len(on_gloo(graph)) for graph in explain(model).graphs)  # a launch and a wait each
    everyone: list = [None] * world_size
    dist.all_gather_object(everyone, (planned, ran))
    for other, (their_plan, they_ran) in enumerate(everyone):
        assert their_plan == planned, f"rank {other} planned otherwise"
        assert they_ran == ran, f"rank {other} ran otherwise"


def on_gloo(graph: GraphReport) -> list[str]:
    """What gloo has to run for a graph's plan, as `collectives_of` names it: kinds and sizes."""
    found = []
    for bucket in graph.plan.launches:
        reads = [graph.reads[index] for index in bucket.reads]
        full = [read.bytes // read.itemsize for read in reads]
        assert bucket.bytes == sum(read.bytes for read in reads)
        for numel in full if bucket.form == "coalesced" else [sum(full)]:  # gloo groups nothing
            if bucket.kind == "gather":
                found.append(f"all_gather [[{numel // reads[0].world}]]")
            else:  # gloo has no reduce-scatter, and torch's runs an all-reduce for it
                found.append(f"{'all_to_all' if bucket.transport else 'all_reduce'} [[{numel}]]")
    return found


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        pytest.param({"bucket": "module", "hardware": SCATTERING}, "all_reduce", marks=pytest.mark.more),
        pytest.param({"bucket": "parameter", "hardware": EXCHANGING}, "all_to_all", marks=pytest.mark.more),
        ({"hardware": PROFILES["cpu"]}, "all_to_all"),
        pytest.param({"hardware": GROUPING}, "all_to_all", marks=pytest.mark.more),
        pytest.param({"hardware": SCATTERING, "overlap": False}, "all_reduce", marks=pytest.mark.more),
    ],
    ids=[
        "module",
        "none exchanging",
        "auto by profile",
        "auto grouping",
        "no overlap",
    ],
)
def test_gloo_runs_what_was_planned(rank, world_size, options, reduction):
    """Counted by the profiler, which needs no dispatch mode. Whatever it is that runs, the result is the same."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=True)
    run = compiled(model, verify="full", **options)
    assert_same(train(run), fsdp2_record(small(blocks=2)))
    planned = [event for graph in explain(model).graphs for event in on_gloo(graph)]
    ran = collectives_of(lambda: forward_backward(run, 1))
    assert sorted(ran) == sorted(planned)  # not in order: gloo's threads may start two in either
    kinds = [event.split()[0] for event in ran]
    assert set(kinds) == {"all_gather", reduction}
    if options.get("bucket") == "module":
        assert (kinds.count("all_gather"), kinds.count(reduction)) == (6, 3)
    if options.get("bucket") == "parameter":  # a collective for each of 13 parameters
        assert counts(model)["forward"] == (13, 0)
        assert counts(model)["backward"][1] == 13
    if options["hardware"] == GROUPING:
        forms = {bucket.form for graph in explain(model).graphs for bucket in graph.plan.launches}
        assert "coalesced" in forms, forms


@pytest.mark.more
@distributed(world_size=2)
def test_the_planner_gathers_and_reduces_everything_once(rank, world_size):
    """With `bucket="auto"`: however it divides them, the collectives are those of `bucket="parameter"`."""
    found = []
    for bucket in ("auto", "parameter"):
        model = shard(small(blocks=2), fully_shard, reshard_after_forward=True)
        forward_backward(compiled(model, bucket=bucket), 0)
        graphs = explain(model).graphs
        assert [graph.phase for graph in graphs] == ["forward", "backward"]
        found.append([sorted((f.bucket.kind, name) for f in graph.collectives for name in f.names) for graph in graphs])
        assert all(f.launch < f.wait for graph in graphs for f in graph.collectives)
    assert found[0] == found[1]
    assert [len(collectives) for collectives in found[0]] == [13, 11 + 13]


@pytest.mark.more
@distributed(world_size=2)
def test_a_unit_is_one_collective_whatever_a_grouped_one_would_cost(rank, world_size):
    """With `bucket="module"` nothing is left to the planner."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=True)
    forward_backward(compiled(model, bucket="module", hardware=GROUPING), 0)
    assert counts(model) == {"forward": (3, 0), "backward": (3, 3)}
    assert {bucket.form for graph in explain(model).graphs for bucket in graph.plan.launches} == {"flat"}


@pytest.mark.more
@distributed(world_size=2)
def test_a_dispatch_mode_around_the_compiled_call_warns_and_is_right(rank, world_size):
    """Dynamo does not compile below a dispatch mode, so the model runs uncompiled."""
    model = shard(small(blocks=2), fully_shard)
    run = compiled(model)

    def step(_: nn.Module, index: int) -> torch.Tensor:
        if index == 2:  # torch 2.13 remembers that it skipped the frame, and skips it again
            return forward_backward(run, index)
        with CommDebugMode():
            loss = forward_backward(run, index)
        assert explain(model).graphs == ()
        return loss

    with mock.patch.object(logs, "_logged", set()), TestCase().assertLogs(forward_hooks.log, "WARNING") as caught:
        actual = train(model, step)
    assert len(caught.records) == 1, "once is enough"
    assert "CommDebugMode" in caught.output[0]
    assert_same(actual, fsdp2_record(small(blocks=2)))

    torch.compiler.reset()
    with mock.patch.object(logs, "_logged", set()), TestCase().assertNoLogs(forward_hooks.log, "WARNING"):
        forward_backward(run, 0)
    assert len(explain(model).graphs) == 2


@distributed(world_size=2)
def test_one_call_on_the_root_is_bucketed_like_a_call_for_each_block(rank, world_size):
    model = fully_shard(small(blocks=3), reshard_after_forward=True)
    assert_same(train(compiled(model, bucket="module")), fsdp2_record(small(blocks=3)))
    assert explain(model).units == 1
    assert counts(model) == {"forward": (4, 0), "backward": (4, 4)}
    by_block = shard(small(blocks=3), fully_shard, reshard_after_forward=True)
    forward_backward(compiled(by_block, bucket="module"), 0)
    assert explain(by_block).units == 4
    for ours, theirs in zip(explain(model).graphs, explain(by_block).graphs, strict=True):
        assert [(f.bucket.kind, f.names) for f in ours.collectives] == [
            (f.bucket.kind, f.names) for f in theirs.collectives
        ]
        assert [f.compute_between for f in ours.collectives] == [f.compute_between for f in theirs.collectives]


def freeze_all_but_qkv(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(name.split(".")[-2] in ("q", "k", "v"))
    return model


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("root_only", [False, True])
def test_frozen_parameters_are_gathered_and_not_reduced(rank, world_size, root_only):
    """Only q, k and v are trained."""
    model = freeze_all_but_qkv(Transformer())
    model = fully_shard(model) if root_only else shard(model, fully_shard)
    expected = fsdp2_record(freeze_all_but_qkv(Transformer()))
    assert_same(train(compiled(model, bucket="module")), expected)
    trained = [name for name, grad in expected.gradients[0].items() if grad is not None]
    assert len(trained) == 6
    found = counts(model)
    assert found["forward"] == (3, 0)
    assert found["backward"][1] == 2
    reduced = [f for graph in explain(model).graphs for f in graph.collectives if f.bucket.kind == "reduce"]
    assert sorted(name for flight in reduced for name in flight.names) == sorted(trained)
    assert sum(f.bucket.bytes for f in reduced) == sum(4 * model.get_parameter(name).numel() for name in trained)
