"""Every way to read a parameter in forward: FSDP2's result, or an error that names the parameter."""

import pytest
import torch
import torch.nn as nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from compiled_fsdp import explain, fully_shard
from tests.harness import Transformer, assert_same, collectives_of, compiled, distributed, loss_of, train, variants
from tests.harness.fake import fake_group
from tests.harness.logs import logged
from tests.harness.models import without_attention
from tests.harness.reference import assert_same_gradients


class Two(nn.Module):
    """Two layers; the first as a subclass makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.first(), nn.Linear(8, 8)

    def first(self) -> nn.Module:
        return nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Listed(Two):
    """A penalty on all parameters, through ``self.parameters()``."""

    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


class Named(Two):
    """Through ``named_parameters()`` of a child and a test of the names."""

    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for name, p in self.a.named_parameters() if "bias" not in name)


class Contained(nn.Module):
    """Through ``parameters()`` of a container, which owns none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + sum(p.square().sum() for p in self.layers.parameters())


class Stored(nn.Module):
    """Through the dictionary itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        weight = self._parameters["weight"]
        assert weight is not None
        return x @ weight + self._parameters.get("bias", torch.ones(8))


class Typed(Two):
    """As transformers reads ``self.dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x):
        return super().forward(x.to(self.dtype))


class OldWeightNorm(Two):
    def first(self):
        return torch.nn.utils.weight_norm(nn.Linear(8, 8))


class OldSpectralNorm(Two):
    def first(self):
        return torch.nn.utils.spectral_norm(nn.Linear(8, 8))


class WeightNorm(Two):
    def first(self):
        return parametrizations.weight_norm(nn.Linear(8, 8))


