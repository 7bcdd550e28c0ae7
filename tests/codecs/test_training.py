"""Training with codecs: the numbers of a single process that encodes and decodes every shard itself."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from compiled_fsdp import WirePolicy, compiled_autograd, explain, fully_shard
from tests.codecs.reference import Reference
from tests.harness import (
    WAYS,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    loss_of,
    shard,
    train,
    variants,
    ways_and,
)
from tests.harness.models import Checkpointed, broken, small

POLICIES = {
    "int8": {"gather": "int8", "reduce": "int8", "block": 64},
    "float8 and bfloat16": {"gather": torch.float8_e4m3fn, "reduce": torch.bfloat16},
    "feedback": {"reduce": "int8", "error_feedback": True},
}


# a gradient that differs in its last bit may differ by one step of its block
LAST_BITS = {"rtol": 2e-2, "rtol_of_parameters": 1e-2}


def reference(world_size, rank, gather=None, reduce=None, block=256, error_feedback=False, **more):
    gather, reduce = (None if of is None else str(of).removeprefix("torch.") for of in (gather, reduce))
    return Reference(world_size, rank, gather, reduce, block=block, feedback=error_feedback, **more)


def assert_as_alone(
    rank, world_size, build, run, options, *, steps=3, step=forward_backward, sharding=None, alone=None, plain=None,
    **limits,
):  # fmt: skip
    model = shard(build(), fully_shard, wire_policy=WirePolicy(**options), **(sharding or {}))
    expected = train((plain or build)(), reference(world_size, rank, **options, **(alone or {})), steps=steps)
    assert_same(train(run(model), step, steps=steps), expected, **limits)
    return model


two_blocks = partial(small, blocks=2)


@ways_and("codec", POLICIES, compiled=["int8"])
@distributed(world_size=2)
def test_every_codec(rank, world_size, way, codec):
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], POLICIES[codec])


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=3)
def test_three_ranks(rank, world_size, way):
    """Uneven shards; the losses of ranks are summed in another order than one process does it."""
    options = {"gather": "int8", "reduce": "int8", "error_feedback": True}
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], options, **LAST_BITS)


@distributed(world_size=2)
@pytest.mark.parametrize("codec", variants(POLICIES, "int8"))
def test_graph_breaks(rank, world_size, codec):
    """Prefetched gathers and deferred reductions are encoded too."""
    model = assert_as_alone(rank, world_size, broken, compiled, POLICIES[codec], steps=4)
    assert any(graph.is_fragment for graph in explain(model).graphs)


def in_compiled_autograd(model, step):
    loss = loss_of(model, torch.distributed.get_rank(), step)
    with compiled_autograd():
        loss.backward()
    return loss.detach()


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("codec", variants(["int8", "feedback"], "int8"))
def test_compiled_autograd(rank, world_size, codec):
    """Generated code sums the embedding's gradient in another order."""
    assert_as_alone(rank, world_size, broken, compiled, POLICIES[codec], step=in_compiled_autograd, **LAST_BITS)


@distributed(world_size=2)
def test_checkpoints(rank, world_size):
    options = POLICIES["int8"] | {"error_feedback": True}
    checkpointed = partial(small, blocks=2, cls=Checkpointed)
    assert_as_alone(rank, world_size, checkpointed, compiled, options, plain=two_blocks)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("bucket", ["parameter", "module", 0.01])
def test_buckets(rank, world_size, bucket):
    """What is gathered does not depend on the bucket, nor on the form of a collective."""
    options = POLICIES["int8"] | {"error_feedback": True}
    assert_as_alone(rank, world_size, two_blocks, partial(compiled, bucket=bucket), options)


def microbatches(model, step):
    """Two, of which the second one reduces."""
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        loss = loss_of(model, torch.distributed.get_rank(), step + micro)
        loss.backward()
    return loss.detach()


@ways_and("codec", ["int8", "feedback"], compiled=[])
@distributed(world_size=2)
def test_accumulation(rank, world_size, way, codec):
    """What waits is added before it is encoded, once."""
    alone = {"microbatches": 2}
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], POLICIES[codec], step=microbatches, alone=alone)


@ways_and("codec", ["int8", "feedback"], compiled=[])
@pytest.mark.parametrize("build", variants(["whole", "broken"], "whole"))
@distributed(world_size=4)
def test_replicas(rank, world_size, way, codec, build):
    """The ranks that shard a parameter send codes; over replicas goes what they have added up, as it is."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharding, alone = {"mesh": mesh}, {"replicas": 2}
    model = two_blocks if build == "whole" else broken
    assert_as_alone(rank, 2, model, WAYS[way], POLICIES[codec], sharding=sharding, alone=alone, **LAST_BITS)


def unsharded(model, step):
    """Parameters gathered by hand, and kept over two microbatches."""
    model.unshard()
    for micro in range(2):
        model.set_reshard_after_backward(micro == 1)
        model.set_requires_gradient_sync(micro == 1)
        loss = loss_of(model, torch.distributed.get_rank(), step + micro)
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_unsharded_by_hand(rank, world_size, way):
    alone = {"microbatches": 2}
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], POLICIES["int8"], step=unsharded, alone=alone)


@distributed(world_size=4)
def test_fewer_ranks_in_backward(rank, world_size):
    """They gather pieces of what was decoded, as they are: forward and backward compute with the same numbers."""
    sharding = {"reshard_after_forward": 2}
    assert_as_alone(rank, world_size, two_blocks, compiled, POLICIES["int8"], sharding=sharding, **LAST_BITS)


SETTINGS = {
    "computes in bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "reduces in float16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "other dimensions": {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept": {"reshard_after_forward": False},
}


@distributed(world_size=2)
@pytest.mark.parametrize("setting", variants(SETTINGS, "computes in bfloat16"))
def test_beside_other_arguments(rank, world_size, setting):
    """Uncompiled and compiled, the same numbers; near to those without codecs."""
    policy = WirePolicy("int8", "int8", error_feedback=True)
    eager, whole, exact = (
        train(run(shard(two_blocks(), fully_shard, wire_policy=wire, **SETTINGS[setting])))
        for run, wire in ((WAYS["eager"], policy), (compiled, policy), (compiled, None))
    )
    assert_same(whole, eager)
    assert (whole.losses[-1] - exact.losses[-1]).abs() < 0.05
    assert not torch.equal(*(record.gradients[0]["head.weight"] for record in (whole, exact)))


@pytest.mark.more
@distributed(world_size=2)
def test_inductor(rank, world_size):
    """Generated code computes near to what ours does uncompiled."""
    run = partial(compiled, codegen="inductor")
    for build in (two_blocks, broken):
        assert_as_alone(rank, world_size, build, run, POLICIES["int8"] | {"error_feedback": True}, **LAST_BITS)


@pytest.mark.more
@distributed(world_size=2)
def test_feedback_comes_nearer(rank, world_size):
    """With SGD, whose steps are linear in gradients, what is lost now is made up for later."""

    def trained(wire):
        model = shard(two_blocks(), fully_shard, wire_policy=wire)
        record = train(model, steps=12, optimizer=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))
        return torch.cat([full.flatten() for full in record.parameters[-1].values()])

    exact = trained(None)
    without, with_feedback = (
        (trained(WirePolicy(reduce="int8", error_feedback=feedback)) - exact).norm() for feedback in (False, True)
    )
    assert 0 < with_feedback < without / 3
