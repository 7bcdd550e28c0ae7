"""Several plans of one forward begin with the same layer: which of them code is for follows from their order."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import compiled_autograd, fully_shard
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import compiled, distributed, variants


class Again(nn.Module):
    """Two graphs begin with the same layer, and the second one goes on. Where `odd` says so, the first one logs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.layer(x).tanh()
        if odd:
            self.seen = x.detach().norm()
        torch._dynamo.graph_break()
        return self.head(self.layer(x))


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_two_plans_of_a_forward_begin_alike(rank, world_size):
    """One does not take the other's place, although it has all of its parameters and more: nothing is compiled again
    in the second step, and what is compiled for another batch size is for the plan that it had."""
    torch.manual_seed(7)
    model = Again()
    reference = copy.deepcopy(model)
    fully_shard(model.layer)
    fully_shard(model)
    run, compiles = compiled(model), torch._dynamo.utils.counters["stats"]
    for step in range(5):
        x, odd = torch.randn(3 - (step == 2) - rank * (step == 3), 4), rank == step % 2 and step > 1
        before = compiles["unique_graphs"]
        run(x, odd).square().sum().backward()
        assert step != 1 or compiles["unique_graphs"] == before
        reference(x, odd).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, msg=f"step {step}")
        model.zero_grad()
        reference.zero_grad()
        assert len(RUNTIME.follower.known.begun()) < 2, "a forward's plans are forgotten at its end"


class Mostly(nn.Module):
    """Where `odd` says so, its graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.layer(self.first(x))
        if odd:
            torch._dynamo.graph_break()
        return self.head(x)


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_a_plan_that_was_made_when_other_parameters_were_frozen(rank, world_size):
    """It begins with the same layer as the one that is for now, and is not taken for it. With dynamic sizes Dynamo
    begins the same graph twice: this rank then follows the plan still."""
    torch.manual_seed(7)
    model = Mostly()
    reference = copy.deepcopy(model)
    fully_shard(model.layer)
    fully_shard(model)
    run = torch.compile(model, backend="compiled_fsdp", options={"codegen": "aot_eager"}, dynamic=True)
    for step, (odd, trains) in enumerate([(1, False), (None, True), (0, True)]):
        x = torch.randn(2 + step, 4, 8)
        for one in (model, reference):
            one.layer.requires_grad_(trains)
        run(x, rank == odd).square().mean().backward()
        reference(x, False).square().mean().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            if expected.grad is not None:
                dist.all_reduce(expected.grad)
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, msg=f"step {step}")
        model.zero_grad()
        reference.zero_grad()


HELD = (True, ""), (True, "head"), (False, "head")


@pytest.mark.parametrize(("compiled_backward", "held"), variants(HELD, HELD[0], HELD[2]))
@distributed(world_size=2, reset=True)
def test_a_plan_that_was_learned_again_keeps_its_place(rank, world_size, compiled_backward, held):
    """Code goes on with the plan that it had. A rank that then compiles for another batch size knows the order.

    If the optimizer holds the head only, the frozen layer stays full after its step.
    """
    torch.manual_seed(7)
    model = Again()
    model.layer.requires_grad_(False)
    reference = copy.deepcopy(model)
    fully_shard(model.layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(of.get_submodule(held).parameters(), lr=0.1) for of in (model, reference)]
    run = compiled(model)
    for number, sizes in enumerate([[(1, 5)] * 3, [(5, 5)] * 2, [(2, 2)]]):
        model.set_reshard_after_backward(number == 0)
        for micro, size in enumerate(sizes):
            x = torch.randn(size[rank], 4)
            model.set_requires_gradient_sync(number > 0 or micro == 2)
            loss = run(x, False).square().mean()
            with compiled_autograd(codegen="aot_eager") if compiled_backward else nullcontext():
                loss.backward()
            reference(x, False).square().mean().backward()
        for param, expected in zip(model.head.parameters(), reference.head.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            expected.grad /= 2
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Tied(nn.Module):
    """Two graphs read one weight alone. The first one's backward needs no gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).tanh()
        torch._dynamo.graph_break()
        return self.head(x)


@distributed(world_size=2, reset=True)
def test_equal_models_share_no_code_for_two_plans_of_equal_reads(rank, world_size):
    """For the third model, rank 0 has to compile the first graph again, because its code is for a batch of one. Rank 1
    has code with symbolic sizes. It must not use that code, which is for another plan than the second step's."""
    for reduces, sizes in ((False, [(2, 2), (3, 3)]), (True, [(1, 2), (2, 2)]), (True, [(5, 5)])):
        torch.manual_seed(7)
        model = Tied()
        reference = copy.deepcopy(model)
        fully_shard(model, reshard_after_forward=True)
        model.set_requires_gradient_sync(reduces)
        run = compiled(model)
        for size in sizes:
            tokens = torch.randint(11, (size[rank], 4))
            loss = run(tokens).square().mean()
            with compiled_autograd(codegen="aot_eager"):
                loss.backward()
            if reduces:
                expected = torch.autograd.grad(reference(tokens).square().mean(), reference.head.weight)[0]
                dist.all_reduce(expected)
                torch.testing.assert_close(model.head.weight.grad.full_tensor(), expected / 2)
                model.zero_grad()


class SometimesCheckpointed(nn.Module):
    """A layer of torch's, compiled alone, which is in a checkpoint where `odd` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.layer, x, use_reentrant=False) if odd else self.layer(x)


@distributed(world_size=2, reset=True)
def test_a_sequential_that_is_compiled_alone_is_in_a_checkpoint_later(rank, world_size):
    """On rank 0 only. From torch 2.15 on, Dynamo compiles such a layer's call, and not only its forward."""
    torch.manual_seed(7)
    model = SometimesCheckpointed()
    reference = copy.deepcopy(model)
    fully_shard(model.layer)
    fully_shard(model)
    model.layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for step in range(3):
        x = torch.randn(2, 4)
        model(x, step > 0 and rank == 0).square().mean().backward()
        reference(x, False).square().mean().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, msg=f"step {step}")
            param.grad = expected.grad = None
