"""Training gives what torch's own FSDP2, DDP and a single process give, on one, two and four ranks."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    Transformer,
    alone,
    assert_same,
    collectives_of,
    compiled,
    ddp,
    distributed,
    forward_backward,
    fsdp2_record,
    loss_of,
    shard,
    train,
)
from tests.harness.reference import assert_near

# The ways to run a sharded model; "compiled_fsdp" is the one that this package is for.
WAYS = {
    "eager": lambda model: model,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled_fsdp": compiled,
}


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp", pytest.param("aot_eager", marks=pytest.mark.more)])
def test_two_ranks_equal_fsdp2(rank, world_size, way):
    model = shard(Transformer(), fully_shard, reshard_after_forward=True)
    expected = fsdp2_record(Transformer(), reshard_after_forward=True, steps=5)
    assert_same(train(WAYS[way](model), steps=5), expected)
    assert len(explain(model).graphs) == (2 if way == "compiled_fsdp" else 0)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
@pytest.mark.parametrize("reshard_after_forward", [False, pytest.param(None, marks=pytest.mark.more)])
def test_parameters_kept_after_forward(rank, world_size, way, reshard_after_forward):
    """Unlike FSDP2's, parameters are DTensors between forwards even where they are kept: the graph holds them.

    Uncompiled, an attribute gives the full parameter up to the backward, as with FSDP2.
    """
    model = shard(Transformer(), fully_shard, reshard_after_forward=reshard_after_forward)
    types: set[type] = set()
    read: set[type] = set()

    def step(run: nn.Module, index: int) -> torch.Tensor:
        loss = loss_of(run, rank, index)
        types.update(type(p) for p in model.parameters())
        read.add(type(model.head.weight))
        loss.backward()
        return loss.detach()

    expected = fsdp2_record(Transformer(), reshard_after_forward=reshard_after_forward)
    assert_same(train(WAYS[way](model), step), expected)
    assert types == {DTensor}
    assert read == {torch.Tensor if way == "eager" else DTensor}


@pytest.mark.more
@distributed(world_size=4)
def test_four_ranks_equal_fsdp2(rank, world_size):
    """Several ranks may sum in another order."""
    expected = fsdp2_record(Transformer(blocks=1))
    for way in ("eager", "compiled_fsdp"):
        assert_near(
            train(WAYS[way](shard(Transformer(blocks=1), fully_shard))), expected, gradients=1e-8, parameters=5e-7
        )


@pytest.mark.more
@distributed(world_size=1)
def test_one_rank_equals_a_plain_model_without_collectives(rank, world_size):
    expected = train(Transformer(), alone(1))
    for way in ("eager", "compiled_fsdp"):
        model = shard(Transformer(), fully_shard)
        run = WAYS[way](model)
        assert_same(train(run), expected)
        assert collectives_of(lambda run=run: forward_backward(run, 0)) == []
    assert [len(graph.collectives) for graph in explain(model).graphs] == [0, 0]


@pytest.mark.more
@distributed(world_size=1)
def test_one_rank_keeps_its_collectives_when_asked(rank, world_size):
    """What debugging and timing on one machine need."""
    model = shard(Transformer(), fully_shard, reshard_after_forward=True)
    run = compiled(model, bucket="module", collectives_at_world_size_1=True)
    assert_same(train(run), train(Transformer(), alone(1)))
    counts = [(graph.count("gather"), graph.count("reduce")) for graph in explain(model).graphs]
    assert counts == [(3, 0), (3, 3)]
    assert len(collectives_of(lambda: forward_backward(run, 0))) == 9


@distributed(world_size=2)
def test_two_ranks_equal_ddp(rank, world_size):
    assert_same(train(compiled(shard(Transformer(), fully_shard))), train(ddp(Transformer())))
