"""A stack of Llama layers: nine parameters per layer and three more, so that 32 layers have 291 parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batch."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    @property
    def parameters(self) -> int:
        return 2 * self.vocabulary * self.width + self.width + self.layers * (
            4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        )  # fmt: skip


TINY = Shape(layers=32, width=8, hidden=16, heads=2, vocabulary=16, batch=2, length=4)
SMALL = Shape(layers=2, width=64, hidden=128, heads=4, vocabulary=128, batch=2, length=32)
LARGE = Shape(layers=8, width=4096, hidden=11008, heads=32, vocabulary=32000, batch=1, length=4096)
"""Eight layers of Llama 7B, 1.9 billion parameters: in bfloat16, with gradients and Adam's state, 15 GB."""


class Layer(nn.Module):
    """A Llama layer: [batch, length, width] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    """A Llama model with its loss: tokens [batch, length] to the mean cross entropy of each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def stack(shape: Shape, device: torch.device, dtype: torch.dtype) -> Stack:
    """Return a model that has the same weights whenever it is made."""
    torch.manual_seed(0)
    with device:
        model = Stack(shape).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def tokens_of(shape: Shape, device: torch.device) -> Tensor:
    """Return a batch of random tokens, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=generator).to(device)


def by_layer(model: Stack, shard: Callable[[nn.Module], object]) -> Stack:
    """Call ``shard`` on each layer, then on ``model``, and return the model."""
    for layer in model.layers:
        shard(layer)
    shard(model)
    return model
