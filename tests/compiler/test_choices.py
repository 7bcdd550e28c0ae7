"""The choices of ``explain``: their times and memory are those of plans of models that are placed so."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.cost import PROFILES
from tests.harness import shard
from tests.harness.fake import fake_group

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def choices(**how):
    with torch.device("meta"):
        model, x = Stack(), torch.zeros(256, 512, requires_grad=True)
    shard(model, fully_shard, mp_policy=POLICY, **how)
    return explain(model, (x,), options={"hardware": PROFILES["h100"], "codegen": "aot_eager"}).choices


def test_choices_are_the_plans_of_models_placed_so(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with fake_group(16):
        found = choices()
        kept = choices(reshard_after_forward=False)
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        hsdp = choices(mesh=mesh)
    assert [choice.name for choice in found] == ["as it is", "all kept", "HSDP"]
    assert [dict(choice.change) for choice in found[1:]] == [{"reshard_after_forward": False}, {"mesh": (2, 8)}]
    for guess, real in ((found[1], kept[0]), (found[2], hsdp[0])):
        assert guess.seconds == pytest.approx(real.seconds, rel=1e-6)
        assert guess.exposed == pytest.approx(real.exposed, rel=1e-6)
        assert guess.peak == pytest.approx(real.peak, rel=1e-6)
        assert guess.fits
    assert [choice.name for choice in kept] == ["as it is", "HSDP"]  # nothing says where backward would gather again
    assert [choice.name for choice in hsdp] == ["as it is", "all kept"]
    assert found[2].to_dict()["change"] == {"mesh": [2, 8]}
    assert str(found[1]).startswith("all kept: ")
