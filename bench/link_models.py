"""The models that ``real_link`` trains.

A model has the same parameters whenever it is made; ``broken`` says where its graph breaks are: "after" every layer, or
"inside" of it. A broken model has a forward of its own: Dynamo gives up a function that breaks in a loop, and with it
the graphs that others have of the same function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import llama


class Block(nn.Module):
    """[batch, width] to [batch, width], through 4 * width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class BrokenBlock(Block):
    """The same with a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(middle))


class MLP(nn.Module):
    """[batch, width] to [batch, 10]: 8 layers, 67 M parameters, unless asked for others."""

    WIDTH, LAYERS = 1024, 8

    def __init__(self, broken: str = "", width: int = 0, layers: int = 0) -> None:
        super().__init__()
        width, layers = width or self.WIDTH, layers or self.LAYERS
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, 10)
        _break(self, broken, BrokenMLP, BrokenBlock)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def units(self) -> list[tuple[list[nn.Module], dict[str, Any]]]:
        """What is sharded together before the root is, and with which options."""
        return [([layer], {}) for layer in self.layers]

    def left(self) -> list[nn.Module]:
        """What the root has beside its units."""
        return [self.out]

    @classmethod
    def batch(cls, size: int, generator: torch.Generator) -> Tensor:
        """Rows of random numbers, [size, WIDTH]."""
        return torch.randn(size, cls.WIDTH, generator=generator)

    @staticmethod
    def loss(output: Tensor, x: Tensor) -> Tensor:
        """The mean square of the outputs."""
        return output.square().mean()


class BrokenMLP(MLP):
    """The same, broken after or inside of each layer."""

    breaks_after: bool

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks_after:
                torch._dynamo.graph_break()
        return self.out(x)


class BrokenLlamaBlock(llama.Block):
    """The demo's layer with a graph break between attention and feed-forward."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        torch._dynamo.graph_break()
        return x + self.mlp(self.mlp_norm(x))


class Llama(llama.Llama):
    """The demo's model, wider: RMSNorm, rotary attention, SwiGLU. Tokens [B, LENGTH] to logits; 30 M parameters."""

    DIM, LAYERS, VOCABULARY, LENGTH = 640, 6, llama.VOCABULARY, 128

    def __init__(self, broken: str = "") -> None:
        torch.manual_seed(0)
        super().__init__(self.DIM, self.LAYERS, self.LENGTH)
        if self.VOCABULARY != llama.VOCABULARY:
            self.embedding = nn.Embedding(self.VOCABULARY, self.DIM)
            self.head = nn.Linear(self.DIM, self.VOCABULARY, bias=False)
            self._init_weights()
        _break(self, broken, BrokenLlama, BrokenLlamaBlock)

    def units(self) -> list[tuple[list[nn.Module], dict[str, Any]]]:
        """As torchtitan shards: what comes last is needed first in backward, and stays unsharded until then."""
        last: list[nn.Module] = [self.norm, self.head]
        layers: list[tuple[list[nn.Module], dict[str, Any]]] = [([layer], {}) for layer in self.layers]
        return [([self.embedding], {}), *layers, (last, {"reshard_after_forward": False})]

    def left(self) -> list[nn.Module]:
        """What the root has beside its units: nothing."""
        return []

    @classmethod
    def batch(cls, size: int, generator: torch.Generator) -> Tensor:
        """``size`` random tokens in sequences of LENGTH."""
        return torch.randint(cls.VOCABULARY, (max(1, size // cls.LENGTH), cls.LENGTH), generator=generator)

    @staticmethod
    def loss(output: Tensor, x: Tensor) -> Tensor:
        """Cross entropy of each next token."""
        return F.cross_entropy(output[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class BrokenLlama(Llama):
    """The same, broken after or inside of each layer."""

    breaks_after: bool

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.rotary[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, table)
            if self.breaks_after:
                torch._dynamo.graph_break()
        return self.head(self.norm(x))


class Embedding(Llama):
    """The same with few layers and many tokens: embedding and head are 84 % of 40 M parameters."""

    DIM, LAYERS, VOCABULARY = 512, 2, 32768


def _break(model: MLP | Llama, broken: str, whole: type[nn.Module], block: type[nn.Module]) -> None:
    """Give a model, or its layers too, the class that breaks the graph."""
    if broken:
        model.__class__, model.breaks_after = whole, broken == "after"
    if broken == "inside":
        for layer in model.layers:
            layer.__class__ = block


MODELS: dict[str, type[MLP] | type[Llama]] = {"mlp": MLP, "llama": Llama, "embedding": Embedding}
