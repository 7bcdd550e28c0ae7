"""Training graphs of large models, captured by our own backend with a fake process group and without memory.

Parameters are on the meta device, so a 405B layer costs nothing. Attention is called as the flash kernel's op, or the
meta device would be given the unfused one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import compat, fully_shard
from compiled_fsdp.compiler.region import find_region
from compiled_fsdp.frontend.fsdp_module import units_of
from compiled_fsdp.passes.context import Groups, PassContext
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.pipeline import JOINT_PASSES, run_passes


@dataclass(frozen=True)
class Shape:
    """A decoder-only model. ``experts``: feed-forward networks of which every token takes two, in every other layer."""

    name: str
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    vocabulary: int
    experts: int = 0


SHAPES = (
    Shape("llama3-8b", 4096, 32, 8, 14336, 8, 128256),
    Shape("llama3-70b", 8192, 64, 8, 28672, 6, 128256),
    Shape("llama3-405b", 16384, 128, 8, 53248, 4, 128256),
    Shape("moe-embedding", 2048, 16, 16, 2816, 6, 256000, experts=8),
    Shape("small", 1024, 16, 16, 4096, 12, 50304),
)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        head = s.dim // s.heads
        self.heads, self.kv_heads = s.heads, s.kv_heads
        self.wq, self.wo = nn.Linear(s.dim, s.dim, bias=False), nn.Linear(s.dim, s.dim, bias=False)
        self.wk, self.wv = (nn.Linear(s.dim, s.kv_heads * head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (w(x).view(batch, length, self.kv_heads, -1).transpose(1, 2) for w in (self.wk, self.wv))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Tokens in equal parts to each expert, two experts a token: the compute of a balanced mixture, without routing."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(s.dim, s.hidden) for _ in range(s.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.router(x).softmax(-1)
        tokens = torch.cat([x, x], 1)
        parts = tokens.chunk(len(self.experts), 1)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], 1)
        first, second = out.chunk(2, 1)
        return first * gate[..., :1] + second * gate[..., 1:2]


class Layer(nn.Module):
    def __init__(self, s: Shape, mixed: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.attention = Attention(s)
        self.ffn = Experts(s) if mixed else FeedForward(s.dim, s.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.dim)
        self.layers = nn.ModuleList(Layer(s, bool(s.experts) and i % 2 == 1) for i in range(s.layers))
        self.norm = nn.RMSNorm(s.dim)
        self.head = nn.Linear(s.dim, s.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).sum(dtype=torch.float32)


@dataclass
class Captured:
    """The graphs of one training step before any of the passes on graphs, and how to make a context for them."""

    forward: GraphModule
    backward: GraphModule
    context: Callable[..., PassContext]
    # On how many nodes the ranks are; None for as few as possible.
    nodes: int | None = None


@contextlib.contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


def capture(shape: Shape, world_size: int, tokens: int, hardware: str = "h100", nodes: int | None = None) -> Captured:
    """Forward and backward of a bf16 model, a unit for each layer; one sequence of ``tokens`` on each rank.

    To be called inside of ``fake_group``. The ranks are on so many ``nodes``, or on as few as possible.
    """
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in units_of(model):
        unit.raise_meta = lambda: None  # type: ignore[method-assign]  # nothing will run
    graphs: dict[str, GraphModule] = {}
    regions = []

    def backend(gm: GraphModule, inputs: list[object], **_: object) -> Callable[..., object]:
        region = find_region(gm, inputs)
        regions.append(region)

        def context(phase: str, **options: object) -> PassContext:
            reads = {read.index: read for read in region.reads}
            groups = {label: replace(Groups.one(group.name), nodes=nodes) for label, group in enumerate(region.groups)}
            return PassContext(phase, reads, groups, hardware=PROFILES[hardware], **options)  # type: ignore[arg-type]

        backend.context = context  # type: ignore[attr-defined]

        def partition(joint: GraphModule, joint_inputs: object, **kwargs: object) -> object:
            return compat.min_cut_partition(run_passes(JOINT_PASSES, joint, context("joint")), joint_inputs, **kwargs)

        def keep(gm: GraphModule, phase: str) -> GraphModule:
            graphs[phase] = compat.copy_of(gm)
            return gm

        compat.aot_compile(gm, inputs, partition=partition, rewrite=keep, compiled=lambda gm, result: None)
        raise _Done

    with contextlib.suppress(_Done, torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(model, backend=backend, fullgraph=True)(torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
    if set(graphs) != {"forward", "backward"}:
        raise RuntimeError(f"captured {sorted(graphs)} of {shape.name}, not a forward and a backward graph")
    return Captured(graphs["forward"], graphs["backward"], backend.context, nodes)  # type: ignore[attr-defined]


class _Done(Exception):
    """The graphs are there; nothing is run."""
