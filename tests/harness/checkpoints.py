"""A model with everything that is hard to save, and its full state for comparisons."""

import torch
import torch.nn as nn

from tests.harness.models import VOCABULARY, loss_of
from tests.harness.reference import full


class Odd(nn.Module):
    """A model with tied weights, a frozen parameter, parameters of 3 rows (the last of 4 ranks has none of them), and
    buffers, one of them without dimensions."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 16)) for _ in range(2))
            self.scale = nn.Parameter(torch.randn(16), requires_grad=False)
            self.head = nn.Linear(16, VOCABULARY, bias=False)
            self.register_buffer("offset", torch.randn(16))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards.add_(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale + self.offset)


def everyone_alike(model: nn.Module, step: int) -> torch.Tensor:
    """Run a step on the same batch on each rank. Its result is the same at every world size, because 2 or 4 equal
    gradients sum to exactly 2 or 4 times one of them."""
    loss = loss_of(model, 0, step)
    loss.backward()
    return loss.detach()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return all full tensors of a model without wrappers, and of its optimizer."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, param in model.named_parameters():
            found |= {f"{name}: {key}": full(value) for key, value in optimizer.state[param].items()}
    return found
