"""Named models to plan for: decoders of published sizes, made on the meta device, so that they need no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model.

    Attributes:
        name: of the model.
        dim: width.
        heads: how many heads of queries.
        kv_heads: how many heads of keys and values.
        hidden: width inside the feed-forward networks.
        layers: how many.
        vocabulary: how many tokens; embedding and head are not tied.
        experts: how many feed-forward networks a layer has, of which each token takes two; 0 for one that all tokens
            take.
        experts_every: 1 if each layer has experts, 2 if every other layer has them.
        gated: whether feed-forward networks are SwiGLU, with three matrices, and norms are RMSNorm; else they are GELU,
            with two matrices, and norms are LayerNorm without a bias.
        positions: how many learned positions the model has; 0 for none.
        tied: whether the head is the embedding's weight.
    """

    name: str
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    vocabulary: int
    experts: int = 0
    experts_every: int = 1
    gated: bool = True
    positions: int = 0
    tied: bool = False

    def flops_per_token(self, model: nn.Module, sequence: int) -> float:
        """Return the FLOPs of forward and backward for one token: ``6 N + 12 L H Q T``.

        Recomputation for checkpointing does not count. This is PaLM (arXiv:2204.02311), appendix B, as torchtitan
        counts: N is without the embedding and has only the two experts that a token takes, and attention counts as if
        it were not causal. A tied embedding counts, because the head multiplies by it.
        """
        kept = () if self.tied else ("embedding.",)
        counted = sum(
            param.numel() for name, param in model.named_parameters() if not name.startswith((*kept, "positions."))
        )
        if self.experts:
            inside = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
            counted -= inside * (self.experts - 2) // self.experts
        return 6 * counted + 12 * self.layers * self.dim * sequence


# The sizes are from each model's card or paper. Mixtral's router is a linear layer here, and its tokens are balanced.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", 4096, 32, 8, 14336, 32, 128256),
        Shape("llama3-70b", 8192, 64, 8, 28672, 80, 128256),
        Shape("llama3-405b", 16384, 128, 8, 53248, 126, 128256),
        Shape("llama2-7b", 4096, 32, 32, 11008, 32, 32000),
        Shape("llama2-70b", 8192, 64, 8, 28672, 80, 32000),
        Shape("qwen3-14b", 5120, 40, 8, 17408, 40, 151936),
        Shape("mixtral-8x7b", 4096, 32, 8, 14336, 32, 32000, experts=8),
        Shape("mpt-7b", 4096, 32, 32, 16384, 32, 50368, gated=False, positions=2048, tied=True),
        Shape("tiny", 64, 4, 2, 256, 2, 512),
    )
}


class Attention(nn.Module):
    """Causal attention with grouped keys and values.

    It calls the flash kernel's op itself, because the meta device cannot choose a kernel.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        head = s.dim // s.heads
        self.repeats, self.head = s.heads // s.kv_heads, head
        self.wq, self.wo = nn.Linear(s.dim, s.dim, bias=False), nn.Linear(s.dim, s.dim, bias=False)
        self.wk, self.wv = (nn.Linear(s.dim, s.kv_heads * head, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (t.repeat_interleave(self.repeats, 1) for t in (k, v))
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network; with ``gated=False`` it is a GELU network."""

    def __init__(self, dim: int, hidden: int, *, gated: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False) if gated else None
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) if self.w3 is None else F.silu(self.w1(x)) * self.w3(x))


def _norm(s: Shape) -> nn.Module:
    return nn.RMSNorm(s.dim) if s.gated else nn.LayerNorm(s.dim, bias=False)


class Experts(nn.Module):
    """Experts that get equal parts of the tokens, with two experts for each token.

    They have the compute of a balanced mixture, without routing.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(s.dim, s.hidden) for _ in range(s.experts))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        parts = torch.cat([x, x], 1).chunk(len(self.experts), 1)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], 1)
        first, second = out.chunk(2, 1)
        return first * gate[..., :1] + second * gate[..., 1:2]


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    def __init__(self, s: Shape, number: int) -> None:
        super().__init__()
        mixed = s.experts and number % s.experts_every == s.experts_every - 1
        self.attention_norm, self.ffn_norm = _norm(s), _norm(s)
        self.attention = Attention(s)
        self.ffn = Experts(s) if mixed else FeedForward(s.dim, s.hidden, gated=s.gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A model of a shape. ``forward`` returns the loss of int64 tokens and targets, both ``[batch, length]``.

    Args:
        s: the shape.
        checkpointing: "none"; "full": each layer is computed again in backward; "selective", as torchtitan does:
            attention and every other matrix product of a layer are saved.
    """

    def __init__(self, s: Shape, checkpointing: str = "none") -> None:
        super().__init__()
        self.shape = s
        self.embedding = nn.Embedding(s.vocabulary, s.dim)
        self.layers = nn.ModuleList(Layer(s, i) for i in range(s.layers))
        self.positions = nn.Embedding(s.positions, s.dim) if s.positions else None
        self.norm = _norm(s)
        self.head = nn.Linear(s.dim, s.vocabulary, bias=False)
        if s.tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = self._run(layer, x)
        logits = self.head(self.norm(x))
        # as F.cross_entropy, which has no gradient on the meta device
        return -logits.float().log_softmax(-1).gather(-1, targets[..., None]).mean()

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return layer(x)
        if self.checkpointing == "full":
            return checkpoint(layer, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _every_other_product())
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def _every_other_product() -> Callable[..., CheckpointPolicy]:
    seen = {False: 0, True: 0}  # matrix products of forward, and of the recomputation

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten.mm.default:
            seen[ctx.is_recompute] += 1
            saved = seen[ctx.is_recompute] % 2 == 1
        else:
            saved = op is aten._scaled_dot_product_flash_attention_for_cpu.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
