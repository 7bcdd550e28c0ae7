"""A small Llama-style transformer over bytes: RMSNorm, rotary attention, SwiGLU.

Plain ``torch.nn`` code, which does not know that the parameters will be sharded.
Shapes: B sequences, T bytes, D = ``dim``, H heads of size K = ``HEAD_DIM``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value
HEAD_DIM = 64
NORM_EPS = 1e-5


def rotary_table(length: int, base: float = 10000.0) -> Tensor:
    """Cosines and sines of every position's rotation angles, [2, length, K / 2]."""
    frequencies = base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [B, H, T, K] by position; component i is paired with component i + K / 2."""
    cos, sin = table.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each [B, H, T, K]
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    """Gated feed-forward, [B, T, D] -> [B, T, D], about 8/3 D wide inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 64 * math.ceil(8 * dim / 3 / 64)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer layer, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.attention = Attention(dim)
        self.mlp_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.mlp = SwiGLU(dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Bytes [B, T] -> logits of each next byte [B, T, 256]."""

    def __init__(self, dim: int, layers: int, seq_len: int) -> None:
        super().__init__()
        if dim % HEAD_DIM:
            raise ValueError(f"dim must be a multiple of the head size {HEAD_DIM}, got {dim}")
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.register_buffer("rotary", rotary_table(seq_len), persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw weights from Normal(0, 0.02), and smaller ones for outputs to the residual stream (GPT-2's rule)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(".out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.layers)) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.rotary[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, table)
        return self.head(self.norm(x))
