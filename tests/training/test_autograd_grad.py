"""``torch.autograd.grad(loss, weight)``: FSDP2's gradient, this rank's own and in full, where a parameter is full."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import compiled_fsdp
from compiled_fsdp import fully_shard
from tests.harness import assert_same, compiled, distributed, train, variants


class Decoder(nn.Module):
    """Blocks, which may be units, and a last layer in the root."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def sharded(by, cls=Decoder, **options) -> Decoder:
    model = cls()
    for block in model.blocks:
        by(block, **options)
    return by(model, **options)


def data(index: int) -> torch.Tensor:
    return torch.arange(12.0).reshape(2, 6) * (dist.get_rank() + 1) / (index + 5)


def losses(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out.square().mean(), torch.sigmoid(out.float().sum(1)).mean()


def adaptive(model: nn.Module, index: int, *, owner: nn.Module) -> torch.Tensor:
    """As VQGAN weighs two losses: by the norms of their gradients with respect to the last layer.

    ``model`` is perhaps compiled, ``owner`` is the sharded one.
    """
    out = model(data(index))
    parameters = [owner.last.weight, owner.last.bias]
    first, second = losses(out)
    of_first, of_second = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (first, second))
    weight = sum(grad.float().norm() for grad in of_first) / sum(grad.float().norm() for grad in of_second)
    loss = first + weight.detach() * second
    loss.backward()
    return loss.detach()


def run(model: nn.Module, way: str) -> nn.Module:
    if way == "blocks":
        for block in model.blocks:
            block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    if way == "compiled":  # but for the last layer, as the error says
        model.last.forward = torch.compiler.disable(model.last.forward)
        return compiled(model)
    return model


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
ALL = {"reshard_after_forward": False}


@distributed(world_size=2)
@pytest.mark.parametrize("options", variants([{}, BF16, ALL], {}), ids=["root", "bf16", "all"])
def test_between_forward_and_backward(rank, world_size, options):
    """Of a unit that does not reshard after forward, uncompiled: the tensor that the forward has computed with."""
    for way in ("eager", "blocks", "compiled"):
        records = []
        for by in (torch_fully_shard, fully_shard):
            model = Decoder()
            for block in model.blocks:
                by(block, **options)
            if way == "compiled":
                by(model.last, **{**options, **ALL})
            by(model, **options)
            ran = run(model, way) if by is fully_shard else model
            step = lambda each, index, owner=model: adaptive(each, index, owner=owner)  # noqa: E731
            records.append(train(ran, step))
            assert all(isinstance(p, DTensor) for p in (model.last.weight, *model.parameters()))
        assert_same(records[1], records[0])


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_one_rank_looks(rank, world_size, way):
    """Ranks need not look at the same parameters: to look after unshard() changes nothing of the forward."""
    records = []
    for by in (torch_fully_shard, fully_shard):
        model = sharded(by)
        ran = compiled(model) if way == "compiled" and by is fully_shard else model

        def step(each, index, owner=model):
            owner.unshard()
            if dist.get_rank() == 0 and index == 1:
                assert owner.last.weight.norm() > 0
            loss = losses(each(data(index)))[0]
            loss.backward()
            return loss.detach()

        records.append(train(ran, step))
    assert_same(records[1], records[0])


