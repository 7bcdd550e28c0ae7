"""Which rows of which parameters a rank holds: uneven shards, empty ones, worlds that are not there, parameters that
are ignored."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    WAYS,
    Transformer,
    assert_same,
    batch,
    compiled,
    distributed,
    forward_backward,
    shard,
    train,
    variants,
    ways,
)
from tests.harness.fake import fake_group
from tests.harness.models import VOCABULARY, seeded, small
from tests.harness.reference import Sharding, assert_near


class Uneven(nn.Sequential):
    """Tokens to logits through parameters of 61, 3 and 1 rows; four ranks leave some of them nothing."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1), nn.Linear(1, VOCABULARY)
        super().__init__(*layers)


def local_shape(tensor: torch.Tensor, rank: int, world_size: int) -> list[int]:
    """The shape of this rank's rows of a full tensor, as `torch.chunk` gives them; no rows where it gives no chunk."""
    chunks = tensor.chunk(world_size)
    return list(chunks[rank].shape) if rank < len(chunks) else [0, *tensor.shape[1:]]


def check_uneven(way: str, rank: int, world_size: int) -> None:
    model = fully_shard(Uneven())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    actual = train(WAYS[way](model), optimizer=optimizer)
    assert_near(actual, train(torch_fully_shard(Uneven())), gradients=1e-7, parameters=1e-7)
    for name, plain in Uneven().named_parameters():
        param = model.get_parameter(name)
        for tensor in (param, param.grad, optimizer.state[param]["exp_avg"]):
            assert isinstance(tensor, DTensor)
            assert tensor.placements == (Shard(0),)
            assert tensor.shape == plain.shape
            shape, want = list(tensor.to_local().shape), local_shape(plain, rank, world_size)
            assert shape == want, f"{name}: {shape}, not {want}"


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
def test_uneven_rows_on_two_ranks(rank, world_size, way):
    check_uneven(way, rank, world_size)


@distributed(world_size=4)
@pytest.mark.parametrize("way", variants(["eager", "compiled_fsdp"], "eager"))
def test_uneven_rows_on_four_ranks(rank, world_size, way):
    """Of 3 rows the last rank has none, of 1 row only the first has it."""
    check_uneven(way, rank, world_size)


@pytest.mark.more
@pytest.mark.parametrize(("world_size", "rank"), [(8, 0), (64, -1)])
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
        assert sum(f.bucket.bytes for f in graphs[0].collectives) == rounded


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


class Narrow(nn.Module):
    """One element of a vector on each rank, and one column of a matrix."""

    def __init__(self):
        super().__init__()
        self.norm, self.table = nn.GroupNorm(1, 2), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return self.norm(x) * self.table.view(-1).sum()


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "aot_eager", "inductor"], "eager", "aot_eager"))
def test_parameters_are_contiguous(rank, world_size, way):
    """Kernels rely on that (group norm's), and so does `view`; in a bucket one element a rank lies apart."""
    records = []
    for function in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = function(Narrow(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
        nn.init.normal_(model.norm.weight)
        run = torch.compile(model, backend="compiled_fsdp", options={"codegen": way, "bucket": "module"})
        run = run if function is fully_shard and way != "eager" else model
        run(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        records.append([p.grad.full_tensor() for p in model.parameters()])
    for mine, theirs in zip(*records, strict=True):
        torch.testing.assert_close(mine, theirs)
