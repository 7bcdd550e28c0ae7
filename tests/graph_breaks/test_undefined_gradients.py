"""Gradients that autograd does not define, in ordinary backwards and in compiled autograd's graph, compiled or not."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo import compiled_autograd as torchs
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import compiled_autograd, fully_shard
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import compiled, distributed, variants
from tests.harness.reference import assert_same_gradients

OURS = {"codegen": "aot_eager"}

AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "ordinary": contextlib.nullcontext,
    "compiled": lambda: compiled_autograd(**OURS),
    "uncompiled": lambda: torchs._enable(lambda graph: graph, dynamic=False),
    "torch's backend": lambda: torchs._enable(torch.compile(backend="aot_eager"), dynamic=False),
}
"""Ways to run a backward: by the engine, and as compiled autograd's graph by several compilers."""


class Told(ArithmeticError):
    """What a backward raises that is told to."""


class Fails(torch.autograd.Function):
    """The identity, whose backward raises or returns no gradient if it is told to."""

    does = ""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.does == "raises":
            raise Told
        return None if Fails.does == "nothing" else grad


class Block(nn.Module):
    """A layer that compiled code leaves out, or takes in."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.inner, self.apart = nn.Linear(4, 4), apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.compiler.disable(self.inner)(x) if self.apart else self.inner(x))


class Model(nn.Module):
    """Two blocks, a layer behind a function that fails when it is told to; the logits beside their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(False), Block(True)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        out = self.head(torch.compiler.disable(Fails.apply)(x))
        return out, out.sum()


def models() -> tuple[Model, Model]:
    """The same model twice: sharded by compiled_fsdp, and by FSDP2."""
    found = []
    for shard_it in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = Model()
        for block in model.blocks:
            shard_it(block, reshard_after_forward=True)
        found.append(shard_it(model, reshard_after_forward=True))
    return found[0], found[1]


def given(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    Fails.does = what
    try:
        yield
    finally:
        Fails.does = ""


@pytest.mark.parametrize("around", variants(AROUND, "ordinary"))
@distributed(world_size=2)
def test_outputs_that_the_loss_does_not_use(rank, world_size, around):
    """A second output, as logits beside a loss, with microbatches of which the last one reduces; uncompiled too."""
    for run_compiled in (True, False):
        ours, theirs = models()
        run = compiled(ours) if run_compiled else ours
        heard: list[int] = []
        ours.register_post_backward_hook(lambda params, heard=heard: heard.append(len(params)))
        for number in range(4):
            for call, by in ((run, AROUND[around]()), (theirs, contextlib.nullcontext())):
                (ours if call is run else theirs).set_requires_gradient_sync(number % 2 == 1)
                out, total = call(given(rank, number))
                loss = total if number == 3 else out.square().mean()
                with by:
                    loss.backward()
        # FSDP2 reduces the sum of what waits, and so does compiled_fsdp
        assert_same_gradients(ours, theirs)
        assert sum(heard) == 2 * len([p for p in ours.parameters() if p.grad is not None]), heard
        assert RUNTIME.reducer.idle


@pytest.mark.parametrize("around", ["ordinary", "compiled"])
@distributed(world_size=2)
def test_a_backward_that_raises(rank, world_size, around):
    """What it raises reaches the user, and steps after it are right, though Dynamo may have given up on the graph."""
    ours, theirs = models()
    run = compiled(ours)
    for number in range(3):
        if number == 1:
            out, _ = run(given(rank, 9))
            with told("raises"), pytest.raises(Told), AROUND[around]():
                out.square().mean().backward()
        for call, by in ((run, AROUND[around]()), (theirs, contextlib.nullcontext())):
            out, _ = call(given(rank, number))
            (ours if call is run else theirs).zero_grad()
            with by:
                out.square().mean().backward()
        assert_same_gradients(ours, theirs)
        assert RUNTIME.reducer.idle


class OfParameters(nn.Module):
    """A layer that computes with what a function makes of its parameters, behind a layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (Fails.apply(param) for param in (self.second.weight, self.second.bias))
        return nn.functional.linear(self.first(x), weight, bias)


@pytest.mark.parametrize("around", AROUND)
@distributed(world_size=2)
def test_a_backward_that_returns_nothing(rank, world_size, around):
    """Where a read has no gradient, the parameter's is one of zeros, as of other outputs that do not depend on it."""
    torch.manual_seed(0)
    plain = OfParameters()
    ours = fully_shard(copy.deepcopy(plain))
    for model, by in ((ours, AROUND[around]()), (plain, contextlib.nullcontext())):
        with told("nothing"), by:
            model(given(0, 0)).square().mean().backward()
    for mine, param in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (param.shape[0] == 3)
        assert torch.equal(mine.grad.full_tensor(), torch.zeros(param.shape) if param.grad is None else param.grad)


@pytest.mark.parametrize("around", ["ordinary", "compiled"])
@distributed(world_size=2)
def test_units_are_sharded_again_whatever_becomes_of_their_gradients(rank, world_size, around):
    """A backward without gradient sync, too, drops what `unshard()` has gathered."""
    for model, by in zip(models(), (AROUND[around](), contextlib.nullcontext()), strict=True):
        model.set_requires_gradient_sync(False)
        out, _ = model(given(rank, 0))
        for module in (model, *model.blocks):
            module.unshard()
        with by:
            out.square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
