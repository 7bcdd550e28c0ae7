"""unshard() and reshard(): parameters that are full already are read as they are, one copy for any number of forwards.
And `reshard_after_forward`, changed later."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import FSDPModule, compiled_autograd, explain, fully_shard
from tests.harness import (
    WAYS,
    assert_same,
    batch,
    collectives_of,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
)
from tests.harness.models import small
from tests.harness.reference import assert_same_gradients


def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "reshard_after_forward"),
    variants(
        itertools.product(["eager", "compiled", "by unit"], [True, False, None]),
        ("eager", True),
        ("eager", False),
        ("compiled", True),
    ),
)
def test_training_on_unsharded_parameters(rank, world_size, way, reshard_after_forward):
    """Nothing is gathered in forward or backward, gradients are reduced as ever, and backward reshards."""

    def step(model, index):
        for unit in units(model):
            unit.unshard()
        return forward_backward(model, index)

    model = shard(small(blocks=2), fully_shard, reshard_after_forward=reshard_after_forward)
    expected = fsdp2_record(small(blocks=2), reshard_after_forward=reshard_after_forward)
    run = {
        "eager": lambda: model,
        "compiled": lambda: compiled(model),
        "by unit": lambda: compiled(model, bucket="module"),
    }
    assert_same(train(run[way](), step), expected)
    assert isinstance(model.head.weight, DTensor)
    graphs = explain(model).graphs
    assert [graph.count("gather") for graph in graphs] == ([] if way == "eager" else [0, 0])
    reduced = [graph.count("reduce") for graph in graphs]
    assert reduced == ([] if way == "eager" else [0, 3] if way == "by unit" else [0, reduced[1]])
    assert way == "eager" or reduced[1] > 0


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "compiled", "compiled autograd"], "eager"))
def test_backward_reshards_what_it_has_no_gradient_of(rank, world_size, way):
    """A frozen unit, and one that no forward has used; not where it is asked to keep them, and no other model's."""

    def sharded_after_backward(fully_shard, run):
        models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) for _ in range(2)]
        for model in models:
            model[1].requires_grad_(False)
            model[2].forward = lambda x: x
            for module in (model[1], model[2], model):
                fully_shard(module, reshard_after_forward=False)
        for model in models:
            for unit in (model[1], model[2]):
                unit.unshard()
        outputs = [run(model)(torch.ones(2, 4)).sum() for model in models]
        backward_context = compiled_autograd if way == "compiled autograd" and run is compiled else nullcontext
        with backward_context():
            outputs[0].backward()
        found = [isinstance(model[1].weight, DTensor) for model in models]
        found += [isinstance(model[2][0].weight, DTensor) for model in models]
        models[0][1].unshard()
        models[0].set_reshard_after_backward(False)
        run(models[0])(torch.ones(2, 4)).sum().backward()
        return [*found, isinstance(models[0][1].weight, DTensor)]

    expected = sharded_after_backward(torch.distributed.fsdp.fully_shard, lambda model: model)
    assert expected == [True, False, True, False, False]
    assert sharded_after_backward(fully_shard, (lambda model: model) if way == "eager" else compiled) == expected


