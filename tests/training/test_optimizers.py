"""Optimizers and clipping give what they give with FSDP2."""

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import fully_shard
from tests.harness import (
    assert_same,
    collectives_of,
    compiled,
    ddp,
    distributed,
    forward_backward,
    fsdp2,
    shard,
    train,
    variants,
)
from tests.harness.models import small
from tests.harness.reference import full

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW for-loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "ASGD": (torch.optim.ASGD, {}),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_with_fsdp2(rank, world_size, name):
    make, options = OPTIMIZERS[name]

    def steps(model: nn.Module) -> Any:
        return train(model, optimizer=make(model.parameters(), **options), steps=3)

    assert_same(steps(shard(small(), fully_shard)), steps(fsdp2(small())))


@distributed(world_size=2)
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(rank, world_size, norm):
    models = [shard(small(), fully_shard), fsdp2(small())]
    norms = []
    for model in models:
        forward_backward(model, 0)
        norms.append(clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm).full_tensor())
    assert torch.equal(*norms)
    assert norms[0] > 1e-2, "or nothing is clipped"
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))


@distributed(world_size=4)
@pytest.mark.parametrize("replicas", variants([1, 2], 2))
def test_clipping(rank, world_size, replicas):
    """On four ranks and with replicas the norm is DDP's, for one all-reduce of a number; of torch's two for the
    maximum."""
    reference = ddp(small())
    mesh = None if replicas == 1 else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(small(), fully_shard, mesh=mesh)
    run = compiled(model)
    for norm in (1.0, 2.0, math.inf):
        for m, call in ((reference, reference), (model, run)):
            m.zero_grad()
            forward_backward(call, 0)
        expected = clip_grad_norm_(reference.parameters(), 1e-2, norm_type=norm)
        norms = []
        reductions = collectives_of(
            lambda norm=norm, norms=norms, model=model: norms.append(
                clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm).full_tensor()
            ),
            "_c10d_functional::all_reduce",
        )
        assert len(reductions) == (2 if norm == math.inf else 1)
        torch.testing.assert_close(norms[0], expected, rtol=1e-6, atol=0)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-8)
