"""Parameters on the CPU."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from compiled_fsdp import fully_shard
from compiled_fsdp.sharding.layout import layout_of
from tests.harness import WAYS, assert_same, distributed, fsdp2, shard, train
from tests.harness.accumulation import accumulate
from tests.harness.fake import fake_group
from tests.harness.models import small


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_offload(rank, world_size, run):
    """Equal; parameters, gradients and optimizer state on the CPU, with accumulation and activation checkpointing
    too."""
    options = {
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    model, reference = shard(small(), fully_shard, **options), fsdp2(small(), **options)
    call = WAYS[run](model)
    ours = train(call, lambda c, step: accumulate(c, model, rank, step, 2))
    assert_same(ours, train(reference, lambda c, step: accumulate(c, reference, rank, step, 2)))
    assert {t.device.type for p in model.parameters() for t in (p, p.grad)} == {"cpu"}


def test_a_shard_stays_where_it_is():
    """The mesh is of GPUs, of which there is none; the offloaded shard is in host memory."""
    with fake_group(2):
        layout = layout_of("weight", nn.Parameter(torch.ones(4, 3)), init_device_mesh("cpu", (2,)), 0)
        of_gpus = DeviceMesh("cuda", [0, 1], _init_backend=False)
        rows = torch.ones(2, 3)
        dtensor = dataclasses.replace(layout, mesh=of_gpus).dtensor(rows)
    assert dtensor.to_local().data_ptr() == rows.data_ptr()
    assert (dtensor.shape, dtensor.device_mesh.device_type) == ((4, 3), "cuda")
