"""The models that ``real_link`` trains.

A model has the same parameters whenever it is made, because its constructor sets the seed. ``broken`` says where the
graph breaks are: "after" every layer, or "inside" every layer; "" makes none. A broken model has its own forward
function, because Dynamo gives up a function with a graph break in a loop, and with it the graphs that other models have
of the same function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import llama


class Block(nn.Module):
    """A residual MLP layer: [batch, width] to [batch, width], with 4 * width hidden features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class BrokenBlock(Block):
    """A ``Block`` with a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(middle))


class MLP(nn.Module):
    """A stack of ``Block``: [batch, width] to [batch, 10]. By default 8 layers of width 1024, 67 M parameters."""

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
        """Return the modules of each unit but the root, with further ``fully_shard`` arguments for the unit."""
        return [([layer], {}) for layer in self.layers]

    def left(self) -> list[nn.Module]:
        """Return the modules that only the root unit has."""
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
    """An ``MLP`` with a graph break after or inside each layer."""

    breaks_after: bool

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks_after:
                torch._dynamo.graph_break()
        return self.out(x)


class BrokenLlamaBlock(llama.Block):
    """A layer of ``examples/llama.py`` with a graph break between attention and feed-forward."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        torch._dynamo.graph_break()
        return x + self.mlp(self.mlp_norm(x))


class Llama(llama.Llama):
    """A wider model of ``examples/llama.py``: tokens [B, LENGTH] to logits [B, LENGTH, VOCABULARY]; 30 M parameters."""

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
        """Return units as torchtitan makes them. Norm and head stay unsharded, because backward needs them first."""
        last: list[nn.Module] = [self.norm, self.head]
        layers: list[tuple[list[nn.Module], dict[str, Any]]] = [([layer], {}) for layer in self.layers]
        return [([self.embedding], {}), *layers, (last, {"reshard_after_forward": False})]

    def left(self) -> list[nn.Module]:
        """Return no modules: every module belongs to a unit below the root."""
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
    """A ``Llama`` with a graph break after or inside each layer."""

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
    """A ``Llama`` with few layers and a large vocabulary: embedding and head have 84 % of its 40 M parameters."""

    DIM, LAYERS, VOCABULARY = 512, 2, 32768


def _break(model: MLP | Llama, broken: str, whole: type[nn.Module], block: type[nn.Module]) -> None:
    """Give the model the class with graph breaks; if ``broken`` is "inside", give its layers such a class, too."""
    if broken:
        model.__class__, model.breaks_after = whole, broken == "after"
    if broken == "inside":
        for layer in model.layers:
            layer.__class__ = block


MODELS: dict[str, type[MLP] | type[Llama]] = {"mlp": MLP, "llama": Llama, "embedding": Embedding}
