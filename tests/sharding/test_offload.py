"""Parameters on the CPU."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from compiled_fsdp import fully_shard
from tests.harness import WAYS, assert_same, distributed, fsdp2, shard, train
from tests.harness.accumulation import accumulate
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
