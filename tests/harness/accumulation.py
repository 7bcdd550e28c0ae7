"""Gradient accumulation: a step of several microbatches, for any model."""

import torch
import torch.nn as nn

from tests.harness import loss_of


def accumulate(run, model, rank: int, step: int, count: int, *, sync: bool = False) -> torch.Tensor:
    """Run forward and backward of `count` microbatches; return the last loss. The last microbatch has gradient sync;
    with `sync` all of them have it."""
    for micro in range(count):
        last = micro == count - 1
        model.set_requires_gradient_sync(sync or last)
        model.set_is_last_backward(last)
        loss = loss_of(run, rank, step * count + micro)
        loss.backward()
        if not (sync or last):
            assert all(p.grad is None for p in model.parameters())
    return loss.detach()


def accumulating(model, rank: int, count: int = 3, **options):
    return lambda run, step: accumulate(run, model, rank, step, count, **options)


class Branching(nn.Module):
    """A model that uses one of two layers, as its second argument says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.blocks[which](self.first(x).relu())
