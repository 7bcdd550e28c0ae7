"""Training with codecs: the numbers of a single process that encodes and decodes every shard itself."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
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
    assert_as_alone(rank, world_size, two_blocks, WAYS[way], options, **LAST_BITS)


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
    """Generated code sums the embedding's gradient in another order."""
    for options in (POLICIES["int8"], POLICIES["feedback"]):
        assert_as_alone(rank, world_size, broken, compiled, options, step=in_compiled_autograd, **LAST_BITS)


@distributed(world_size=2)
def test_checkpoints_and_buckets(rank, world_size):
    """What is gathered does not depend on the bucket, nor on the form of a collective."""
    options = POLICIES["int8"] | {"error_feedback": True}
    checkpointed = partial(small, blocks=2, cls=Checkpointed)
    assert_as_alone(rank, world_size, checkpointed, compiled, options, plain=two_blocks)
    for bucket in ("none", "module", 0.01):
        assert_as_alone(rank, world_size, two_blocks, partial(compiled, bucket=bucket), options)


def microbatches(model, step):
    """Two, of which the second one reduces."""
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        loss = loss_of(model, torch.distributed.get_rank(), step + micro)
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_accumulation(rank, world_size, way):
    """What waits is added before it is encoded, once."""
    for options in (POLICIES["int8"], POLICIES["feedback"]):
        alone = {"microbatches": 2}
        assert_as_alone(rank, world_size, two_blocks, WAYS[way], options, step=microbatches, alone=alone)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=4)
def test_replicas(rank, world_size, way):
    """The ranks that shard a parameter send codes; over replicas goes what they have added up, as it is."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharding, alone = {"mesh": mesh}, {"replicas": 2}
    for build in (two_blocks, broken):
        for options in (POLICIES["int8"], POLICIES["feedback"]):
            assert_as_alone(rank, 2, build, WAYS[way], options, sharding=sharding, alone=alone, **LAST_BITS)


def unsharded(model, step):
    """Parameters gathered by hand, and kept over two microbatches."""
    model.unshard()
    for micro in range(2):
        model.set_reshard_after_backward(micro == 1)
        model.set_requires_gradient_sync(micro == 1)
        loss = loss_of(model, torch.distributed.get_rank(), step + micro)
        loss.backward()
    return loss.detach()


@distributed(world_size=2)
def test_unsharded_by_hand(rank, world_size):
    for way in WAYS.values():
        assert_as_alone(rank, world_size, two_blocks, way, POLICIES["int8"], step=unsharded, alone={"microbatches": 2})


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
def test_beside_other_arguments(rank, world_size):
    """Uncompiled and compiled, the same numbers; near to those without codecs."""
    for name, sharding in SETTINGS.items():
        policy = WirePolicy("int8", "int8", error_feedback=True)
        eager, whole, exact = (
            train(run(shard(two_blocks(), fully_shard, wire_policy=wire, **sharding)))
            for run, wire in ((WAYS["eager"], policy), (compiled, policy), (compiled, None))
        )
        assert_same(whole, eager)
        assert (whole.losses[-1] - exact.losses[-1]).abs() < 0.05, name
        assert not torch.equal(*(record.gradients[0]["head.weight"] for record in (whole, exact))), name


@distributed(world_size=2)
def test_inductor(rank, world_size):
    """Generated code computes near to what ours does uncompiled."""
    run = partial(compiled, codegen="inductor")
    for build in (two_blocks, broken):
        assert_as_alone(rank, world_size, build, run, POLICIES["int8"] | {"error_feedback": True}, **LAST_BITS)


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
