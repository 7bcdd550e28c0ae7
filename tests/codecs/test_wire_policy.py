"""The policy itself: what it refuses, for which units and parameters it is, and ranks that differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from compiled_fsdp import WirePolicy, explain, fully_shard
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.outline import outline_of
from tests.harness import (
    WAYS,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
)
from tests.harness.models import small

MISTAKES = {
    "WirePolicy: gather must be one of bfloat16, int8, float8_e4m3fn or None, but is 'int4'": {"gather": "int4"},
    "WirePolicy: reduce must be one of .*, but is torch.float64": {"reduce": torch.float64},
    "WirePolicy: block must be a positive multiple of 16, but is 100": {"gather": "int8", "block": 100},
    "WirePolicy: error_feedback=True .* needs reduce=": {"gather": "int8", "error_feedback": True},
}


@pytest.mark.parametrize("error", MISTAKES)
def test_mistakes(error):
    with pytest.raises(ValueError, match=error):
        WirePolicy(**MISTAKES[error])


@distributed(world_size=1)
def test_one_rank_encodes_nothing(rank, world_size):
    for way in WAYS.values():
        model = shard(small(), fully_shard, wire_policy=WirePolicy("int8", "int8", error_feedback=True))
        assert_same(train(way(model)), train(way(shard(small(), fully_shard))))


@distributed(world_size=2)
def test_what_is_no_policy(rank, world_size):
    with pytest.raises(ValueError, match="fully_shard: wire_policy must be a WirePolicy, but got str"):
        fully_shard(small(), wire_policy="int8")


@distributed(world_size=2)
@pytest.mark.parametrize("by", variants(["hand", "policy"], "policy"))
def test_one_unit_alone(rank, world_size, by):
    """A bucket has parameters of one codec; the others are exact. A policy of units has policies of its own."""
    model = small(blocks=2)
    if by == "hand":
        fully_shard(model.blocks[1], wire_policy=WirePolicy(gather="int8"))
        fully_shard(model)
    else:
        chosen = {id(model.blocks[1]): {"wire_policy": WirePolicy(gather="int8")}}
        fully_shard(model, auto_wrap_policy=CustomPolicy(lambda module: chosen.get(id(module), False)))
    model = compiled(model)
    forward_backward(model, 0)
    for graph in explain(model).graphs:
        encoded = {read.index for read in graph.reads if read.codec == "int8/256"}
        assert {read.name for read in graph.reads if read.index in encoded} >= {"blocks.1.up.weight"}
        buckets = [set(bucket.reads) for bucket in graph.plan.launches if bucket.kind == "gather"]
        assert all(bucket <= encoded or not bucket & encoded for bucket in buckets)


class Integers(nn.Module):
    """A frozen table of integers beside a weight; x [B] of indices."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(24).view(6, 4), requires_grad=False)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8).view(4, 2))

    def forward(self, x):
        return (self.table[x].float() @ self.weight).sum()


@distributed(world_size=2)
def test_integers_are_sent_as_they_are(rank, world_size):
    for way in WAYS.values():
        losses = []
        for wire in (WirePolicy("bfloat16", "int8"), None):
            model = way(fully_shard(Integers(), wire_policy=wire))
            losses.append(model(torch.tensor([1, 5])))
            losses[-1].backward()
        assert abs(losses[0] - losses[1]) < 0.5


@distributed(world_size=2, reset=True)
def test_ranks_that_differ(rank, world_size):
    """A named error on every rank, before anything is sent; uncompiled on the one that comes last."""
    for mine in ({"gather": "int8"}, {"reduce": "int8", "block": 64}, {"reduce": "int8", "error_feedback": True}):
        model = shard(small(), fully_shard, wire_policy=WirePolicy(**mine) if rank else WirePolicy(reduce="int8"))
        with pytest.raises(RanksDiffer, match=r"Rank 1 of the group has: .*int8.*; rank 0 has: .*int8/256"):
            forward_backward(compiled(model), 0)
        lines: list[tuple[str, ...] | None] = [None, None]
        dist.all_gather_object(lines, outline_of(units_of(model), units_of(model)[0].parameters[0].group))
        assert lines[0] != lines[1]


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_without_a_policy_nothing_changes(rank, world_size, way):
    model = shard(small(), fully_shard, wire_policy=WirePolicy())
    assert_same(train(WAYS[way](model)), fsdp2_record(small()))


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_what_is_not_finite_stays_so(rank, world_size, way):
    """A gradient of NaN or infinity is seen on every rank, and leaves nothing to the next one."""
    model = WAYS[way](shard(small(), fully_shard, wire_policy=WirePolicy("int8", "int8", error_feedback=True)))
    loss = torch.compiler.disable(lambda scale: forward_backward_scaled(model, scale))
    loss(float("inf"))
    assert not all(p.grad.full_tensor().isfinite().all() for p in model.parameters())
    model.zero_grad()
    loss(1.0)
    assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters())


def forward_backward_scaled(model, scale):

    (loss_of(model, torch.distributed.get_rank(), 0) * scale).backward()


@distributed(world_size=2)
def test_loading_forgets_what_was_lost(rank, world_size):
    """A run that has loaded a state goes on as one that begins with it."""
    options = WirePolicy("int8", "int8", error_feedback=True)
    used, fresh = (shard(small(seed=seed), fully_shard, wire_policy=options) for seed in (1, 0))
    train(used, steps=2)
    used.load_state_dict({name: value.clone() for name, value in fresh.state_dict().items()})
    assert_same(train(used), train(fresh))
