"""Worlds that are not there, buffers, dtypes, empty shards, growing lengths, and parameters that are unused, frozen or ignored."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    Record,
    Transformer,
    assert_same,
    batch,
    compiled,
    ddp,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
)
from tests.harness.fake import fake_group
from tests.harness.models import VOCABULARY, small

Sharding = Callable[..., nn.Module]

WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
ways = pytest.mark.parametrize("way", WAYS)
# collectives are counted by unit
COUNTED = {**WAYS, "by unit": partial(compiled, bucket="module")}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


# ---- worlds that are not there ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("world_size", "rank"), [(8, 0), pytest.param(64, -1, marks=pytest.mark.more)])
def test_large_worlds(world_size, rank):
    """Collectives as of two ranks; a shard is an eighth, a 64th, or nothing where the rows have run out."""
    rank %= world_size
    plain = Transformer(dim=64)
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    with fake_group(world_size, rank):
        model = shard(plain, fully_shard, reshard_after_forward=True)
        tokens, targets = batch(rank, 0)
        F.cross_entropy(compiled(model, bucket="module")(tokens).flatten(0, 1), targets.flatten()).backward()
        graphs = explain(model).graphs
        assert [(g.phase, g.count("gather"), g.count("reduce")) for g in graphs] == [
            ("forward", 3, 0),
            ("backward", 3, 3),
        ]
        for name, param in model.named_parameters():
            rows = -(-shapes[name][0] // world_size)
            here = max(0, min(rows, shapes[name][0] - rank * rows))
            for tensor in (param, param.grad):
                assert isinstance(tensor, DTensor)
                assert tensor.shape == shapes[name], name
                assert tensor.to_local().shape == (here, *shapes[name][1:]), name
        # what is sent: full parameters, rounded up to equal shards
        rounded = sum(4 * world_size * -(-shape[0] // world_size) * shape[1:].numel() for shape in shapes.values())
        assert sum(f.bucket.bytes for f in graphs[0].flights) == rounded


# ---- buffers ---------------------------------------------------------------------------------------------------------
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


# ---- a model with collectives of its own -----------------------------------------------------------------------------
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
@pytest.mark.parametrize("way", COUNTED)
def test_collectives_of_the_model_itself(rank, world_size, way):
    """They stay where they are among ours."""
    model = shard(seeded(Synchronised), fully_shard)
    expected = train(shard(seeded(Synchronised), torch_fully_shard))
    assert_same(train(COUNTED[way](model)), expected)
    if way == "by unit":
        assert explain(model).graphs[0].count("gather") == 3
    if way != "eager":
        assert explain(model).graphs[0].planned.count("all_reduce.default(") == 2


# ---- dtypes and empty shards -----------------------------------------------------------------------------------------
@distributed(world_size=2)
@ways
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.more), torch.bfloat16], ids=str)
def test_a_model_of_another_dtype(rank, world_size, way, dtype):
    """Parameters, collectives, gradients and optimizer all in it."""
    model = shard(small().to(dtype), fully_shard)
    expected = fsdp2_record(small().to(dtype))
    assert {grad.dtype for grad in expected.gradients[0].values()} == {dtype}
    assert_same(train(WAYS[way](model)), expected)


class Quantized(nn.Module):
    """A frozen head in int8 with scales that are trained, as adapters on quantized weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        weight = torch.randint(-127, 128, (VOCABULARY, 16), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.mask = nn.Parameter(torch.rand(VOCABULARY, 1) > 0.1, requires_grad=False)
        self.scale = nn.Parameter(torch.full((VOCABULARY, 1), 0.01))

    def forward(self, tokens):
        return F.linear(self.embedding(tokens), self.weight.to(self.scale.dtype) * self.scale * self.mask).float()


@distributed(world_size=2)
@pytest.mark.parametrize("policy", [pytest.param(None, marks=pytest.mark.more), "bf16"])
@ways
def test_frozen_parameters_of_integers(rank, world_size, way, policy):
    """They are gathered as they are, whatever the policy; nothing of them is reduced, with accumulation either."""
    policies = {None: {}, "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}

    def accumulate(model, index):
        root = getattr(model, "_orig_mod", model)
        root.set_requires_gradient_sync(False)
        forward_backward(model, index)
        root.set_requires_gradient_sync(True)
        return forward_backward(model, index + 1)

    plain = seeded(Quantized)
    # torch 2.11's FSDP2 asks for their gradients
    ignored = {plain.weight, plain.mask} if torch.__version__ < "2.12" else None
    reference = torch_fully_shard(plain, ignored_params=ignored, **policies[policy])
    model = fully_shard(seeded(Quantized), **policies[policy])
    run = WAYS[way](model)
    assert_same(train(run), train(reference))
    assert_same(train(run, accumulate, steps=2), train(reference, accumulate, steps=2))
    for any_model in (model, reference):
        any_model.unshard()
    assert torch.equal(model.weight, reference.weight)
    assert torch.equal(forward_backward(run, 0), forward_backward(reference, 0))
    model.to(torch.float64)
    assert model.weight.dtype == torch.int8
    assert forward_backward(run, 0).isfinite()


class Thin(nn.Module):
    """A unit of which the second rank holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
        self.blocks = nn.ModuleList([nn.Linear(4, 1), nn.Linear(1, 1)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x * self.blocks[1](torch.tanh(self.blocks[0](x))))


@distributed(world_size=2)
@ways
def test_a_rank_without_rows(rank, world_size, way):
    """Units of one row, of which the second rank has none; also what clipping and the optimizer make of it."""
    model, reference = shard(seeded(Thin), fully_shard), shard(seeded(Thin), torch_fully_shard)

    def step(run: nn.Module, index: int) -> torch.Tensor:
        loss = forward_backward(run, index)
        nn.utils.clip_grad_norm_(run.parameters(), 0.1)
        return loss

    assert_same(train(WAYS[way](model), step), train(reference, step))
    assert model.blocks[1].weight.to_local().shape == (1 - rank, 1)


# ---- growing lengths -------------------------------------------------------------------------------------------------
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.more)])
def test_generation(rank, world_size, mode: Callable[[], AbstractContextManager]):
    """A token more in each call, greedily; each rank has its own text. At most a graph for length 1, one for length 2 and
    one for all others."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model).eval()
    counters.clear()
    mine = theirs = batch(rank, 0, size=2)[0][:, :1]
    with mode():
        for _ in range(8):
            logits, expected = run(mine), reference(theirs)
            assert torch.equal(logits, expected)
            mine = torch.cat([mine, logits[:, -1:].argmax(-1)], 1)
            theirs = torch.cat([theirs, expected[:, -1:].argmax(-1)], 1)
    assert counters["stats"]["unique_graphs"] <= 3
    assert len(explain(model).graphs) <= 3
    assert {graph.phase for graph in explain(model).graphs} == {"inference"}


@distributed(world_size=2, reset=True)
def test_batches_that_grow_in_training_and_evaluation(rank, world_size):
    """3, 5, 7, each trained on and evaluated; three graphs each at most."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    for trains in (True, False):
        counters.clear()
        for size in (3, 5, 7):
            with torch.set_grad_enabled(trains):
                losses = [loss_of(each.train(trains), rank, size, size=size) for each in (run, reference)]
            assert torch.equal(*losses)
            if trains:
                for loss in losses:
                    loss.backward()
        assert 0 < counters["stats"]["unique_graphs"] <= 3
        if trains:
            for (name, param), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(param.grad.full_tensor(), theirs.grad.full_tensor()), name


# ---- unused, frozen, ignored -----------------------------------------------------------------------------------------
class Spare(nn.Module):
    """Some layers are never called, and one's output is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare, self.aside = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = torch.tanh(self.blocks[0](x))  # the second block is a unit that is never called
        self.aside(x)
        y = self.blocks[2](x)
        del y  # a unit whose output nobody uses
        return self.head(x)


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("root_only", [False, pytest.param(True, marks=pytest.mark.more)])
def test_unused_modules_have_no_gradient(rank, world_size, way, root_only):
    """None, as FSDP2, in units of their own and in the root's."""

    def build(function: Sharding) -> nn.Module:
        return function(seeded(Spare)) if root_only else shard(seeded(Spare), function)

    expected = train(build(torch_fully_shard))
    unused = {name for name, grad in expected.gradients[0].items() if grad is None}
    assert {name.rsplit(".", 1)[0] for name in unused} == {"blocks.1", "blocks.2", "spare", "aside"}
    assert_same(train(WAYS[way](build(fully_shard))), expected)


class TwoHeads(nn.Module):
    """Returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(x))
        return self.heads[0](x), self.heads[1](x)


@distributed(world_size=2)
@ways
@pytest.mark.parametrize("units", [True, pytest.param(False, marks=pytest.mark.more)])
def test_unused_outputs(rank, world_size, way, units):
    """The head whose output is not in the loss has no gradient. Compiled it has zeros, as with torch.compile of any model."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def build(function: Sharding) -> nn.Module:
        model = seeded(TwoHeads)
        for head in model.heads if units else ():
            function(head)
        return function(model)

    def step(run: nn.Module, index: int) -> torch.Tensor:
        loss = run(x)[index % 2].square().mean()
        loss.backward()
        return loss.detach()

    expected = train(build(torch_fully_shard), step, steps=1)
    assert expected.gradients[0]["heads.1.weight"] is None
    if way == "compiled_fsdp":
        plain = seeded(TwoHeads)
        step(torch.compile(plain, backend="aot_eager"), 0)
        for name, param in plain.heads[1].named_parameters():
            expected.gradients[0][f"heads.1.{name}"] = param.grad
            assert not param.grad.any()
    actual = train(WAYS[way](build(fully_shard)), step, steps=1)
    assert_same(Record(actual.losses, actual.gradients, [{}]), Record(expected.losses, expected.gradients, [{}]))


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "by unit"])  # planned it is in test_replaced.py
@pytest.mark.parametrize("root_only", [False, pytest.param(True, marks=pytest.mark.more)])
def test_units_thawed_one_by_one(rank, world_size, way, root_only):
    """First the head alone is trained, then half of each block, then all; backward gathers and reduces no more than that."""

    def step(run: nn.Module, index: int) -> torch.Tensor:
        for name, param in run.named_parameters():
            param.requires_grad_("head" in name or (index == 1 and ".up." in name) or index == 2)
        return forward_backward(run, index)

    def build(function: Sharding) -> nn.Module:
        return function(small(blocks=2)) if root_only else shard(small(blocks=2), function)

    model = build(fully_shard)
    expected = train(build(torch_fully_shard), step)
    assert [sum(grad is not None for grad in grads.values()) for grads in expected.gradients] == [1, 3, 13]
    assert_same(train(COUNTED[way](model), step), expected)
    if way == "by unit":
        backwards = [graph for graph in explain(model).graphs if graph.phase == "backward"]
        assert [graph.count("reduce") for graph in backwards] == [1, 3, 3]


@distributed(world_size=2)
@ways
def test_ignored_parameters(rank, world_size, way):
    """They stay plain and in full, and their gradients are each rank's own."""

    def build(function: Sharding) -> nn.Module:
        model = small()
        ignored = {model.blocks[0].up.weight, model.position.weight}
        return shard(model, function, ignored_params=ignored)

    model = build(fully_shard)
    for param in (model.blocks[0].up.weight, model.position.weight):
        assert not isinstance(param, DTensor)
    expected = train(build(torch_fully_shard))
    everyone: list = [None] * world_size
    dist.all_gather_object(everyone, expected.gradients[0]["position.weight"])
    assert not torch.equal(*everyone), "or it could not be told from a reduced one"
    assert_same(train(WAYS[way](model)), expected)
