"""Models that are not a clean transformer: tied weights, structured inputs, buffers, other dtypes, collectives of their
own."""

import dataclasses
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    WAYS,
    Record,
    Transformer,
    assert_same,
    compiled,
    ddp,
    distributed,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
    ways,
)
from tests.harness.models import VOCABULARY, seeded, small, without_attention
from tests.harness.ours import COUNTED


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


class Normed(nn.Module):
    """Tokens to logits through batch norms, one with its parameters, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16, affine=affine), nn.ReLU())
            for affine in (True, False)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).unflatten(0, tokens.shape)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_batch_norm(rank, world_size, way):
    """Buffers stay plain tensors, each rank's own, and are updated as FSDP2's; evaluation reads them."""
    model, reference = shard(seeded(Normed), fully_shard), shard(seeded(Normed), torch_fully_shard)
    run = model if way == "eager" else compiled(model, codegen=way)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_same(train(run), train(reference), rtol=1e-4 if way == "inductor" else 0)
    close = {"rtol": 1e-4, "atol": 1e-6} if way == "inductor" else {"rtol": 0, "atol": 0}
    for (name, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert type(mine) is torch.Tensor, name
        assert not torch.equal(mine, before[name]), f"{name} was not updated"
        torch.testing.assert_close(mine, theirs, **close)
    means: list = [None] * world_size
    dist.all_gather_object(means, model.blocks[0][1].running_mean)
    assert not torch.equal(*means), "or local could not be told from synchronised"
    for each in (run, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(run, rank, 9), loss_of(reference, rank, 9), **close)


class Rerun(Normed):
    """Its blocks are run ``times`` times, in checkpoints."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times, self.checkpoints = times, True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for block in (block for block in self.blocks for _ in range(self.times)):
            x = x + (torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.head(x).unflatten(0, tokens.shape)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", ["aot_eager", "inductor"])
def test_batch_norm_in_a_checkpoint(rank, world_size, way, times):
    """Statistics are counted once for each forward, as `torch.compile` does; an uncompiled checkpoint counts twice."""
    model, reference = (shard(seeded(lambda: Rerun(times)), function) for function in (fully_shard, torch_fully_shard))
    reference.checkpoints = False
    actual, expected = train(compiled(model, codegen=way)), train(reference)
    exact = way == "aot_eager"
    assert_same(actual, expected, rtol=0 if exact else 1e-4)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@torch.library.custom_op("test_models::centered", mutates_args=())
def centered(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the mean; and a new mean."""
    return x - mean, torch.lerp(mean, x.mean(0), 0.1)


@centered.register_fake
def _(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(mean)


centered.register_autograd(lambda ctx, gradient, _: (gradient, None))


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mean = centered(x, self.mean)
        self.mean.copy_(mean.detach())
        return torch.tanh(x)


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["aot_eager", "inductor"], "aot_eager"))
def test_an_operator_of_two_outputs_that_reads_a_buffer_in_a_checkpoint(rank, world_size, way):
    """The buffer is written, so what was read of it is saved; a tuple can't be, its elements can."""

    def build(function, checkpoints):
        model = seeded(Rerun)
        model.checkpoints = checkpoints
        for block in model.blocks:
            block[1] = Centered()
        return shard(model, function)

    actual = train(compiled(build(fully_shard, True), codegen=way), steps=2)
    assert_same(actual, train(build(torch_fully_shard, False), steps=2), rtol=0 if way == "aot_eager" else 1e-4)


class Counting(nn.Module):
    """Writes a buffer from its weights in forward, before and after it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.l, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        self.register_buffer("n", torch.ones(16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = torch.tanh(self.l(x) + self.n)  # adding saves nothing that the next line writes
        self.n.add_(self.l.weight.detach().sum(0))
        return self.head(x * self.n)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_a_buffer_written_from_weights(rank, world_size, way):
    """With weights that are gathered again in backward. A single process gives the same within 1e-6."""
    model = fully_shard(seeded(Counting), reshard_after_forward=True)
    plain = seeded(Counting)
    run = model if way == "eager" else compiled(model, codegen=way)
    actual, expected = train(run, steps=2), train(ddp(plain), steps=2)
    first = [Record(r.losses[:1], r.gradients[:1], [{}]) for r in (actual, expected)]
    assert_same(*first, rtol=1e-6)
    assert_same(actual, expected, rtol=1e-4)
    torch.testing.assert_close(model.n, plain.n, rtol=1e-5, atol=1e-5)
    assert not torch.equal(model.n, torch.ones(16))


class Halves(nn.Module):
    """Computes with parts of a buffer before it writes the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.register_buffer("n", torch.ones(2, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, second = self.n.unbind()
        x = torch.tanh(self.embedding(tokens) * (first * 2)) * (first * 3) * (first * 5) + second
        self.n.add_(1)
        return self.head(x)


@distributed(world_size=2)
def test_what_is_computed_from_parts_of_a_written_buffer(rank, world_size):
    """It is saved, because backward would compute it from the new values."""
    actual = train(compiled(fully_shard(seeded(Halves))), steps=2)
    assert_same(actual, train(torch_fully_shard(seeded(Halves)), steps=2))


class Synchronised(nn.Module):
    """Subtracts the mean over all ranks, and looks at what the others have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
            x = x - funcol.all_reduce(x.detach().mean((0, 1)), "avg", dist.group.WORLD)
        everyone = funcol.all_gather_tensor(x.detach().amax((0, 1), keepdim=True), 0, dist.group.WORLD)
        return self.head(x / (1 + everyone.square().mean()))


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(COUNTED, "eager"))
def test_collectives_of_the_model_itself(rank, world_size, way):
    """They stay where they are among ours."""
    model = shard(seeded(Synchronised), fully_shard)
    expected = train(shard(seeded(Synchronised), torch_fully_shard))
    assert_same(train(COUNTED[way](model)), expected)
    if way == "by unit":
        assert explain(model).graphs[0].count("gather") == 3
    if way != "eager":
        assert explain(model).graphs[0].planned.count("all_reduce.default(") == 2


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.more), torch.bfloat16], ids=str)
def test_a_model_of_another_dtype(rank, world_size, way, dtype):
    """Parameters, collectives, gradients and optimizer all in it."""
    model = shard(small().to(dtype), fully_shard)
    expected = fsdp2_record(small().to(dtype))
    assert {grad.dtype for grad in expected.gradients[0].values()} == {dtype}
    assert_same(train(WAYS[way](model)), expected)
