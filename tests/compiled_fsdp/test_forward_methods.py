"""Methods beside forward that read sharded parameters (`register_fsdp_forward_method`)."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register

from compiled_fsdp import explain, fully_shard, register_fsdp_forward_method, share_comm_ctx
from tests.harness import assert_same, distributed, train


class Encoder(nn.Module):
    """Training calls `encode` and then forward; `encode` calls a unit inside, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.project, self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def encode(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        """[B, 8] to [B, 16]."""
        x = torch.tanh(self.project(x))
        if fails:
            raise ArithmeticError("told to")
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def build(function, register) -> nn.Module:
    model = Encoder()
    function(model.layer)
    function(model)
    register(model, "encode")
    return model


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
def test_a_registered_method(rank, world_size, way):
    """Equal to FSDP2; compiled, its parameters are read in the method's own graph. An exception closes the unit."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def step(model, index):
        loss = model(model.encode(x * (index + 1))).square().mean()
        loss.backward()
        return loss.detach()

    model = build(fully_shard, register_fsdp_forward_method)
    if way == "compiled_fsdp":
        model.encode = torch.compile(model.encode, backend="compiled_fsdp", options={"codegen": "aot_eager"})
        model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    assert_same(train(model, step), train(build(torch_fully_shard, torch_register), step))
    if way == "compiled_fsdp":
        read = [[read.name for read in graph.reads] for graph in explain(model).graphs if graph.phase == "forward"]
        assert ["project.weight", "project.bias", "layer.weight", "layer.bias"] in read
    with pytest.raises(ArithmeticError):
        model.encode(x, fails=True)
    assert model.project.weight is dict(model.named_parameters())["project.weight"]
    model.zero_grad()
    step(model, 0)


@distributed(world_size=1)
def test_what_cannot_be_registered(rank, world_size):
    model = fully_shard(Encoder())
    with pytest.raises(ValueError, match=r"Encoder'> does not have a method generate"):
        register_fsdp_forward_method(model, "generate")
    with pytest.raises(ValueError, match="share_comm_ctx"):
        share_comm_ctx([model, nn.Linear(2, 2)])
    share_comm_ctx([model])
    plain = nn.Linear(2, 2)
    register_fsdp_forward_method(plain, "nothing")  # as FSDP2: not sharded, nothing to do
    assert not hasattr(plain, "nothing")
