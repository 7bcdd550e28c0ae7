"""What the planner is told of hardware and of where groups are."""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE, Kind
from compiled_fsdp.compiler.hardware import groups_of, hardware_of
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.passes.channel import channel_of
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.extract import persistent_bytes
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.passes.plan.channels import CommChannel
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.sharding.process_groups import shard_group
from tests.harness.fake import fake_group

NODES_OF_8 = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8"})


@NODES_OF_8
def test_shards_between_nodes_and_tensors_inside():
    """8 nodes of 8: the mesh's second dimension is inside of nodes, so each shard is on a node of its own."""
    with fake_group(64):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("shard", "tensor"))
        outer, inner = shard_group(mesh["shard"], mesh), shard_group(mesh["tensor"], mesh)
        hardware = PROFILES["h100"]
        groups = {0: groups_of(outer, hardware), 1: groups_of(inner, hardware)}
    assert (groups[0].nodes, groups[1].nodes) == (8, 1)
    ctx = PassContext("forward", {}, groups, hardware=hardware)
    between, inside = (channel_of(ctx, True, 8, number).bytes_per_second for number in groups)
    assert between == pytest.approx(340e9 / 8 * 8 / 7)
    assert inside == pytest.approx(360e9 * 8 / 7)


@NODES_OF_8
def test_replicas_are_on_other_nodes():
    """HSDP: shards inside of a node, replicas on as many nodes as there are."""
    with fake_group(16):
        group = shard_group(init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard")))
        groups = groups_of(group, PROFILES["h100"])
    assert (groups.nodes, groups.replicate_nodes) == (1, 2)


def test_float32_on_tensor_cores():
    """``allow_tf32`` makes products of float32 8 times as quick: compute that hides less."""
    region, options = SimpleNamespace(on_cpu=False, groups=()), Options(hardware="h100")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        rates = {}
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            rates[precision] = hardware_of(options, region).matmul("float32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert rates == {"ieee": PROFILES["h100"].flops["float32"], "tf32": PROFILES["h100"].flops["tf32"]}
    assert rates["tf32"] > 6 * rates["ieee"]


def read(**options) -> Read:
    return Read(0, "weight", 0, 2, (8, 4), "bfloat16", 2, 0, 0, keep_for_backward=False, trainable=True, **options)


def test_what_is_in_host_memory_takes_none_of_the_device():
    """Shard, gradient and two float32 of optimizer state: 16 elements of 4 + 4 + 8 bytes."""
    for in_host_memory, expected in ((False, 16 * 16), (True, 0)):
        ctx = PassContext("forward", {0: read(in_host_memory=in_host_memory)}, {}, optimizer_bytes_per_element=8)
        assert persistent_bytes(ctx) == expected


@pytest.mark.parametrize("form", [SINGLE, FLAT, COALESCED])
def test_shards_in_host_memory_are_copied_one_by_one(form):
    """At PCI Express's rate, before a launch of any form."""
    tasks = Tasks(
        "forward",
        (ComputeSegment(("end",), 0.0, 0),),
        (),
        (),
        {"gather": CommChannel(0.0, 0.0, 1e9, world=2)},
        copy_seconds=1e-12,
        kernel_seconds=1e-6,
        host_copy_seconds=1e-10,
    )
    on_device = [
        CollectiveTask(0, 0, place, "gather", TensorSize(1000), 0, 0) for place in range(1 if form == SINGLE else 3)
    ]
    in_host_memory = [replace(task, size=TensorSize(1000, host=1000)) for task in on_device]
    more = tasks.packing(in_host_memory, form, Kind.GATHER) - tasks.packing(on_device, form, Kind.GATHER)
    assert more == pytest.approx(len(on_device) * (1e-6 + 1000 * 1e-10))
