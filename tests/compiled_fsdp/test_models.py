"""Models that are not a clean transformer: tied, frozen, reused, structured, failing, of changing shapes."""

import dataclasses
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard, ops
from tests.harness import (
    Transformer,
    alone,
    assert_same,
    batch,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
)
from tests.harness.models import small, without_attention

WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
ways = pytest.mark.parametrize("way", WAYS)


def tied() -> Transformer:
    return without_attention(Transformer(dim=16, blocks=1, ties=True))


@distributed(world_size=2)
@ways
def test_tied_weights(rank, world_size, way):
    model = shard(tied(), fully_shard)
    assert_same(train(WAYS[way](model)), fsdp2_record(tied()))
    assert model._parameters is not None
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert {"head.weight", "embedding.weight"} <= set(model.state_dict())
    assert len(list(model.parameters())) == 8


@distributed(world_size=2)
def test_tied_weights_in_a_unit_of_two_modules(rank, world_size):
    """`fully_shard([a, b])`."""

    def build(function):
        model = tied()
        function([model.embedding, model.head])
        return shard(model, function)

    assert_same(train(compiled(build(fully_shard))), train(build(torch_fully_shard)))


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
        reduced = [name for f in backward.flights if f.bucket.kind == "reduce" for name in f.names]
        assert sorted(reduced) == sorted(n for n, p in mine.named_parameters() if p.requires_grad)


@distributed(world_size=2)
@ways
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


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: torch.Tensor


class Structured(nn.Module):
    """Takes and gives tensors in a structure of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, data):
        match self.kind:
            case "list":
                return [self.inner(data[0]), data[1]]
            case "tuple":
                return self.inner(data[0]), data[1]
            case "dict":
                return {"out": self.inner(data["x"]), "x": data["x"]}
            case "namedtuple":
                return Pair(self.inner(data.first), data.second)
            case _:
                return Box(self.inner(data.value))


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "namedtuple", "dataclass"])
def test_structured_inputs_and_outputs(rank, world_size, kind):
    """All kinds compute the same; FSDP2 of torch 2.11 does not see the tensor in a dataclass and reduces nothing."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    data = {"list": [x, x], "tuple": (x, x), "dict": {"x": x}, "namedtuple": Pair(x, x), "dataclass": Box(x)}
    out_of = {"dict": lambda o: o["out"], "dataclass": lambda o: o.value}

    def step_with(kind):
        def step(model, index):
            out = model(data[kind])
            assert type(out) is type(data[kind])
            out = out_of.get(kind, lambda o: o[0])(out)
            out.square().sum().backward()
            return out.detach().sum()

        return step

    expected = train(torch_fully_shard(Structured("tuple")), step_with("tuple"))
    for way in WAYS.values():
        assert_same(train(way(fully_shard(Structured(kind))), step_with(kind)), expected)


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
@ways
@pytest.mark.parametrize("unit", [False, True])
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
            names = [name for flight in graph.flights if flight.bucket.kind == kind for name in flight.names]
            assert names.count("layer.weight") == 1, names


@distributed(world_size=2)
@ways
def test_two_forwards_and_one_backward(rank, world_size, way):
    """The engine adds both gradients before the gate publishes them. FSDP2 adds them before it reduces: rounding differs."""

    def step(model, index):
        loss = loss_of(model, rank, index) * loss_of(model, rank, index + 7)
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
    """The unit is closed again: outside of a forward parameters are DTensors. Torch's hooks do not hear of an interrupt, so
    then it is closed by the next forward, which gathers what an update may have changed."""
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


@distributed(world_size=2, reset=True)
def test_batch_sizes_that_change(rank, world_size):
    """Other sizes from step to step, and on each rank: a few compiles, the same collectives on both ranks."""
    sizes = [(4, 4), (6, 4), (3, 5), (1, 7), (5, 2)]

    def step(model, index):
        loss = loss_of(model, rank, index, size=sizes[index][rank])
        loss.backward()
        return loss.detach()

    model = shard(small(), fully_shard)
    expected = train(fsdp2(small()), step, steps=len(sizes))
    assert_same(train(compiled(model), step, steps=len(sizes)), expected)
    assert len(explain(model).graphs) <= 8


@distributed(world_size=2)
def test_evaluation(rank, world_size):
    """Under no_grad and inference_mode: an inference graph without reductions, and training goes on."""
    model = shard(small(), fully_shard)
    run = compiled(model)
    expected = loss_of(fsdp2(small()), rank, 0).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(loss_of(run, rank, 0), expected)
    assert all(graph.phase == "inference" and graph.count("reduce") == 0 for graph in explain(model).graphs)
    assert torch.equal(forward_backward(run, 0), expected)


