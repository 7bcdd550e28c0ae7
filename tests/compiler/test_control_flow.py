"""Parameters that `torch.cond` and its like read: every rank gathers them, whichever branch it takes."""

import pytest
import torch
import torch.nn as nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan, while_loop
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import compiled, distributed
from tests.harness.ours import planned_ops
from tests.harness.reference import assert_same_gradients

OTHERS = ("cond, and outside", "cond, one side", "map", "while_loop")
SCANS = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="AOTAutograd fails at a plain model's scan, too"
)


class Layer(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.a, self.b = op, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.op == "map":
            return map_rows(lambda row: torch.tanh(self.a(row)), self.b(x))
        if self.op == "scan":
            return self.b(scan(self.one_of_scan, torch.zeros(8), x)[1])
        if self.op == "while_loop":
            with torch.no_grad():
                step = torch.tensor(0)
                _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(self.a(x))), (step, x))
            return self.b(x)
        first = self.a(x).mean() if self.op == "cond, and outside" else 0
        other = (lambda x: x.sin()) if self.op == "cond, one side" else (lambda x: self.b(x).sin())
        return first + torch.cond(x.sum() > 0, lambda x: torch.tanh(self.a(x)), other, (x,))

    def one_of_scan(self, carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carry = torch.tanh(self.a(carry) + row)
        return carry, carry * 1


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("op", ["cond", *OTHERS, pytest.param("scan", marks=SCANS)])
def test_equal_to_fsdp2(rank, world_size, op):
    """Ranks take turns at the branches."""
    models = []
    for shard in (fully_shard, torchs_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(op), Layer(op))
        for layer in model:
            shard(layer)
        shard(model)
        run = compiled(model, fullgraph=True) if shard is fully_shard else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((4, 8), 0.1 + step) * (1 if (step + rank) % 2 else -1)
            run(x).square().mean().backward()
            optimizer.step()
        models.append(model)
    assert_same_gradients(*models)


@distributed(world_size=2)
def test_a_parameter_of_both_branches_is_gathered_once(rank, world_size):
    """In front of them, with what the graph reads itself."""
    model = fully_shard(Layer("cond, and outside"))
    compiled(model, bucket="parameter")(torch.ones(4, 8)).sum().backward()
    forward = next(graph for graph in explain(model).graphs if graph.phase == "forward")
    assert planned_ops(forward)["gather"] == 4, planned_ops(forward)
