"""Eager code: a bucket a block, nothing held for backward, gradients in one bucket."""

import weakref
from unittest import mock

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compat.autograd import saving_hooks
from compiled_fsdp.frontend.eager_reads import BlockHandle
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import (
    Transformer,
    assert_same,
    batch,
    collectives_of,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    shard,
    train,
    variants,
)
from tests.harness.fake import fake_group
from tests.harness.models import PartlyDisabled, small
from tests.harness.saved_tensors import bytes_of_full_parameters


@distributed(world_size=2)
@pytest.mark.parametrize("sharded", variants(["by unit", "root"], "by unit"))
def test_a_block_that_never_compiles(rank, world_size, sharded):
    """Results, one gather each way, nothing of it held in between; with a unit for each block and with the root
    alone."""
    model = small(blocks=3, cls=PartlyDisabled)
    full = [param.detach().clone() for param in model.blocks[1].parameters() if param.dim() == 2]
    model = shard(model, fully_shard) if sharded == "by unit" else fully_shard(model, reshard_after_forward=True)
    run = compiled(model)
    out = run(batch(rank, 0)[0])
    assert bytes_of_full_parameters(full, out) == 0
    assert saving_hooks() is None
    del out
    assert_same(train(run), fsdp2_record(small(blocks=3, cls=PartlyDisabled)))
    read = {read.name for graph in explain(model).graphs for read in graph.reads}
    assert any("blocks.0" in name for name in read)
    assert not any("blocks.1" in name for name in read)
    RUNTIME.prefetcher.counts.clear()
    forward_backward(run, 9)
    assert RUNTIME.prefetcher.counts["late"] == 1


@distributed(world_size=2)
@pytest.mark.parametrize("reshard", variants([True, False, None], True))
def test_collectives_of_eager_code_are_those_of_fsdp2(rank, world_size, reshard):
    """Uncompiled: a gather a unit each way and a reduction a unit, and the same results, with every way to reshard."""

    def step(model):
        return [name.split()[0] for name in collectives_of(lambda: forward_backward(model, 9))]

    ours = shard(Transformer(), fully_shard, reshard_after_forward=reshard)
    theirs = fsdp2(Transformer(), reshard_after_forward=reshard)
    assert_same(train(ours), train(theirs))
    mine = step(ours)
    again = {True: 3, False: 0, None: 2}[reshard]  # and not for an embedding
    assert mine.count("all_gather") == 3 + again
    # gloo's reduce-scatter is one inside; the others ask whether a rank wrote to what is in flight: two in forward,
    # and backward's first
    assert mine.count("all_reduce") == 3 + (2 if reshard is False else 3)


@distributed(world_size=2)
def test_what_users_do_with_backward(rank, world_size):
    """`retain_graph`, several backwards, a loss that leaves parameters out, frozen ones, `autograd.grad`, and saved
    tensors kept on the CPU by torch's own hooks: as with FSDP2, and nothing is left behind."""

    def twice(model, index):
        loss = forward_of(model, index)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    def two_losses(model, index):
        out = model(batch(rank, index)[0])
        out[0].square().mean().backward(retain_graph=True)
        out[1].sin().mean().backward()
        return out.detach().sum()

    def on_cpu(model, index):
        with torch.autograd.graph.save_on_cpu():
            loss = forward_of(model, index)
        loss.backward()
        assert saving_hooks() is None
        return loss.detach()

    def forward_of(model, index):
        return model(batch(rank, index)[0]).square().mean()

    for step in (twice, two_losses, on_cpu):
        ours, theirs = shard(Transformer(), fully_shard), fsdp2(Transformer())
        for model in (ours, theirs):
            model.blocks[0].up.weight.requires_grad_(False)
        rtol = 1e-6 if step is two_losses else 0.0  # each backward is reduced, and then they are added
        assert_same(train(ours, step, steps=2), train(theirs, step, steps=2), rtol=rtol)
        assert saving_hooks() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_full_blocks_in_backward(frozen):
    """One at a time is full, trained or frozen; a unit that keeps its parameters inside of one that does not."""
    with fake_group(2):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        fully_shard(model[0], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=True)
        model.requires_grad_(not frozen)
        full: list[int] = []
        blocks: weakref.WeakSet[BlockHandle] = weakref.WeakSet()
        made = BlockHandle.__init__

        def remember(block, *args):
            made(block, *args)
            blocks.add(block)

        x = torch.randn(2, 8, requires_grad=True)
        with mock.patch.object(BlockHandle, "__init__", remember):
            out = model(x)
        assert saving_hooks() is None
        assert sum(block.block() is not None for block in blocks) == 0
        for node in (out.grad_fn, *(pair[0] for pair in out.grad_fn.next_functions)):
            if node is not None:
                node.register_hook(lambda *_: full.append(sum(bool(block._fulls) for block in blocks)))
        x.register_hook(lambda grad: full.append(sum(bool(block._fulls) for block in blocks)))
        out.sum().backward()
        assert max(full) <= 1
        assert len(blocks) <= 1  # and what is left is that of the unit that keeps its own
        assert x.grad is not None


def test_looking_at_what_is_saved():
    """Outside of a backward a gather would be a collective that others do not join."""
    with fake_group(2):
        model = fully_shard(nn.Linear(4, 4), reshard_after_forward=True)
        out = model(torch.randn(2, 4, requires_grad=True))
        with pytest.raises(
            RuntimeError, match=r"'weight', which autograd has saved .* not kept from forward to backward"
        ):
            _ = out.grad_fn._saved_mat2
        out.sum().backward()
        assert model.weight.grad is not None


def test_an_exception_leaves_no_hooks():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            raise ValueError("inside")

    with fake_group(2):
        model = fully_shard(Fails())
        with pytest.raises(ValueError, match="inside"):
            model(torch.randn(2, 4))
        assert saving_hooks() is None
        assert model._fsdp_unit.eager.blocks is None


def test_a_gradient_penalty_through_saved_parameters():
    """Second derivatives of what a full parameter was used for: of inputs they are right; through a parameter an
    error."""
    with fake_group(1):
        model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
        plain.load_state_dict(model.state_dict())
        fully_shard(model, reshard_after_forward=True)
        x = torch.randn(2, 3, requires_grad=True)
        penalties = []
        for net in (model, plain):
            (grad,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
            grad.square().sum().backward()
            penalties.append(net.weight.grad)
        assert torch.equal(penalties[0].to_local(), penalties[1])
