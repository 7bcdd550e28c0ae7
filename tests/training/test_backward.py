"""Backwards that are not one a forward, and what autograd is asked for beside gradients of parameters."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from functorch.compile import make_boxed_compiler, make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from compiled_fsdp import fully_shard
from compiled_fsdp.compat.retained_graphs import retains_graphs
from compiled_fsdp.ops import schema
from tests.harness import (
    WAYS,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    shard,
    train,
    variants,
    ways,
)
from tests.harness.fake import fake_group
from tests.harness.models import batch, loss_of_two, small
from tests.harness.reference import assert_same_gradients


@distributed(world_size=2)
@ways
def test_two_forwards_and_one_backward(rank, world_size, way):
    """The engine adds both gradients before the gate publishes them. FSDP2 adds them before it reduces: rounding
    differs."""

    def step(model, index):
        loss = loss_of_two(model, rank, index)
        loss.backward()
        return loss.detach()

    mine = train(WAYS[way](shard(small(), fully_shard)), step, steps=1)
    assert_same(mine, train(fsdp2(small()), step, steps=1), rtol=1e-6)


@distributed(world_size=2)
@ways
def test_gradients_add_up(rank, world_size, way):
    """Two reduced backwards before a step."""

    def step(model, index):
        return forward_backward(model, index) + forward_backward(model, index + 7)

    assert_same(train(WAYS[way](shard(small(), fully_shard)), step), train(fsdp2(small()), step))


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "aot_eager", "inductor"], "eager", "aot_eager"))
def test_three_backwards_of_one_forward(rank, world_size, way):
    """`retain_graph=True`: what one backward needs is there for the next, in every step."""

    def step(model, index):
        tokens, targets = batch(rank, index)
        logits = model(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.square().mean(), logits.sin().mean()
        for loss in losses:
            loss.backward(retain_graph=loss is not losses[-1])
        return sum(losses).detach()

    model = shard(small(), fully_shard)
    mine = train(model if way == "eager" else compiled(model, codegen=way), step)
    assert_same(mine, train(fsdp2(small()), step), rtol=1e-4 if way == "inductor" else 0)


class Chunks(nn.Module):
    """Attention, which saves parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), Chunks()], ids=["tanh", "attention"]
)
def test_a_backward_that_writes_to_what_is_saved(model):
    """As Inductor's does on GPUs: in a graph that is retained it writes to copies, which have the same strides."""
    copied = []

    def writing(gm, _):
        donated = torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs
        strides = [node.meta["val"].stride() for node in gm.graph.find_nodes(op="placeholder")]
        assert donated

        def run(args):
            saved = [args[i] for i in donated]
            assert [tensor.stride() for tensor in saved] == [strides[i] for i in donated]
            copied.append([tensor.data_ptr() for tensor in saved])
            gradients = gm(*args)
            for tensor in saved:
                tensor.zero_()
            return gradients

        return make_boxed_func(lambda *args: run(list(args)))

    x = torch.linspace(-1, 1, 16).view(2, 2, 4)
    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda gm, _: gm), bw_compiler=writing)
    with retains_graphs(), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        loss = torch.compile(model, backend=backend)(x).sum()
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    for retains in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retains)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert copied[0] != copied[2] != copied[1], "without retain_graph nothing is copied"


@distributed(world_size=2)
@ways
def test_gradients_of_inputs_alone(rank, world_size, way):
    """`torch.autograd.grad(loss, x)` leaves .grad of parameters alone."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(WAYS[way](model)(x).sum(), x)
    assert grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", [lambda model: model, nn.Module.double], ids=["as sharded", "cast"])
def test_a_parameter_is_written_before_its_backward(change):
    """Backward gathers the shard again: it sees by its version that it is not what forward computed with."""
    with fake_group(2):
        model = change(fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), reshard_after_forward=True))
        run = compiled(model)
        for _ in range(2):  # a write between two steps is nobody's concern
            with torch.no_grad():
                model[1].weight.to_local().mul_(2)
            loss = run(torch.ones(2, 4, dtype=model[1].weight.dtype)).sum()
            loss.backward()
        loss = run(torch.ones(2, 4, dtype=model[1].weight.dtype)).sum()
        with torch.no_grad():
            model[1].weight.to_local().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = grad.square().sum()
    penalty.backward()
    return penalty.detach()


@distributed(world_size=2)
def test_gradient_penalty(rank, world_size):
    """Exact uncompiled; compiled, AOTAutograd says that it does not do create_graph=True."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(5), requires_grad=True)  # the same on both ranks
    model, plain = fully_shard(build()), build()
    assert torch.equal(penalised(model, x), penalised(plain, x))
    assert_same_gradients(model, plain)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        penalised(compiled(fully_shard(build())), x)


@distributed(world_size=2)
def test_second_derivative_through_a_parameter(rank, world_size):
    """The reduction is not differentiable, and says so."""
    model = fully_shard(nn.Linear(4, 4))
    weight = model._fsdp_reads["weight"]
    grad = torch.ones(4, 4, requires_grad=True)
    reduced = schema.reduce_grad(grad, weight.id_tensor, weight.read_text, torch.float32)
    with pytest.raises(NotImplementedError, match="create_graph"):
        reduced.sum().backward()