class SpectralNorm(Two):
    def first(self):
        return parametrizations.spectral_norm(nn.Linear(8, 8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None])[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        return self.encoder(x[None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2)

    def forward(self, x):
        return self.lstm(x[None])[0]


class Lists(nn.Module):
    """ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(8)), "b": nn.Parameter(torch.randn(8))})

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return x + sum(self.shifts.values())


class MaxNorm(Two):
    """The embedding's weight is written in forward."""

    def first(self):
        return nn.Embedding(10, 8, max_norm=1.0)

    def forward(self, x):
        return self.b(self.a(torch.arange(4))) + x


class OwnGetattr(Two):
    def __getattr__(self, name):
        return super().__getattr__("a" if name == "alias" else name)

    def forward(self, x):
        return self.b(torch.tanh(self.alias(x)))


def step(model, index):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + torch.distributed.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def built(cls, **options):
    torch.manual_seed(0)
    return cls(**options)


MODELS = [
    Listed, Contained, Stored, OldWeightNorm, WeightNorm, SpectralNorm, Attention, Recurrent, MaxNorm,
    OwnGetattr, *(pytest.param(cls, marks=pytest.mark.more) for cls in (Encoder, Named, Typed, OldSpectralNorm, Lists)),
]  # fmt: skip


@distributed(world_size=2)
@pytest.mark.parametrize("cls", MODELS)
def test_equal_to_fsdp2(rank, world_size, cls):
    """Eager, and compiled as one graph. The old norms leave the graph: there are no tensors to keep there."""
    expected = train(torch_fully_shard(built(cls)), step)
    for way in (lambda model: model, compiled):
        model = fully_shard(built(cls))
        assert_same(train(way(model), step), expected)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@distributed(world_size=2)
def test_a_decomposed_cell(rank, world_size):
    """`nn.GRUCell`, which AOTAutograd decomposes: near FSDP2 compiled, equal to it uncompiled."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x):
            return self.cell(x)

    expected = train(torch_fully_shard(built(Cell)), step)
    assert_same(train(fully_shard(built(Cell)), step), expected)
    assert_same(train(compiled(fully_shard(built(Cell))), step), expected, rtol=1e-5)


@distributed(world_size=2)
def test_one_gather_however_often_a_parameter_is_read(rank, world_size):
    """Attention reads 4 parameters 8 times; a look at a dtype gathers nothing that forward does not read."""
    model = fully_shard(built(Attention))
    assert len(collectives_of(lambda: model(torch.ones(4, 8)))) == 1
    run = compiled(fully_shard(built(Typed)), bucket="parameter")
    step(run, 0)
    assert explain(run).graphs[0].count("gather") == 4


@distributed(world_size=2)
def test_tied_parameters_listed_in_forward(rank, world_size):
    """Counted once. Dynamo cannot tell, so the list ends its graph, and each graph reduces what it adds (rounding)."""

    class Penalised(Transformer):
        def forward(self, tokens):
            return super().forward(tokens) + 1e-3 * sum(p.square().sum() for p in self.parameters())

    def train_it(model):
        return train(model, lambda m, index: _backward(loss_of(m, rank, index)), steps=2)

    def build():
        return without_attention(Penalised(dim=16, blocks=1, ties=True))

    expected = train_it(torch_fully_shard(build()))
    assert_same(train_it(fully_shard(build())), expected)
    assert_same(train_it(compiled(fully_shard(build()))), expected, rtol=1e-5)


def _backward(loss):
    loss.backward()
    return loss.detach()


class Cached(nn.Module):
    """Its forward computes with a list of parameters that it made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weights = [self.layer.weight]

    def forward(self, x):
        return x @ self.weights[0]


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_list_made_before_sharding(rank, world_size, way):
    """FSDP2 trains nothing there and says nothing."""
    model = fully_shard(built(Cached))
    with pytest.raises(RuntimeError, match=r"unsharded 'layer\.weight'.*before fully_shard"):
        step(compiled(model) if way == "compiled" else model, 0)


CHANGES = {
    "d[k] = v": lambda stored, other: stored.__setitem__("weight", other),
    "del d[k]": lambda stored, other: stored.__delitem__("weight"),
    "pop": lambda stored, other: stored.pop("weight"),
    "pop, with another name": lambda stored, other: stored.pop("no such", None),
    "popitem": lambda stored, other: stored.popitem(),
    "update": lambda stored, other: stored.update(weight=other),
    "|=": lambda stored, other: stored.__ior__({"weight": other}),
    "clear": lambda stored, other: stored.clear(),
    "setdefault": lambda stored, other: stored.setdefault("weight", other),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_stored_in_place_of_a_parameter_is_read_as_it_is(change):
    """However it came there; and the parameter in full once it is back."""
    with fake_group(2):
        model = fully_shard(nn.Linear(4, 4, bias=False))
        stored, param = model._parameters, model.weight
        CHANGES[change](stored, torch.zeros(4, 4))
        assert set(stored.sharded) == {name for name, value in stored.items() if value is param}
        stored["weight"] = param
        assert set(stored.sharded) == {"weight"}


def test_a_read_does_not_look_at_the_dtensor():
    """Guards on it would take longer than all others; freezing is seen by one guard of its own."""
    compiles = []

    def look(gm, inputs):
        compiles.append(inputs)
        return gm.forward

    with fake_group(2), logged("torch._dynamo.guards") as messages:
        torch._logging.set_logs(guards=True)
        try:
            model = fully_shard(nn.Linear(4, 4))
            run = torch.compile(model, backend=look)
            for _ in range(2):
                run(torch.ones(2, 4))
            model.weight.requires_grad_(False)
            run(torch.ones(2, 4))
        finally:
            torch._logging.set_logs()
    guards = "\n".join(messages)
    assert "_fsdp_text_weight ==" in guards
    assert "param.requires_grad ==" in guards
    assert "_spec" not in guards.replace("_specialize", "")
    assert len(compiles) == 2
    # the batch, of each parameter one tensor, as the shard is what the gradient flows to, and the numbers of the block
    assert [len(inputs) for inputs in compiles] == [4, 4]
    assert [tuple(x.shape) for x in compiles[0] if x.dtype == torch.int64] == [(2,)]


@distributed(world_size=2)
def test_functional_call(rank, world_size):
    """What is asked for is what is read; the module's own parameters are read again afterwards."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    x = torch.ones(2, 4)

    def with_zeros(x):
        return torch.func.functional_call(model, {"weight": torch.zeros(4, 4)}, (x,))

    torch.compiler.reset()
    for run in (with_zeros, compiled(with_zeros)):
        assert run(x).abs().sum() == 0
        assert model(x).abs().sum() > 0


class LooksAtItself(nn.Linear):
    """Asks for its weight in a function that Dynamo runs while it traces."""

    @torch.compiler.assume_constant_result
    def is_sharded(self) -> bool:
        return isinstance(self.weight, DTensor)

    def forward(self, x):
        return super().forward(x) + self.is_sharded()


@distributed(world_size=1, reset=True)
def test_nothing_is_gathered_while_dynamo_traces(rank, world_size):
    """A rank that compiles again alone would gather alone."""
    model, x = LooksAtItself(4, 4), torch.ones(2, 4)
    full = nn.Linear.forward(model, x).detach()
    fully_shard(model)
    assert torch.equal(compiled(model)(x), full + 1)


@distributed(world_size=1)
def test_a_name_without_a_parameter_is_anybodys(rank, world_size):
    model = fully_shard(nn.Linear(4, 4, bias=False))
    assert model.bias is None
    del model.bias
    assert not hasattr(model, "bias")
    model.bias = torch.ones(4)
    for run in (model, compiled(model)):
        assert torch.equal(run(torch.zeros(2, 4)), torch.ones(2, 4))
    del model.bias
    with pytest.raises(AttributeError, match="has no attribute 'bias'"):
        del model.bias


class Derived(Two):
    """A derivative along a direction, inside of forward; its parameters are read before, in it and after it."""

    def forward(self, x):
        out, tangent = torch.func.jvp(super().forward, (torch.tanh(self.a(x)),), (torch.ones_like(x),))
        return self.b(out) + tangent


class Vectorised(Two):
    """Row by row."""

    def forward(self, x):
        return torch.vmap(super().forward)(torch.tanh(self.a(x))) + self.b(x)


class WithGradient(Two):
    """A gradient by an input, inside of forward."""

    def forward(self, x):
        return torch.func.grad(lambda x: super(WithGradient, self).forward(x).square().sum())(x) + self.b(x)


def forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The derivative of ``model``, and its output, without functions of functions."""
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
    return out + tangent


# what is derived, how, and whether autograd has to save parameters, which units that reshard cannot do here
TRANSFORMS = {
    "jvp": (Two, lambda model, x: sum(torch.func.jvp(model, (x,), (torch.ones_like(x),))), False),
    "jvp in forward": (Derived, lambda model, x: model(x), False),
    "jvp of jvp": (Derived, lambda model, x: sum(torch.func.jvp(model, (x,), (torch.ones_like(x),))), False),
    "vmap": (Two, lambda model, x: torch.vmap(model)(x), False),
    "vmap in forward": (Vectorised, lambda model, x: model(x), False),
    "forward mode": (Two, forward_mode, False),
    "grad": (Two, lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x), True),
    "grad in forward": (WithGradient, lambda model, x: model(x), True),
    "jvp of grad": (WithGradient, lambda model, x: sum(torch.func.jvp(model, (x,), (torch.ones_like(x),))), True),
}


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("unit", "transform"),
    [(unit, name) for unit in ("reshards", "keeps", "unsharded") for name in TRANSFORMS
     if unit != "reshards" or not TRANSFORMS[name][2]],
)  # fmt: skip
def test_transforms_of_functions(rank, world_size, unit, transform):
    """torch.func and forward-mode derivatives through an uncompiled module, twice, and backward through them."""
    build, run, _ = TRANSFORMS[transform]
    plain = built(build)
    model = fully_shard(built(build), reshard_after_forward=unit == "reshards")
    for _ in range(2):
        if unit == "unsharded":
            model.unshard()
        assert_trained_alike(model, plain, [run(any_model, ROWS) for any_model in (model, plain)])


ROWS = torch.linspace(-1, 1, 32).view(4, 8)


def assert_trained_alike(model: nn.Module, plain: nn.Module, outs: list[torch.Tensor]) -> None:
    """Both have given the same, and get the same gradients."""
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    assert_same_gradients(model, plain)


@distributed(world_size=2)
@pytest.mark.parametrize("build", variants([Derived, Vectorised, WithGradient], Derived, WithGradient))
def test_transforms_in_a_compiled_forward(rank, world_size, build):
    """Of units that reshard, with a gradient too."""
    plain, model = built(build), fully_shard(built(build), reshard_after_forward=True)
    assert_trained_alike(model, plain, [compiled(model)(ROWS), plain(ROWS)])


@distributed(world_size=2)
def test_a_transform_of_what_is_unsharded(rank, world_size):
    """Outside of a forward."""
    plain, model = built(Two), fully_shard(built(Two))
    model.unshard()

    def derivative(model):
        out, tangent = torch.func.jvp(lambda x: torch.tanh(x @ model.a.weight), (ROWS,), (torch.ones_like(ROWS),))
        return (out + tangent).square().sum()

    for any_model in (model, plain):
        derivative(any_model).backward()
    model.reshard()
    assert torch.equal(model.a.weight.grad.full_tensor(), plain.a.weight.grad)


@distributed(world_size=2)
def test_hooks_of_gradients_see_sharded_parameters(rank, world_size):
    """Backward recomputes in full what it has to, and publishes sharded."""
    model, seen = fully_shard(nn.Linear(4, 4)), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append((type(model.weight), type(p.grad))))
    model(torch.ones(2, 4)).sum().backward()
    assert [issubclass(kind, DTensor) for pair in seen for kind in pair] == [True, True]
