"""Reduced gradients become `.grad` without a copy, where nothing else holds them."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import fully_shard
from compiled_fsdp.compat.autograd import local_of
from compiled_fsdp.runtime import accumulate_grad, reducer
from compiled_fsdp.runtime.accumulate_grad import may_keep
from compiled_fsdp.state.parameter import ShardedParameter
from tests.harness import WAYS, distributed, loss_of, shard
from tests.harness.models import small


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_copied(ranks, world_size, run):
    """What reaches the gates of a model is what its parameters hold afterwards."""
    ranks.get(world_size).run(not_copied, run)


def not_copied(rank: int, world_size: int, run: str) -> None:
    came: dict[int, int] = {}
    add_to_grad = reducer.add_to_grad

    def watched(parameter: ShardedParameter, grad: torch.Tensor, *rest: Any) -> None:
        came[id(parameter.param)] = grad.data_ptr()
        add_to_grad(parameter, grad, *rest)

    model = shard(small(), fully_shard)
    forward = WAYS[run](model)
    with pytest.MonkeyPatch.context() as patch:
        for module in (reducer, accumulate_grad):
            patch.setattr(module, "add_to_grad", watched)
        for _ in range(2):
            loss_of(forward, rank, 0).backward()
            assert all(p.grad.to_local().data_ptr() == came[id(p)] for p in model.parameters())
            model.zero_grad()


class Twice(nn.Module):
    """Two parameters whose gradients are one tensor, one that is expanded, and one that is a view of what is
    computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(4, 2)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.a + self.b + self.d.t().t()) * x).sum() + self.c.sum()


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("divides", [False, True])
def test_gradients_with_one_memory(ranks, world_size, run, divides):
    """Each parameter's stays its own when the next backward adds to it; also where it is divided by one."""
    ranks.get(world_size).run(one_memory, run, divides)


def one_memory(rank: int, world_size: int, run: str, divides: bool) -> None:
    model = fully_shard(Twice())
    if divides:
        model.set_gradient_divide_factor(world_size)
    forward = WAYS[run](model)
    x = torch.arange(8.0).view(4, 2)
    for step in range(1, 4):
        forward(x).backward()
        model.a.grad.to_local().add_(100)  # nobody else sees it
        expected = {"a": step * x + 100 * step, "b": step * x, "c": torch.full((4, 2), float(step)), "d": step * x}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad.full_tensor(), expected[name]), name
            assert parameter.grad.to_local().is_contiguous()


@distributed(world_size=1)
def test_what_somebody_holds_is_copied(rank, world_size):
    """In Python or in C++."""
    held, found = [], {}

    class Three(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b, c):
            return a.new_ones(())

        @staticmethod
        def backward(ctx, grad):
            held.append(torch.ones(2))
            return torch.ones(2), held[0], torch.ones(4)[:2]

    def leaf(name: str) -> torch.Tensor:
        out = torch.zeros((), requires_grad=True).expand(2)

        def look(grads: tuple[torch.Tensor, ...]) -> tuple[None]:
            found[name] = may_keep(grads)
            return (None,)

        out.grad_fn.register_prehook(look)
        return out

    Three.apply(leaf("alone"), leaf("held"), leaf("a view")).backward()
    one, two = leaf("first of two"), leaf("last of two")
    (one + two).sum().mul(2).backward()
    (leaf("strided") * torch.ones(3, 2)).t()[:, :1].sum().backward()
    assert found["alone"]
    assert found["a view"]
    assert not found["held"]
    assert not (found["first of two"] and found["last of two"])


@distributed(world_size=2)
def test_double_backward_keeps_no_graph(rank, world_size):
    """With create_graph .grad is a tensor of its own, as after any backward."""
    model = fully_shard(nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2, requires_grad=True)
    model(x).square().sum().backward(create_graph=True)
    grad = local_of(model.weight.grad)
    assert not grad.requires_grad
    assert grad._base is None
