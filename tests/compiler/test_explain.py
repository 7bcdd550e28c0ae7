"""What `explain` says of graph breaks, wherever Dynamo ends a piece."""

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from tests.harness import compiled, distributed


class First(nn.Module):
    """Before the first op: the piece before the break is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


class NoRead(First):
    """The piece before the break has an op, and reads no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.layer(x)


class InLoop(First):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x


class InHelper(First):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(broken(x))


def broken(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


class Nested(nn.Module):
    """In a module inside, called by a frame that has read nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InLoop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@distributed(world_size=1, reset=True)
@pytest.mark.parametrize("cls", [First, NoRead, InLoop, InHelper, Nested])
def test_every_graph_break_has_its_line(rank, world_size, cls):
    torch.compiler.reset()
    broken_model, whole = fully_shard(cls()), fully_shard(nn.Sequential(nn.Linear(8, 8)))
    for model in (broken_model, whole):
        compiled(model)(torch.ones(2, 8)).sum().backward()
    breaks = explain(broken_model).graph_breaks
    assert any(__file__ in where and "torch._dynamo.graph_break()" in where for _, where in breaks), breaks
    assert len(breaks) == len(set(breaks))
    assert explain(whole).graph_breaks == ()


@distributed(world_size=1, reset=True)
def test_models_that_share_their_code(rank, world_size):
    """Each has its graphs explained, whoever they were compiled for."""

    def build() -> tuple[nn.Module, nn.Module]:
        model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
        return model, compiled(model)

    torch.compiler.reset()
    (first, run_first), (second, run_second) = build(), build()
    run_first(torch.ones(2, 8)).sum().backward()
    assert explain(second).graphs == ()
    run_second(torch.ones(2, 8)).sum().backward()
    assert len(explain(first).graphs) == 2
    assert explain(second).graphs == explain(first).graphs
