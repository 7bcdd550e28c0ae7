"""Training with codecs: the numbers of a single process that encodes and decodes every shard itself."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from compiled_fsdp import WirePolicy, compiled_autograd, explain, fully_shard
from tests.codecs.reference import Reference
from tests.harness import WAYS, assert_same, compiled, distributed, forward_backward, loss_of, shard, train
from tests.harness.models import Checkpointed, broken, small

POLICIES = {
    "int8": {"gather": "int8", "reduce": "int8", "block": 64},
    "float8 and bfloat16": {"gather": torch.float8_e4m3fn, "reduce": torch.bfloat16},
    "feedback": {"reduce": "int8", "error_feedback": True},
}


def reference(world_size, rank, gather=None, reduce=None, block=256, error_feedback=False):
    gather, reduce = (None if of is None else str(of).removeprefix("torch.") for of in (gather, reduce))
    return Reference(world_size, rank, gather, reduce, block=block, feedback=error_feedback)


def assert_as_alone(rank, world_size, build, run, options, *, steps=3, step=forward_backward, sharding=None, **limits):
    model = shard(build(), fully_shard, wire_policy=WirePolicy(**options), **(sharding or {}))
    expected = train(build(), reference(world_size, rank, **options), steps=steps)
    assert_same(train(run(model), step, steps=steps), expected, **limits)
    return model


two_blocks = partial(small, blocks=2)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_every_codec(rank, world_size, way):
    for options in POLICIES.values():
        assert_as_alone(rank, world_size, two_blocks, WAYS[way], options)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=3)
def test_three_ranks(rank, world_size, way):
    """Uneven shards; the losses of ranks are summed in another order than one process does it."""
    options = {"gather": "int8", "reduce": "int8", "error_feedback": True}
    # a gradient may differ in its last bit, and so by one step of its block
    limits = {"rtol": 2e-2, "rtol_of_parameters": 1e-2}
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], options, **limits)


@distributed(world_size=2)
def test_graph_breaks(rank, world_size):
    """Prefetched gathers and deferred reductions are encoded too."""
    for options in POLICIES.values():
        model = assert_as_alone(rank, world_size, broken, compiled, options, steps=4)
        assert any(graph.is_fragment for graph in explain(model).graphs)


def in_compiled_autograd(model, step):
    loss = loss_of(model, torch.distributed.get_rank(), step)
    with compiled_autograd():
        loss.backward()
    return loss.detach()


@distributed(world_size=2, reset=True)
def test_compiled_autograd(rank, world_size):
    for options in (POLICIES["int8"], POLICIES["feedback"]):
        assert_as_alone(rank, world_size, broken, compiled, options, step=in_compiled_autograd)


@distributed(world_size=2)
def test_checkpoints_and_buckets(rank, world_size):
    """What is gathered does not depend on the bucket, nor on the form of a collective."""
    options = POLICIES["int8"] | {"error_feedback": True}
    checkpointed = partial(small, blocks=2, cls=Checkpointed)
    assert_as_alone(rank, world_size, checkpointed, compiled, options)
    for bucket in ("none", "module", 0.01):
        assert_as_alone(rank, world_size, two_blocks, partial(compiled, bucket=bucket), options)
