"""Batches and texts whose sizes change, in training, evaluation and generation."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.utils import counters

from compiled_fsdp import explain, fully_shard
from tests.harness import assert_same, batch, compiled, distributed, forward_backward, fsdp2, loss_of, shard, train
from tests.harness.models import small
from tests.harness.reference import assert_same_gradients


@distributed(world_size=2, reset=True)
def test_batch_sizes_that_change(rank, world_size):
    """Other sizes from step to step, and on each rank: a few compiles, the same collectives on both ranks."""
    sizes = [(4, 4), (6, 4), (3, 5), (1, 7), (5, 2)]

    def step(model, index):
        loss = loss_of(model, rank, index, size=sizes[index][rank])
        loss.backward()
        return loss.detach()

    model = shard(small(), fully_shard)
    expected = train(fsdp2(small()), step, steps=len(sizes))
    assert_same(train(compiled(model), step, steps=len(sizes)), expected)
    assert len(explain(model).graphs) <= 8


@distributed(world_size=2)
def test_evaluation(rank, world_size):
    """Under no_grad and inference_mode: an inference graph without reductions, and training goes on."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    expected = loss_of(fsdp2(small()), rank, 0).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(loss_of(run, rank, 0), expected)
    assert all(graph.phase == "inference" and graph.count("reduce") == 0 for graph in explain(model).graphs)
    assert torch.equal(forward_backward(run, 0), expected)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.more)])
def test_generation(rank, world_size, mode: Callable[[], AbstractContextManager]):
    """A token more in each call, greedily; each rank has its own text. At most a graph for length 1, one for length 2
    and one for all others."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model).eval()
    counters.clear()
    mine = theirs = batch(rank, 0, size=2)[0][:, :1]
    with mode():
        for _ in range(8):
            logits, expected = run(mine), reference(theirs)
            assert torch.equal(logits, expected)
            mine = torch.cat([mine, logits[:, -1:].argmax(-1)], 1)
            theirs = torch.cat([theirs, expected[:, -1:].argmax(-1)], 1)
    assert counters["stats"]["unique_graphs"] <= 3
    assert len(explain(model).graphs) <= 3
    assert {graph.phase for graph in explain(model).graphs} == {"inference"}


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_batches_that_grow_in_training_and_evaluation(rank, world_size):
    """3, 5, 7, each trained on and evaluated; three graphs each at most."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    for trains in (True, False):
        counters.clear()
        for size in (3, 5, 7):
            with torch.set_grad_enabled(trains):
                losses = [loss_of(each.train(trains), rank, size, size=size) for each in (run, reference)]
            assert torch.equal(*losses)
            if trains:
                for loss in losses:
                    loss.backward()
        assert 0 < counters["stats"]["unique_graphs"] <= 3
        if trains:
            assert_same_gradients(model, reference)
