"""What Dynamo traces apart: after it, a unit's forward ends as ever."""

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch._higher_order_ops import map as map_rows
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from tests.harness import compiled, distributed, variants
from tests.harness.reference import assert_same_gradients


def hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda grad: grad * 0.5)
    return y


OPS = {
    "hook of a tensor": hooked,
    "cond": lambda y: torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,)),
    "map": lambda y: map_rows(lambda row: row * 2, y),
}


class Layer(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.inner = op, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + OPS[self.op](y) if self.op in OPS else y


def build(op: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(op), Layer(""), Layer(op))


@distributed(world_size=2)
@pytest.mark.parametrize("op", variants(OPS, "cond"))
@pytest.mark.parametrize("backend", variants(["compiled_fsdp", "aot_eager"], "compiled_fsdp"))
def test_the_unit_is_closed_after_the_forward(rank, world_size, op, backend):
    """Torch 2.13 and 2.14 lose what traced code writes to attributes after such an op, if it has looked at the object
    before. The model would then show its full parameters for ever: clipping would find no gradients, for one."""
    models = []
    for shard, units in ((fully_shard, True), (fully_shard, False), (torchs_fully_shard, True)):
        model = build(op)
        for layer in model if units else ():
            shard(layer)
        shard(model)
        run = model
        if shard is fully_shard:
            run = compiled(model) if backend == "compiled_fsdp" else torch.compile(model, backend=backend)
        for step in range(2):
            run(torch.full((4, 8), 0.1 + step + rank)).square().mean().backward()
            assert all(isinstance(param, DTensor) for param in model.parameters()), "the model is open"
        models.append(model)
    for model in models[:2]:
        assert_same_gradients(model, models[2])


@distributed(world_size=2)
@pytest.mark.parametrize("op", variants(OPS, "hook of a tensor"))
def test_parameters_that_may_be_unused_are_read_anew_in_each_forward(rank, world_size, op):
    """What a forward has read to give zero gradients is not kept to the next one."""
    models = []
    for shard in (fully_shard, torchs_fully_shard):
        model = shard(build(op))
        if shard is fully_shard:
            model.set_reduce_scatter_unused_params(True)
        run = compiled(model) if shard is fully_shard else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            run(torch.full((4, 8), 0.1 + step + rank)).square().mean().backward()
            optimizer.step()
        models.append(model)
    assert_same_gradients(*models)


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_before_a_checkpoint(rank, world_size, async_op):
    """In its body nothing outside may change, so the units are sharded again at the end of the forward. A graph break
    there would come with what `unshard()` left: a rank with another batch size, which compiles anew for it, had a graph
    without the break then, and its collectives met others.
    """
    models = []
    for shard in (fully_shard, torchs_fully_shard):
        torch.manual_seed(0)
        model = Checkpointed(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            shard(layer)
        shard(model)
        run = compiled(model) if shard is fully_shard else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            if step % 2:
                model[0].unshard(async_op=async_op)
            rows = 1 if rank == 0 and step == 1 else 2
            loss = run(torch.full((rows, 8), 0.1 + step + rank)).square().mean()
            assert all(isinstance(param, DTensor) for param in model.parameters())
            loss.backward()
            optimizer.step()
        models.append(model)
    assert_same_gradients(*models)
    assert not counters["graph_break"]