@distributed(world_size=2)
@pytest.mark.parametrize("unshard", [False, True])
def test_what_is_computed_with_the_tensor(rank, world_size, unshard):
    """A penalty on it outside of forward, and on its gradient, which is differentiated again (FSDP2 of torch 2.13 dies
    of a segmentation fault there, so this is compared with a model that is not sharded)."""
    plain, model = Decoder(), sharded(fully_shard, reshard_after_forward=False)
    for each in (plain, model):
        if each is model and unshard:
            model.unshard()
        out = each(data(0))
        weight = each.last.weight
        assert each.last.weight is weight
        first, second = losses(out)
        (grad,) = torch.autograd.grad(first, weight, create_graph=True)
        assert all(p.grad is None for p in each.parameters())
        (first + second + grad.square().sum() + weight.square().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        assert torch.allclose(p.grad.full_tensor(), q.grad / world_size)
    assert isinstance(model.last.weight, DTensor)


@distributed(world_size=2)
def test_sharded_parameters(rank, world_size):
    """Where FSDP2's error says that the tensor was not used, or where there is no one tensor: the error names it."""
    named = r"autograd\.grad: .* 'last\.weight'\. .*fully_shard\(model\.last, reshard_after_forward=False\)"
    model = sharded(fully_shard)

    def fails(loss: torch.Tensor, tensor: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=named):
            torch.autograd.grad(loss, tensor)
        assert torch.autograd.grad(loss, tensor, allow_unused=True) == (None,)

    for ran in (model, compiled(model)):
        before = model.last.weight
        loss = ran(data(0)).sum()
        fails(loss, before)
        fails(loss, list(model.parameters())[-2])
        if ran is not model:  # a whole graph gathers for itself
            fails(loss, model.last.weight)
        loss.backward()
    # two forwards wait, each with a tensor of its own
    both = [model(data(index)).sum() for index in range(2)]
    fails(sum(both), model.last.weight)
    del both
    model.zero_grad()
    # a root's repeated layers are gathered one after the other
    alone = fully_shard(Decoder())
    loss = alone(data(0)).sum()
    assert torch.autograd.grad(loss, alone.last.weight, retain_graph=True)[0].shape == (5, 6)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.weight'"):
        torch.autograd.grad(loss, alone.blocks[0].weight)
    # full, but the forward has a read of its own
    model.unshard()
    before = model.last.weight
    fails(model(data(0)).sum(), before)
    model.reshard()
    loss = compiled(model)(data(0)).sum()
    model.unshard()
    fails(loss, model.last.weight)
    # nobody's parameter: torch's own error
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, torch.zeros(2, requires_grad=True))


class ReturnsItsWeight(nn.Module):
    """As for a fused cross entropy, which computes with the head's weight outside."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(x), self.last.weight


@distributed(world_size=2)
def test_a_forward_that_returns_a_parameter(rank, world_size):
    """Its outputs can be dropped without a backward: nothing is in a cycle that Python's collector does not see."""
    model = fully_shard(ReturnsItsWeight(), reshard_after_forward=False)
    for _ in range(2):
        out, weight = model(torch.ones(2, 4))
        full = weakref.ref(weight)
        del out, weight
        gc.collect()
        assert full() is None
    out, weight = model(torch.ones(2, 4))
    (grad,) = torch.autograd.grad(out.sum(), model.last.weight, retain_graph=True)
    assert torch.equal(grad, torch.full((4, 4), 2.0))
    (out.sum() + weight.sum()).backward()
    assert torch.equal(model.last.weight.grad.full_tensor(), torch.full((4, 4), 3.0))


@distributed(world_size=2)
def test_nothing_is_held_for_it(rank, world_size):
    """Only the autograd graph holds what was read; resharding, loading and writing forget it."""
    model = sharded(fully_shard)
    state = model.state_dict()
    loss = model(data(0)).sum()
    full = weakref.ref(model.last.bias)
    assert full() is not None
    assert not isinstance(full(), DTensor)
    del loss
    gc.collect()
    assert full() is None
    assert isinstance(model.last.bias, DTensor)
    forgets = {
        "reshard": model.reshard,
        "state_dict": model.state_dict,
        "load": lambda: model.load_state_dict(state),
        "move": lambda: model.to(torch.float64),
        "freeze": lambda: model.requires_grad_(True),
        "reset": model.reset_iter_state,
        "backward": lambda: loss.backward(),
    }
    for name, forget in forgets.items():
        model.to(torch.float32)
        loss = model(data(0)).sum()
        assert not isinstance(model.last.weight, DTensor), name
        forget()
        assert isinstance(model.last.weight, DTensor), name
    with torch.no_grad():
        out = model(data(0))
        assert isinstance(model.last.weight, DTensor)
    loss = model(data(0)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # parameters() gives what trains
    loss.backward()
    optimizer.step()
    assert out.shape == (2, 5)


@distributed(world_size=2)
def test_compiled_autograd(rank, world_size):
    """Its backward after autograd.grad of the same graph."""
    records = []
    for by in (torch_fully_shard, fully_shard):
        model = sharded(by)
        first, second = losses(model(data(0)))
        weight = model.last.weight
        (grad,) = torch.autograd.grad(first, weight, retain_graph=True)
        with compiled_fsdp.compiled_autograd(codegen="aot_eager") if by is fully_shard else torch.enable_grad():
            (first + grad.norm() * second).backward()
        records.append([grad, *(p.grad.full_tensor() for p in model.parameters())])
    for mine, theirs in zip(*reversed(records), strict=True):
        assert torch.equal(mine, theirs)
