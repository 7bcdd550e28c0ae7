"""Several models in one process, and in one graph."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import assert_same, compiled, distributed, forward_backward, fsdp2, shard, train, variants
from tests.harness.models import small
from tests.harness.reference import Sharding


@pytest.mark.more
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


@pytest.mark.more
@distributed(world_size=2)
def test_models_that_take_turns(rank, world_size):
    """Two of one class, one of another shape, one by block; each keeps its own parameters, gradients and plan."""
    group = DeviceMesh.from_group(dist.new_group(), "cpu")
    builds: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], dict]] = [
        (small, compiled, {}),
        (partial(small, seed=1), compiled, {"reshard_after_forward": False}),
        (partial(small, blocks=2), partial(compiled, bucket="parameter"), {}),
        (partial(small, seed=2), compiled, {"mesh": group}),
        (partial(small, seed=3), lambda model: model, {}),
    ]
    ours, theirs = [], []
    for build, way, options in builds:
        model = shard(build(), fully_shard, **options)
        ours.append((way(model), torch.optim.AdamW(model.parameters(), lr=0.01)))
        reference = fsdp2(build(), **options)
        theirs.append((reference, torch.optim.AdamW(reference.parameters(), lr=0.01)))
    for _ in range(2):
        for (mine, step), (reference, their_step) in zip(ours, theirs, strict=True):
            assert_same(train(mine, steps=1, optimizer=step), train(reference, steps=1, optimizer=their_step))


class Pair(nn.Module):
    """Two sharded models in one graph, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens).argmax(-1)) + self.first(tokens)


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "compiled_fsdp", "by unit"], "eager"))
def test_a_model_of_models(rank, world_size, way):
    """Two roots, neither inside a sharded module, in one compiled graph; the first one runs twice."""

    def build(function: Sharding) -> nn.Module:
        return Pair(shard(small(blocks=2), function), shard(small(1), function))

    model = build(fully_shard)
    run = {
        "eager": lambda: model,
        "compiled_fsdp": lambda: compiled(model),
        "by unit": lambda: compiled(model, bucket="module"),
    }
    assert_same(train(run[way](), steps=2), train(build(torch_fully_shard), steps=2), rtol=1e-5)
    if way == "by unit":
        assert explain(model).graphs[0].count("gather") == 5


@pytest.mark.more
@distributed(world_size=2)
def test_teacher_and_student(rank, world_size):
    """A frozen model under no_grad inside another one's training step."""

    def step(teacher: nn.Module, student: nn.Module, index: int) -> torch.Tensor:
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(rank + 10 * index))
        with torch.no_grad():
            target = teacher(tokens).softmax(-1)
        loss = nn.functional.cross_entropy(student(tokens).flatten(0, 1), target.flatten(0, 1))
        loss.backward()
        return loss.detach()

    records = []
    for function, way in ((fully_shard, compiled), (torch_fully_shard, lambda model: model)):
        teacher = way(shard(small(1, blocks=2), function))
        student = shard(small(blocks=2), function)
        records.append(train(way(student), partial(step, teacher), steps=3))
        assert all(param.grad is None for param in teacher.parameters())
    assert_same(*records)
