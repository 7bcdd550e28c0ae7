"""What the planner is told of hardware and of where groups are."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp.compiler.hardware import groups_of, hardware_of
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.extract import channel_of
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
