"""Backwards inside of a backward (reentrant checkpoints, custom functions, hooks): what comes at the end comes at the
outermost one's end."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import compiled, distributed, fsdp2, loss_of, shard
from tests.harness.models import Transformer, small


class Nested(torch.autograd.Function):
    """``function(x)``, whose backward is a backward of its own, over a graph that was made in forward."""

    @staticmethod
    def forward(ctx, function, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = function(ctx.x)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.out.backward(grad)
        return None, ctx.x.grad


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


class Blocks(Transformer):
    """Each block runs by `run(block, x)`, in eager code whatever is compiled."""

    run = staticmethod(reentrant)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = type(self).run(block, x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(torch.compiler.disable(self.layers, recursive=False)(x)))


class Deep(Blocks):
    """A block that is checkpointed inside of a checkpoint around all of them."""

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return reentrant(super().layers, x)


class Functions(Blocks):
    """Each block's backward is one of its own, and after them there is no parameter."""

    run = staticmethod(Nested.apply)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        fixed = torch.linspace(-1, 1, x.shape[-1]).outer(torch.linspace(1, 2, self.head.out_features))
        return self.layers(self.norm(x) @ self.head.weight.t() @ self.head.weight) @ fixed


def hooked(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What post-accumulate-grad hooks see from now on, in order; they set the gradient to None, as optimizers in
    backward do."""
    seen: list[tuple[str, torch.Tensor]] = []
    for name, param in model.named_parameters():

        def hook(p, name=name):
            seen.append((name, p.grad.full_tensor()))
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)
    return seen


def assert_once_with(seen, expected, rtol: float = 0.0) -> None:
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in expected)
    want = dict(expected)
    for name, grad in seen:
        torch.testing.assert_close(grad, want[name], rtol=rtol, atol=rtol, msg=lambda m, name=name: f"{name}: {m}")


def accumulated(run, model: nn.Module, rank: int, seen: list) -> list[tuple[str, torch.Tensor]]:
    """What hooks see in two steps of two microbatches each, of which the last one communicates."""
    for micro in range(4):
        model.set_requires_gradient_sync(micro % 2 == 1)
        before = len(seen)
        loss_of(run, rank, micro).backward()
        assert micro % 2 == 1 or len(seen) == before
        if micro == 1:
            first = list(seen)
            seen.clear()
    assert RUNTIME.reducer.idle
    return [*((f"first {name}", grad) for name, grad in first), *seen]


def layer_compiled(model: nn.Module) -> nn.Module:
    model.layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    return model


WAYS = {
    "eager": lambda model: model,
    "broken": compiled,
    "layer": layer_compiled,
}


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "cls"),
    [
        ("eager", Blocks),
        ("eager", Deep),
        ("broken", Blocks),
        pytest.param("broken", Deep, marks=pytest.mark.more),
    ],
)
def test_hooks_after_accumulation_see_the_whole_gradient(rank, world_size, way, cls):
    """A block's backward, which ends inside of the model's, reduces nothing that other blocks' gradients are still to
    be added to."""
    ours, theirs = shard(small(blocks=3, cls=cls), fully_shard), fsdp2(small(blocks=3, cls=cls))
    seen, expected = hooked(ours), hooked(theirs)
    assert_once_with(
        accumulated(WAYS[way](ours), ours, rank, seen), accumulated(theirs, theirs, rank, expected), rtol=1e-6
    )


@distributed(world_size=2)
def test_hooks_after_accumulation_through_functions(rank, world_size):
    """The same where the outer backward brings no gradient itself ahead of the first inner one."""
    ours, theirs = shard(small(blocks=2, cls=Functions), fully_shard), fsdp2(small(blocks=2, cls=Functions))
    seen, expected = hooked(ours), hooked(theirs)
    found = accumulated(ours, ours, rank, seen)
    assert_once_with(found, accumulated(theirs, theirs, rank, expected), rtol=1e-6)


class Layers(nn.Module):
    """One layer in two checkpoints, and outside of them if `outside`: its gradient comes from several backwards."""

    def __init__(self, outside: bool, function=reentrant) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.layer = nn.Embedding(61, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 61)
        self.outside, self.function = outside, function

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        run = torch.compiler.disable(self.function, recursive=False)
        x = run(self.layer, torch.tanh(run(self.layer, self.embedding(tokens))))
        return self.head(torch.tanh(self.layer(x)) if self.outside else x)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "outside", "units"),
    [
        ("eager", False, "root"),
        ("eager", True, "root"),
        ("broken", False, "root"),
        ("layer", False, "root"),
        ("eager", False, "several modules"),
        ("broken", False, "several modules"),
    ],
)
def test_hooks_of_a_layer_in_several_backwards(rank, world_size, way, outside, units):
    """A parameter's hook is called once, with the sum, as FSDP2's; so is a grouped one."""
    ours, theirs = Layers(outside), Layers(outside)
    for model, shard_one in ((ours, fully_shard), (theirs, torch_fully_shard)):
        if units == "several modules":
            shard_one([model.embedding, model.layer, model.head])
        shard_one(model)
    seen, expected = hooked(ours), hooked(theirs)
    grouped: list[nn.Parameter] = []
    ours.register_post_backward_hook(grouped.extend)
    run = WAYS[way](ours)
    for step in range(2):
        loss_of(run, rank, step).backward()
        loss_of(theirs, rank, step).backward()
        assert_once_with(seen, expected, rtol=1e-6)
        assert sorted(map(id, grouped)) == sorted(map(id, ours.parameters()))
        for called in (seen, expected, grouped):
            called.clear()


@distributed(world_size=2)
def test_hooks_of_checkpointed_units_are_not_kept_waiting(rank, world_size):
    """A unit that is run again as a whole is done with its own backward: gradients of no two blocks live at a time."""
    model = shard(small(blocks=3, cls=Blocks), fully_shard)
    seen = hooked(model)
    living: list[int] = []
    for block in model.blocks:
        for p in block.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: living.append(sum(q.grad is not None for b in model.blocks for q in b.parameters()))
            )
    loss_of(model, rank, 0).backward()
    assert len(seen) == len(list(model.parameters()))
    assert set(living) == {0}


@distributed(world_size=2)
def test_a_backward_that_failed_is_not_taken_for_an_outer_one(rank, world_size):
    """Its end never comes."""
    model = fully_shard(Layers(outside=True))
    seen = hooked(model)
    loss = loss_of(model, rank, 0)

    def fail(grad):
        raise ValueError("fails")

    handle = model.embedding.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    bad = loss_of(model, rank, 1)
    handle.remove()
    with pytest.raises(ValueError, match="fails"):
        bad.backward()
    seen.clear()
    loss.backward()
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in model.named_parameters())
    loss_of(model, rank, 2)  # the next forward clears up
    assert RUNTIME.reducer.idle


@distributed(world_size=2)
def test_another_models_backward_in_a_hook_is_its_own(rank, world_size):
    """What accumulated on it is there when its backward has returned."""
    outer, inner = shard(small(blocks=1), fully_shard), shard(small(seed=1), fully_shard)
    theirs = fsdp2(small(seed=1))
    for model in (inner, theirs):
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 0).backward()
        model.set_requires_gradient_sync(True)
    loss_of(theirs, rank, 1).backward()
    calls = []

    def train_inner(p):
        with torch.enable_grad():
            loss_of(inner, rank, 1).backward()
        calls.append([p.grad.full_tensor() for p in inner.parameters()])

    outer.head.weight.register_post_accumulate_grad_hook(train_inner)
    loss_of(outer, rank, 0).backward()
    (grads,) = calls
    for grad, p in zip(grads, theirs.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad.full_tensor())
