"""The rows of "The stages of ZeRO" in docs/parallelism.md: each trains as unsharded code does, and sends as it says."""

from fractions import Fraction

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import count_communication, fully_shard, replicate
from tests.harness import compiled, distributed, shard
from tests.harness.reference import full

MICROBATCHES, WIDTH, BLOCKS = 2, 16, 3
ELEMENTS = BLOCKS * WIDTH * WIDTH


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def inputs(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator, requires_grad=True)


def expected(world_size: int, *, ranks_first: bool) -> list[torch.Tensor]:
    """The gradients of unsharded training: sums over ranks and then microbatches, or the other way round."""
    model = Stack()
    params = list(model.parameters())
    found = {
        (rank, micro): torch.autograd.grad(model(inputs(rank, micro)) / MICROBATCHES, params)
        for rank in range(world_size)
        for micro in range(MICROBATCHES)
    }

    def over_ranks(of):
        return sum(of(rank) for rank in range(world_size)) / world_size

    def over_microbatches(of):
        return sum(of(micro) for micro in range(MICROBATCHES))

    return [
        over_microbatches(lambda m, i=i: over_ranks(lambda r: found[r, m][i]))
        if ranks_first
        else over_ranks(lambda r, i=i: over_microbatches(lambda m: found[r, m][i]))
        for i in range(len(params))
    ]


# How to shard; whether only the last microbatch reduces, and whether parameters stay full until then; the bytes that a
# rank sends in a step, in those of all parameters.
HALF = Fraction(1, 2)
ROWS = {
    "DDP": (replicate, {}, True, False, 2 * HALF),
    "ZeRO-1": (fully_shard, {"reshard_after_forward": False}, True, True, HALF * (1 + 1)),
    "ZeRO-2": (fully_shard, {"reshard_after_forward": False}, False, True, HALF * (1 + MICROBATCHES)),
    "ZeRO-2, resharded": (fully_shard, {"reshard_after_forward": False}, False, False, HALF * MICROBATCHES * 2),
    "ZeRO-3": (fully_shard, {}, False, False, HALF * MICROBATCHES * 3),
}


def step(model: nn.Module, run: nn.Module, rank: int, reduces_once: bool, keeps: bool) -> None:
    for micro in range(MICROBATCHES):
        last = micro == MICROBATCHES - 1
        model.set_requires_gradient_sync(last or not reduces_once)
        if keeps:
            model.set_reshard_after_backward(last)
        (run(inputs(rank, micro)) / MICROBATCHES).backward()


@pytest.mark.more
@distributed(world_size=2)
def test_each_stage(rank, world_size):
    for name, (function, options, reduces_once, keeps, sent) in ROWS.items():
        model = shard(Stack(), function, **options)
        run = compiled(model)
        for _ in range(2):
            model.zero_grad()
            with count_communication() as volume:
                step(model, run, rank, reduces_once, keeps)
            grads = [full(p.grad) for p in model.parameters()]
            wanted = expected(world_size, ranks_first=not reduces_once)
            assert all(map(torch.equal, grads, wanted)), name
        assert volume.sent == sent * 4 * ELEMENTS, name


@pytest.mark.more
@distributed(world_size=4)
def test_hsdp(rank, world_size):
    """Two groups of two ranks: a rank all-reduces its shard with the rank that has the same one, once in a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Stack(), fully_shard, mesh=mesh)
    run = compiled(model)
    for _ in range(2):
        model.zero_grad()
        with count_communication() as volume:
            for micro in range(MICROBATCHES):
                model.set_requires_all_reduce(micro == MICROBATCHES - 1)
                (run(inputs(rank, micro)) / MICROBATCHES).backward()
        for p, wanted in zip(model.parameters(), expected(world_size, ranks_first=True), strict=True):
            torch.testing.assert_close(full(p.grad), wanted)
    assert volume["gather"].sent + volume["reduce"].sent == HALF * MICROBATCHES * 3 * 4 * ELEMENTS
    assert volume["all_reduce"].sent == 4 * ELEMENTS / 2  # twice half of a shard
