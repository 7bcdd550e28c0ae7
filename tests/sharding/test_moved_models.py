"""Models that are moved to another dtype or device after sharding, before and after the first compiled call."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import fully_shard
from tests.harness import WAYS, assert_same, compiled, distributed, forward_backward, fsdp2, shard, train, variants
from tests.harness.before_after import TIMES, ready
from tests.harness.models import small
from tests.harness.reference import Sharding

MOVES_AFTER_A_STEP = {
    "float64": lambda model: model.to(torch.float64),
    "bfloat16": lambda model: model.bfloat16(),
    "cpu": lambda model: model.to("cpu"),
    "half and back": lambda model: model.half().float(),
}


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "move"),
    [*(("eager", move) for move in MOVES_AFTER_A_STEP), ("compiled", "float64"), ("compiled", "half and back")],
)
def test_moved_after_sharding_and_a_step(rank, world_size, way, move):
    """FSDP2 is sharded after the move."""
    model = shard(small(), fully_shard)
    run = compiled(model) if way == "compiled" else model
    forward_backward(run, 0)
    model.zero_grad()
    MOVES_AFTER_A_STEP[move](model)
    assert_same(train(run, steps=2), train(fsdp2(MOVES_AFTER_A_STEP[move](small())), steps=2))


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "cpu": lambda model: model.cpu(),
    "to(memory_format)": lambda model: model.to(memory_format=torch.preserve_format),
}


@distributed(world_size=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("move", MOVES)
def test_moved_before_the_first_call(rank, world_size, way, move):
    model, run = ready(way, "before")
    assert MOVES[move](model) is model
    assert_same(train(run, steps=2), train(fsdp2(MOVES[move](small())), steps=2))


@distributed(world_size=2)
@pytest.mark.parametrize(("way", "when"), variants(TIMES, TIMES[0]))
def test_one_unit_of_another_dtype(rank, world_size, way, when):
    """A block in float64, after a cast of its own, among others in float32."""

    class Cast(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x.to(self.block.up.weight.dtype)).float()

    def build(function: Sharding) -> nn.Module:
        model = small(blocks=2)
        model.blocks[0] = Cast(model.blocks[0])
        return shard(model, function)

    model, run = ready(way, when, build(fully_shard))
    model.blocks[0].double()
    reference = build(torch_fully_shard)
    reference.blocks[0].double()
    assert_same(train(run, steps=2), train(reference, steps=2))
