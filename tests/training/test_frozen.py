"""Parameters that are not trained, from the start or for some of the steps."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    WAYS,
    Transformer,
    assert_same,
    distributed,
    forward_backward,
    fsdp2,
    shard,
    train,
    variants,
    ways,
)
from tests.harness.models import VOCABULARY, seeded, small
from tests.harness.ours import COUNTED
from tests.harness.reference import Sharding


@distributed(world_size=2)
@ways
def test_frozen_parameters(rank, world_size, way):
    """Only one half of the MLP is trained; nothing else is reduced."""

    def frozen() -> Transformer:
        model = small()
        for name, param in model.named_parameters():
            param.requires_grad = ".up." in name
        return model

    def optimizer(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    theirs, mine = fsdp2(frozen()), shard(frozen(), fully_shard)
    expected = train(theirs, optimizer=optimizer(theirs))
    assert_same(train(WAYS[way](mine), optimizer=optimizer(mine)), expected)
    if way == "compiled_fsdp":
        backward = explain(mine).graphs[1]
        reduced = [name for f in backward.collectives if f.bucket.kind == "reduce" for name in f.names]
        assert sorted(reduced) == sorted(n for n, p in mine.named_parameters() if p.requires_grad)


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(WAYS, "eager"))
def test_freezing_after_the_first_step(rank, world_size, way):
    """What is trainable is looked up at each read."""
    results = []
    for model, run in ((fsdp2(small()), None), (shard(small(), fully_shard), WAYS[way])):
        run = run(model) if run else model
        forward_backward(run, 0)
        model.zero_grad()
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        forward_backward(run, 1)
        results.append({n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, expected in results[0].items():
        mine = results[1][name]
        assert (mine is None) == (expected is None), name
        assert expected is None or torch.equal(mine, expected), name


class Quantized(nn.Module):
    """A frozen head in int8 with scales that are trained, as adapters on quantized weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        weight = torch.randint(-127, 128, (VOCABULARY, 16), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.mask = nn.Parameter(torch.rand(VOCABULARY, 1) > 0.1, requires_grad=False)
        self.scale = nn.Parameter(torch.full((VOCABULARY, 1), 0.01))

    def forward(self, tokens):
        return F.linear(self.embedding(tokens), self.weight.to(self.scale.dtype) * self.scale * self.mask).float()


@distributed(world_size=2)
@pytest.mark.parametrize("policy", [pytest.param(None, marks=pytest.mark.more), "bf16"])
@pytest.mark.parametrize("way", variants(WAYS, "eager"))
def test_frozen_parameters_of_integers(rank, world_size, way, policy):
    """They are gathered as they are, whatever the policy; nothing of them is reduced, with accumulation either."""
    policies = {None: {}, "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}

    def accumulate(model, index):
        root = getattr(model, "_orig_mod", model)
        root.set_requires_gradient_sync(False)
        forward_backward(model, index)
        root.set_requires_gradient_sync(True)
        return forward_backward(model, index + 1)

    plain = seeded(Quantized)
    # torch 2.11's FSDP2 asks for their gradients
    ignored = {plain.weight, plain.mask} if torch.__version__ < "2.12" else None
    reference = torch_fully_shard(plain, ignored_params=ignored, **policies[policy])
    model = fully_shard(seeded(Quantized), **policies[policy])
    run = WAYS[way](model)
    assert_same(train(run), train(reference))
    assert_same(train(run, accumulate, steps=2), train(reference, accumulate, steps=2))
    for any_model in (model, reference):
        any_model.unshard()
    assert torch.equal(model.weight, reference.weight)
    assert torch.equal(forward_backward(run, 0), forward_backward(reference, 0))
    model.to(torch.float64)
    assert model.weight.dtype == torch.int8
    assert forward_backward(run, 0).isfinite()


@distributed(world_size=2)
# tests/sharding/test_replaced.py shows it as the planner divides units into buckets.
@pytest.mark.parametrize("way", variants(["eager", "by unit"], "eager"))
@pytest.mark.parametrize("root_only", [False, pytest.param(True, marks=pytest.mark.more)])
def test_units_thawed_one_by_one(rank, world_size, way, root_only):
    """First the head alone is trained, then half of each block, then all; backward gathers and reduces no more than
    that."""

    def step(run: nn.Module, index: int) -> torch.Tensor:
        for name, param in run.named_parameters():
            param.requires_grad_("head" in name or (index == 1 and ".up." in name) or index == 2)
        return forward_backward(run, index)

    def build(function: Sharding) -> nn.Module:
        return function(small(blocks=2)) if root_only else shard(small(blocks=2), function)

    model = build(fully_shard)
    expected = train(build(torch_fully_shard), step)
    assert [sum(grad is not None for grad in grads.values()) for grads in expected.gradients] == [1, 3, 13]
    assert_same(train(COUNTED[way](model), step), expected)
    if way == "by unit":
        backwards = [graph for graph in explain(model).graphs if graph.phase == "backward"]
        assert [graph.count("reduce") for graph in backwards] == [1, 3, 3]


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@pytest.mark.parametrize("unit", [True, False])
def test_thawed_and_frozen_while_unsharded(rank, world_size, way, unit):
    """A module's `requires_grad_()` is for what trains, and not for the full parameters after `unshard()`."""
    models = []
    for sharded in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].requires_grad_(False)
        for layer in model if unit else ():
            sharded(layer, reshard_after_forward=False)
        sharded(model, reshard_after_forward=False)
        run = WAYS[way](model) if sharded is fully_shard else model
        for step, trains in enumerate((False, True, False)):
            if sharded is fully_shard:
                model.unshard()
                model[1].unshard() if unit else None
            model[1].requires_grad_(trains)
            run(torch.full((2, 8), 0.1 + step + rank)).square().mean().backward()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())
