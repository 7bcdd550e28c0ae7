"""The planner's count of a graph's memory, compared with what Inductor's code allocates for a GPU."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from compiled_fsdp.passes.memory import peak_bytes, storage_bytes
from tests.harness import variants
from tests.harness.cuda_dry import cuda_code
from tests.harness.fake import fake_group
from tests.harness.wrapper_memory import wrapper_peak

WIDTH, TOKENS, VOCABULARY = 64, 512, 2048


class Gated(nn.Module):
    """A SwiGLU network after a norm, beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Biased(nn.Module):
    """A GELU network with biases after a LayerNorm, beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Layers and a head. It returns the loss: cross entropy of logits in float32, or without a head the squares."""

    def __init__(self, layer, layers, *, head=True, again=False):
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if head else None
        self.again = again

    def forward(self, x, targets):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        if self.head is None:
            return x.float().square().mean()
        return F.cross_entropy(self.head(x).float(), targets)


MODELS = {
    "logits": lambda: Classifier(Gated, 2),
    "layers, checkpoints": lambda: Classifier(Gated, 8, head=False, again=True),
    "logits, checkpoints": lambda: Classifier(Gated, 3, again=True),
    "layers": lambda: Classifier(Gated, 4, head=False),
    "biases": lambda: Classifier(Biased, 3, head=False),
    "biases, logits": lambda: Classifier(Biased, 2),
}


@pytest.mark.parametrize("name", variants(MODELS, "logits", "biases"))
def test_count_is_what_the_code_allocates(name):
    """Never less, and at most 8 % more; the code of torch 2.11 holds less in a backward with checkpoints.

    Without functions for what layers repeat, as under a budget.
    """
    with fake_group(1), cuda_code() as found:
        model = fully_shard(MODELS[name]().to(torch.bfloat16))
        run = torch.compile(model, backend="compiled_fsdp", options={"hardware": "h100", "disable_passes": ["share"]})
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        run(x, torch.zeros(TOKENS, dtype=torch.int64))
    assert [code.phase for code in found.codes] == ["forward", "backward"]
    for code in found.codes:
        given = {node.name: storage_bytes(node) for node in code.graph.graph.nodes if node.op == "placeholder"}
        allocated = wrapper_peak(code.text, given)
        counted = peak_bytes(code.graph, backward=code.phase == "backward", shards=frozenset())
        most = 1.08 if torch.__version__ >= "2.12" else 1.22
        assert 0.999 * allocated <= counted <= most * allocated, (code.phase, allocated, counted)
