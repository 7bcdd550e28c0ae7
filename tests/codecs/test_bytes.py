"""What codecs send: counted, planned, and reported as it is."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import WirePolicy, count_communication, explain, fully_shard
from compiled_fsdp.buckets.codec import nbytes
from tests.harness import WAYS, distributed, forward_backward, shard, variants
from tests.harness.models import broken, small


def sent(model, world, *, whole):
    """Bytes of full tensors that a step of `model` moves.

    In a whole graph what backward does not need is gathered once.
    """
    shards = {name: -(-p.shape[0] // world) * p[0].numel() for name, p in model.named_parameters()}
    gathers = dict.fromkeys(shards, 2)
    if whole:
        names = [c.names for graph in explain(model).graphs for c in graph.collectives if c.bucket.kind == "gather"]
        gathers = Counter(name for bucket in names for name in bucket)
    return {
        "gather": world * sum(gathers[name] * nbytes("int8/256", n) for name, n in shards.items()),
        "reduce": world * sum(nbytes("float8_e4m3fn/256", n) for n in shards.values()),
    }


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_bytes_are_counted_as_they_are_sent(rank, world_size, way):
    for build in (small, broken):
        model = shard(build(), fully_shard, wire_policy=WirePolicy("int8", "float8_e4m3fn"), reshard_after_forward=True)
        run = WAYS[way](model)
        forward_backward(run, 0)
        with count_communication() as volume:
            forward_backward(run, 1)
        whole = way == "compiled_fsdp" and build is small
        assert {kind: volume[kind].bytes for kind in ("gather", "reduce")} == sent(model, world_size, whole=whole)
        for graph in explain(model).graphs:
            assert all(c.bucket.transport == "all_to_all" for c in graph.collectives if c.bucket.kind == "reduce")


@pytest.mark.more
@distributed(world_size=4)
def test_what_crosses_replicas_is_not_encoded(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for way in WAYS.values():
        model = shard(small(), fully_shard, wire_policy=WirePolicy(reduce="int8"), mesh=mesh)
        run = way(model)
        forward_backward(run, 0)
        with count_communication() as volume:
            forward_backward(run, 1)
        shards = [-(-p.shape[0] // 2) * p[0].numel() for p in model.parameters()]
        assert volume["reduce"].bytes == 2 * sum(nbytes("int8/256", n) for n in shards)
        assert volume["all_reduce"].bytes == 4 * sum(shards)


@distributed(world_size=2)
def test_full_parameters_are_the_same_on_every_rank(rank, world_size):
    """The own part is what was sent, too; shards stay exact."""
    model = shard(small(), fully_shard, wire_policy=WirePolicy(gather="int8"))
    before = [p.to_local().clone() for p in model.parameters()]
    full = []
    compiled_sees = torch.compiler.disable(lambda m: full.append(m.head.weight.detach().clone()))
    model.register_forward_pre_hook(lambda m, _: compiled_sees(m))
    model(torch.zeros(1, 4, dtype=torch.long))
    theirs = full[0].clone()
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(full[0], theirs)
    assert not torch.equal(full[0], model.head.weight.full_tensor())
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