@distributed(world_size=2)
def test_two_models_of_one_class(rank, world_size):
    """Another division into units: neither takes the other's compiled graphs."""
    by_unit, by_root = shard(small(blocks=2), fully_shard, reshard_after_forward=True), fully_shard(small(1, blocks=2))
    for model, seed in ((by_unit, 0), (by_root, 1), (by_unit, 0)):
        model.zero_grad()
        run = compiled(model, bucket="module")
        assert torch.equal(forward_backward(run, 0), forward_backward(fsdp2(small(seed, blocks=2)), 0))
    assert [g.count("gather") for g in explain(by_unit).graphs] == [3, 3]
    assert [g.count("gather") for g in explain(by_root).graphs] == [3, 0]


@distributed(world_size=2)
@ways
def test_gradients_of_inputs_alone(rank, world_size, way):
    """`torch.autograd.grad(loss, x)` leaves .grad of parameters alone."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(WAYS[way](model)(x).sum(), x)
    assert grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


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
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert torch.equal(mine.grad.full_tensor(), theirs.grad)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        penalised(compiled(fully_shard(build())), x)


@distributed(world_size=2)
def test_second_derivative_through_a_parameter(rank, world_size):
    """The reduction is not differentiable, and says so."""
    model = fully_shard(nn.Linear(4, 4))
    slot = model._fsdp_reads["weight"].slot
    reduced = ops.reduce_grad(torch.ones(4, 4, requires_grad=True), slot, [2, 4], 2, 0, 0, torch.float32, "float32 avg")
    with pytest.raises(NotImplementedError, match="create_graph"):
        reduced.sum().backward()


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["slice", pytest.param("flattened", marks=pytest.mark.more)])
def test_a_mesh_that_is_part_of_a_larger_one(rank, world_size, kind):
    """Nothing may assume the world's rank or size."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    mesh = world["dp"] if kind == "slice" else world["other", "dp"]._flatten("all")
    model = shard(small(), fully_shard, mesh=mesh)
    mine = dist.get_rank(mesh.get_group())

    def step(run, index):
        loss = loss_of(run, mine, index)
        loss.backward()
        return loss.detach()

    record, expected = train(compiled(model), step), train(small(), alone(mesh.size()))
    for name, tensor in expected.parameters[-1].items():
        torch.testing.assert_close(record.parameters[-1][name], tensor, rtol=1e-4, atol=1e-5)
    if kind == "slice":
        assert_same(record, train(fsdp2(small(), mesh=mesh), step))


@distributed(world_size=2)
def test_hooks_see_sharded_gradients_once(rank, world_size):
    """Post-accumulate-grad hooks: once a parameter and backward, with .grad in place."""
    model = shard(small(), fully_shard)
    calls: dict[str, int] = {}
    for name, param in model.named_parameters():

        def hook(p, name=name):
            assert p.grad is not None
            assert p.grad.placements == p.placements
            calls[name] = calls.get(name, 0) + 1

        param.register_post_accumulate_grad_hook(hook)
    run = compiled(model)
    for index in range(2):
        forward_backward(run, index)
    assert set(calls.values()) == {2}
    assert len(calls) == 9


@distributed(world_size=2)
def test_graph_breaks(rank, world_size):
    """Results stay right, and explain names the lines: of a break between compiled pieces, and of one inside a loop."""

    class Breaking(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens)
            torch._dynamo.graph_break()  # between
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    class Looping(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                torch._dynamo.graph_break()  # inside
                x = block(x)
            return self.head(self.norm(x))

    for cls, word in ((Breaking, "# between"), (Looping, "# inside")):
        model = shard(small(blocks=2, cls=cls), fully_shard)
        assert_same(train(compiled(model), steps=2), fsdp2_record(small(blocks=2, cls=cls), steps=2))
        breaks = explain(model).graph_breaks
        assert any(word in where and __file__ in where for _, where in breaks), breaks


class GivenUp(nn.Module):
    """Dynamo gives up on the whole forward, because of the break in its loop; the parameters are read right there."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.layer, self.head = nn.Embedding(61, 8), nn.Linear(8, 8), nn.Linear(8, 61)

    def forward(self, tokens):
        x = torch.nn.functional.embedding(tokens, self.embedding.weight)
        for _ in range(2):
            torch._dynamo.graph_break()
            x = torch.tanh(x @ self.layer.weight + self.layer.bias)
        return x @ self.head.weight.t()


@distributed(world_size=2)
def test_reads_in_code_that_does_not_compile(rank, world_size):
    """They run as they are: Dynamo does not compile what a gather or a reduction consists of."""
    targets: set[str] = set()

    def backend(gm, inputs):
        targets.update(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    expected = train(torch_fully_shard(GivenUp()))
    assert_same(train(compiled(fully_shard(GivenUp()))), expected)
    assert_same(train(torch.compile(fully_shard(GivenUp()), backend=backend)), expected)
    assert not [target for target in targets if "c10d" in target]


def test_batches_differ_between_ranks():
    """Or every comparison above would be of equal gradients."""
    assert not torch.equal(batch(0, 0)[0], batch(1, 0)[0])