@distributed(world_size=2)
def test_generation_without_gathers(rank, world_size):
    """Units that do not reshard after forward stay full from one forward to the next, until somebody asks for
    shards."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=False).eval()
    plain = small(blocks=2).eval()
    run = compiled(model)
    for unit in units(model):
        unit.unshard()

    @torch.no_grad()
    def generate():
        for length in (4, 5, 6):
            tokens, _ = batch(rank, 0, length=length)
            assert torch.allclose(run(tokens), plain(tokens), atol=1e-6)

    assert collectives_of(generate) == []
    assert torch.equal(model.head.weight, plain.head.weight)
    assert isinstance(model.state_dict()["head.weight"], DTensor)
    assert isinstance(model.head.weight, DTensor)


@pytest.mark.more
@distributed(world_size=2)
def test_two_forwards_share_one_copy(rank, world_size):
    model = fully_shard(small(blocks=2), reshard_after_forward=False)
    run = compiled(model)
    model.unshard()
    full = model.head.weight.untyped_storage().data_ptr()
    saved = set()

    def pack(tensor):
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = loss_of(model, rank, 0), loss_of(model, rank, 1)
    assert full in saved
    losses = (*losses, loss_of(run, rank, 2))
    sum(losses).backward()
    reference = fsdp2(small(blocks=2))
    sum(loss_of(reference, rank, index) for index in range(3)).backward()
    assert_same_gradients(model, reference, rtol=1e-5, atol=1e-7)


@distributed(world_size=2)
def test_asynchronously(rank, world_size):
    """An eager forward waits by itself; waiting twice, or for what was resharded meanwhile, does nothing."""
    model = fully_shard(small(blocks=2))
    handle = model.unshard(async_op=True)
    assert isinstance(model.head.weight, DTensor)
    assert len(collectives_of(lambda: model(batch(rank, 0)[0]))) == 0
    handle.wait()
    handle = model.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert model.head.weight.shape == (61, 16)
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    handle = model.unshard(async_op=True)
    model.reshard()
    handle.wait()
    assert isinstance(model.head.weight, DTensor)


@distributed(world_size=2)
def test_a_value_loaded_while_unsharded_is_what_is_read(rank, world_size):
    """And one that was moved or cast."""
    model = fully_shard(nn.Linear(4, 4))
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.unshard()
    model.load_state_dict(zeros)
    assert model(torch.ones(1, 4)).abs().sum() == 0
    model.unshard()
    model.to(torch.float64)
    assert model(torch.ones(1, 4, dtype=torch.float64)).dtype is torch.float64


@distributed(world_size=2)
def test_types(rank, world_size):
    """FSDP2's for isinstance, the original's name for whoever matches names, a plain container where one is sliced."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    assert isinstance(model[0], nn.Linear)
    assert (type(model).__name__, type(model[0]).__name__, type(model[2]).__name__) == (
        "Sequential",
        "Linear",
        "Linear",
    )
    assert type(model[:2]) is nn.Sequential
    assert not isinstance(model[2], torch.distributed.fsdp.FSDPModule)


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(WAYS, "eager"))
def test_changing_reshard_after_forward(rank, world_size, way):
    """Of one unit, or of all inside: the next forward compiles again, once, and backward gathers what is not kept."""
    model = shard(small(blocks=2), fully_shard)
    run = compiled(model, bucket="module") if way == "compiled_fsdp" else WAYS[way](model)
    reference = fsdp2(small(blocks=2))
    gathers = []
    for change in (
        lambda m: None,
        lambda m: m.set_reshard_after_forward(True, recurse=False),
        lambda m: m.set_reshard_after_forward(False),
    ):
        change(model)
        change(reference)
        model.zero_grad()
        reference.zero_grad()
        before = len(explain(model).graphs)
        for _ in range(2):
            assert torch.equal(forward_backward(run, 0), forward_backward(reference, 0))
        if way == "compiled_fsdp":
            graphs = explain(model).graphs
            assert len(graphs) == before + 2
            gathers.append(graphs[-1].count("gather"))
        assert_same_gradients(model, reference)
    assert gathers == ([2, 3, 0] if way == "compiled_fsdp" else [])


@distributed(world_size=2)
def test_unsharding_is_not_recursive(rank, world_size):
    model = shard(small(blocks=2), fully_shard)
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].unshard()
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    assert not isinstance(model.blocks[0].up.weight, DTensor)


@distributed(world_size=2)
def test_a_compiled_forward_gathers_what_is_pending(rank, world_size):
    """`unshard(async_op=True)` that nobody has waited for."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    expected = forward_backward(run, 0)
    handle = model.unshard(async_op=True)
    assert torch.equal(forward_backward(run, 0), expected)
    handle.wait()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


@distributed(world_size=2)
def test_a_layer_that_is_full_in_the_first_of_two_calls(rank, world_size):
    """The second call gathers it. Earlier steps have a plan in which both do, which the new graph does not follow."""
    ours, theirs = Twice(), Twice()
    for model, shard_one in ((ours, fully_shard), (theirs, torch.distributed.fsdp.fully_shard)):
        shard_one(model.layer, reshard_after_forward=True)
        shard_one(model)
    run = compiled(ours)
    for unshards in (False, True, False, True):
        for model in (ours, theirs):
            if unshards:
                model.layer.unshard()
            (run if model is ours else model)(torch.ones(2, 4) + rank).square().sum().backward()
    assert_same_gradients(ours, theirs, rtol=1e-5, atol=1e-7)
