"""A small transformer, equal on every rank and in every run, and its data."""

import functools
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61  # not a multiple of any world size, so that the embedding and the head have uneven shards
LENGTH = 16


class Attention(nn.Module):
    """A layer with attention's four parameters, (batch, length, dim) in and out. It has gates instead of a softmax,
    because they compile in less time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.v(x) * torch.sigmoid(self.q(x) * self.k(x)))


class Block(nn.Module):
    """An attention and an MLP, each after a norm: 10 parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A model from tokens (batch, length <= LENGTH) to logits (batch, length, vocabulary), float32.

    It has 10 parameters per block and 5 in the root: 25 by default, 24 with `ties` (the head is the embedding). The
    same seed gives the same parameters, whatever the caller's random state, which stays unchanged.
    """

    def __init__(
        self,
        dim: int = 32,
        blocks: int = 2,
        *,
        vocabulary: int = VOCABULARY,
        ties: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, dim)
            self.position = nn.Embedding(LENGTH, dim)
            self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocabulary, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Checkpointed(Transformer):
    """A `Transformer` with an activation checkpoint around each block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Broken(Transformer):
    """A `Transformer` with a graph break before each block, where it calls `between(model, number, x)`."""

    between = staticmethod(lambda model, number, x: x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            torch._dynamo.graph_break()
            x = block(self.between(self, number, x))
        return self.head(self.norm(x))


class Hidden(Transformer):
    """A `Transformer` from tokens to the head's inputs. The loss calls the head, for a part of the batch at a time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Mlp(Block):
    """The second half of a `Block`: 4 parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def small(seed: int = 0, *, blocks: int = 1, dim: int = 16, cls: type[Transformer] = Transformer) -> Transformer:
    """Return a Transformer without attention, for tests that work with any model: it compiles in half the time. It has
    9 parameters by default, 13 with two blocks."""
    return without_attention(cls(dim=dim, blocks=blocks, seed=seed))


def without_attention(model: Transformer) -> Transformer:
    """Reduce each block of `model` to its second half, and return the model."""
    for block in model.blocks:
        del block.norm1, block.attention
        block.__class__ = Mlp  # keeps the parameters that are left
    return model


def batch(
    rank: int, step: int, *, size: int = 4, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens that follow them, each (size, length) int64, on the default device. Every rank and
    step has another batch."""
    generator = torch.Generator("cpu").manual_seed(1_000_003 * step + rank)
    tokens = torch.randint(vocabulary, (size, length + 1), generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, rank: int, step: int, **shape: int) -> torch.Tensor:
    """Return the mean cross entropy of `model` on `batch(rank, step, **shape)`, a scalar."""
    tokens, targets = batch(rank, step, **shape)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def loss_of_two(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the product of two forwards' losses, so that one backward goes through both."""
    return loss_of(model, rank, step) * loss_of(model, rank, step + 7)


def broken(between=None, *, blocks: int = 2) -> Broken:
    """Return a `Broken` model without attention: 13 parameters. `between` runs in eager code."""
    model = small(blocks=blocks, cls=Broken)
    if between is not None:
        model.between = torch.compiler.disable(between)
    return model


BUILD = {"whole": functools.partial(small, blocks=2), "broken": broken}
"""Functions that build a model with the same parameters: in one graph, and with graph breaks."""


class PartlyDisabled(Transformer):
    """A `Transformer` whose second block is never compiled."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            x = torch.compiler.disable(block)(x) if number == 1 else block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """A model whose training calls `encode` and then forward. `encode` calls a unit inside, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.project, self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def encode(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        """Map [B, 8] to [B, 16]; with `fails` raise ArithmeticError."""
        x = torch.tanh(self.project(x))
        if fails:
            raise ArithmeticError("told to")
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
