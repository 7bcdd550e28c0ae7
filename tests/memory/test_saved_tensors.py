"""What a forward holds for its backward: with `reshard_after_forward` nothing that parameters alone give."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from compiled_fsdp import fully_shard
from tests.harness import Transformer, batch, compiled, distributed, fsdp2, shard, variants
from tests.harness.models import VOCABULARY, Broken, small
from tests.harness.saved_tensors import bytes_of_full_parameters


class Merged(nn.Module):
    """A linear layer with a low-rank update, as LoRA trains it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))
        self.a, self.b = nn.Parameter(torch.randn(dim, 4)), nn.Parameter(torch.randn(4, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight + self.a @ self.b))


class Normalised(nn.Module):
    """A linear layer whose weight has norm 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight / self.weight.norm()))


class Derived(nn.Module):
    """Tokens to logits through weights that are computed from parameters."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList([Merged(dim), Normalised(dim)])
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def saved(run: nn.Module, tokens: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    """Copies of what `run(tokens)` saves, except for views of the parameters' shards."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = run(tokens)
    node = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        ((node, _),) = [edge for edge in node.next_functions if edge[0] is not None]
    assert "CompiledFunction" in node.name(), node.name()
    tensors = [*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())]
    shards = {param.to_local().untyped_storage().data_ptr() for param in run.parameters()}
    kept = [t.detach().clone() for t in tensors if t.untyped_storage().data_ptr() not in shards]
    out.float().sum().backward()
    assert {param.grad.dtype for param in run.parameters()} == {torch.float32}
    return kept


def bytes_of_parameters(run: nn.Module, rank: int, autocast: bool) -> tuple[int, int]:
    """The bytes of what `run` saves that changes with the parameters and not with the inputs, and of all it saves."""
    here, elsewhere = batch(rank, 0)[0], batch(rank, 1)[0]
    first, other_inputs = saved(run, here, autocast), saved(run, elsewhere, autocast)
    with torch.no_grad():
        for param in run.parameters():
            param.to_local().mul_(1.5).add_(0.25)
    other_parameters = saved(run, here, autocast)
    total = sum(t.nbytes for t in first)
    unchanged = [(a, c) for a, b, c in zip(first, other_inputs, other_parameters, strict=True) if torch.equal(a, b)]
    return sum(a.nbytes for a, c in unchanged if not torch.equal(a, c)), total


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("codegen", "model", "autocast"),
    [
        ("aot_eager", Derived, False),
        pytest.param("aot_eager", small, False, marks=pytest.mark.more),
        *(pytest.param("aot_eager", model, True, marks=pytest.mark.more) for model in (small, Derived)),
        *(pytest.param("inductor", Derived, autocast, marks=pytest.mark.more) for autocast in (False, True)),
    ],
)
def test_no_saved_tensor_depends_on_parameters_alone(rank, world_size, codegen, model, autocast):
    """Gradients are float32 under autocast."""
    run = compiled(shard(model(), fully_shard, reshard_after_forward=True), codegen=codegen)
    of_parameters, total = bytes_of_parameters(run, rank, autocast)
    assert of_parameters == 0
    assert total > 0


@distributed(world_size=2)
@pytest.mark.parametrize("autocast", variants([False, True], True))
def test_kept_parameters_are_saved(rank, world_size, autocast):
    """With `reshard_after_forward=False` every weight that backward reads is held."""
    model = shard(small(), fully_shard, reshard_after_forward=False)
    least = 4 * sum(p.numel() for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2)
    of_parameters, _ = bytes_of_parameters(compiled(model), rank, autocast)
    assert of_parameters >= (least // 2 if autocast else least)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["FSDP2", "whole", "broken"])
def test_full_parameters_after_forward(rank, world_size, way):
    """None of the blocks' matrices with `reshard_after_forward=True`; all of them without, or this could not fail."""
    for reshard_after_forward in (True, False):
        torch.manual_seed(0)
        plain = small(cls=Broken if way == "broken" else Transformer)
        full = [
            param.detach().clone() for name, param in plain.named_parameters() if "blocks" in name and param.dim() == 2
        ]
        options = {"reshard_after_forward": reshard_after_forward}
        model = fsdp2(plain, **options) if way == "FSDP2" else shard(plain, fully_shard, **options)
        run = model if way == "FSDP2" else compiled(model)
        out = run(batch(rank, 0)[0])
        held = bytes_of_full_parameters(full, out)
        if reshard_after_forward:
            assert held == 0, f"{held} bytes of {sum(p.nbytes for p in full)}"
        else:
            assert held >= sum(p.nbytes for p in full)
        out.sum().backward()
