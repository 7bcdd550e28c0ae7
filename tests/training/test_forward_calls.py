"""Which calls read sharded parameters: forward called twice or directly, modules of a unit called later, other methods
(`register_fsdp_forward_method`)."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register

from compiled_fsdp import explain, fully_shard, register_fsdp_forward_method, share_comm_ctx
from tests.harness import WAYS, assert_same, batch, distributed, train, variants, ways
from tests.harness.models import Encoder, Hidden, small


def build(function, register) -> nn.Module:
    model = Encoder()
    function(model.layer)
    function(model)
    register(model, "encode")
    return model


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
def test_a_registered_method(rank, world_size, way):
    """Equal to FSDP2; compiled, its parameters are read in the method's own graph. An exception closes the unit."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def step(model, index):
        loss = model(model.encode(x * (index + 1))).square().mean()
        loss.backward()
        return loss.detach()

    model = build(fully_shard, register_fsdp_forward_method)
    if way == "compiled_fsdp":
        model.encode = torch.compile(model.encode, backend="compiled_fsdp", options={"codegen": "aot_eager"})
        model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    assert_same(train(model, step), train(build(torch_fully_shard, torch_register), step))
    if way == "compiled_fsdp":
        read = [[read.name for read in graph.reads] for graph in explain(model).graphs if graph.phase == "forward"]
        assert ["project.weight", "project.bias", "layer.weight", "layer.bias"] in read
    with pytest.raises(ArithmeticError):
        model.encode(x, fails=True)
    assert model.project.weight is dict(model.named_parameters())["project.weight"]
    model.zero_grad()
    step(model, 0)


@distributed(world_size=1)
def test_what_cannot_be_registered(rank, world_size):
    model = fully_shard(Encoder())
    with pytest.raises(ValueError, match=r"Encoder'> does not have a method generate"):
        register_fsdp_forward_method(model, "generate")
    with pytest.raises(ValueError, match="share_comm_ctx"):
        share_comm_ctx([model, nn.Linear(2, 2)])
    share_comm_ctx([model])
    plain = nn.Linear(2, 2)
    register_fsdp_forward_method(plain, "nothing")  # as FSDP2: not sharded, nothing to do
    assert not hasattr(plain, "nothing")


@distributed(world_size=2)
@ways
def test_modules_of_a_unit_called_later(rank, world_size, way):
    """`fully_shard([norm, head])`, with the head called by the loss."""

    def step(run, model, index):
        tokens, targets = batch(rank, index)
        hidden = run(tokens)
        halves = zip(hidden.chunk(2), targets.chunk(2), strict=True)
        loss = sum(nn.functional.cross_entropy(model.head(h).flatten(0, 1), t.flatten()) for h, t in halves)
        loss.backward()
        return loss.detach()

    model, plain = small(blocks=2, cls=Hidden), small(blocks=2, cls=Hidden)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    run = WAYS[way](model)
    actual = step(run, model, 0)
    assert torch.equal(actual, step(plain, plain, 0))
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, msg=name)


@distributed(world_size=2)
@ways
def test_forward_called_directly(rank, world_size, way):
    """It does not gather, unless it is registered as one of the methods that do."""
    model = fully_shard(small(blocks=2))
    tokens, _ = batch(rank, 0)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.forward(tokens)
    expected = model(tokens)
    register_fsdp_forward_method(model, "forward")
    assert torch.equal(model.forward(tokens), expected)
    assert torch.equal(WAYS[way](model)(tokens), expected)


@distributed(world_size=2)
def test_a_list_as_the_root(rank, world_size):
    """FSDP2 refuses it at the first forward; here each module may be called alone."""
    first, second = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    second(first(torch.ones(2, 4))).sum().backward()
    assert all(param.grad is not None for module in (first, second) for param in module.parameters())


class Reused(nn.Module):
    """A layer called twice, and a parameter read by two modules."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.layer, self.head = nn.Embedding(61, 16), nn.Linear(16, 16), nn.Linear(16, 61)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.layer(torch.tanh(self.layer(x))))


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("unit", "way"),
    variants(itertools.product([False, True], WAYS), (False, "eager"), (True, "eager"), (True, "compiled_fsdp")),
)
def test_a_module_called_twice(rank, world_size, way, unit):
    """One gather and one reduction of its parameters, in the root's unit and in one of its own. Uncompiled, each call
    of a unit reduces, so rounding differs."""

    def build(function):
        model = Reused()
        if unit:
            function(model.layer)
        return function(model)

    mine = build(fully_shard)
    rtol = 1e-5 if unit and way == "eager" else 0
    assert_same(train(WAYS[way](mine)), train(build(torch_fully_shard)), rtol=rtol)
    if way == "compiled_fsdp":
        forward, backward = explain(mine).graphs
        for graph, kind in ((forward, "gather"), (backward, "reduce")):
            names = [name for flight in graph.collectives if flight.bucket.kind == kind for name in flight.names]
            assert names.count("layer.weight") == 1, names
