"""Exceptions in forward and backward: units close themselves, and training goes on."""

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard
from tests.harness import WAYS, Transformer, distributed, forward_backward, shard, ways
from tests.harness.models import small


class Failing(Transformer):
    """Raises in the middle of a forward when told to."""

    fails: type[BaseException] | None = None

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.fails:
            raise self.fails("told to")
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_training_goes_on_after_an_exception(rank, world_size, way, error):
    """The unit is closed again: outside of a forward parameters are DTensors. Torch's hooks do not hear of an
    interrupt, so then it is closed by the next forward, which gathers what an update may have changed."""
    model = shard(small(cls=Failing), fully_shard)
    run = WAYS[way](model)
    first = forward_backward(run, 0)
    model.fails = error
    with pytest.raises(error):
        forward_backward(run, 1)
    model.fails = None
    model.zero_grad()
    with torch.no_grad():
        model.embedding._parameters.sharded["weight"].param.mul_(2)
    assert not torch.equal(forward_backward(run, 0), first)
    assert isinstance(model.embedding.weight, DTensor)
    with torch.no_grad():
        model.embedding.weight.div_(2)
    assert torch.equal(forward_backward(run, 0), first)


class Raise(torch.autograd.Function):
    """Raises in backward when told to."""

    told = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Raise.told:
            raise ArithmeticError("told to")
        return grad


class FailingBackward(Transformer):
    """Raises between the backwards of its blocks, of which one is checkpointed, when told to."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=False)
        x = self.blocks[1](torch.compiler.disable(Raise.apply)(x))
        return self.head(self.norm(x))


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("root_only", [False, pytest.param(True, marks=pytest.mark.more)])
def test_training_goes_on_after_an_exception_in_backward(rank, world_size, way, root_only):
    """Gradients published by then stay; after zero_grad all is as before."""
    model = small(blocks=2, cls=FailingBackward)
    model = fully_shard(model) if root_only else shard(model, fully_shard)
    run = WAYS[way](model)
    first = forward_backward(run, 0)
    gradients = [param.grad.full_tensor() for param in model.parameters() if param.grad is not None]
    assert len(gradients) == 12  # all but the embedding of positions
    Raise.told = True
    with pytest.raises(ArithmeticError):
        forward_backward(run, 1)
    Raise.told = False
    assert isinstance(model.head.weight, DTensor)
    model.zero_grad()
    assert torch.equal(forward_backward(run, 0), first)
    again = [param.grad.full_tensor() for param in model.parameters() if param.grad is not None]
    assert all(map(torch.equal, again, gradients))


class Interrupted(Transformer):
    """Interrupted in the middle of a forward when told to."""

    told = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.told:
            raise KeyboardInterrupt
        return super().forward(tokens)


@distributed(world_size=2)
def test_resetting_after_an_exception(rank, world_size):
    """`reset_iter_state()`: nothing is full any more, neither what an interrupt left nor what was unsharded."""
    model = shard(Interrupted(), fully_shard)
    expected = forward_backward(model, 0)
    model.blocks[0].unshard()
    model.told = True
    with pytest.raises(KeyboardInterrupt):
        forward_backward(model, 1)
    model.told = False
    assert not isinstance(model.head.weight, DTensor), "an interrupt reaches no hook, so there was nothing to reset"
    model.reset_iter_state()
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.zero_grad()
    assert torch.equal(forward_backward(model, 0), expected)
