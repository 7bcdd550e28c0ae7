"""Full parameters that are kept from one microbatch to the next."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from tests.harness import WAYS, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, variants
from tests.harness.models import small
from tests.harness.ours import counted
from tests.harness.reference import assert_same_gradients


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_keeping_parameters_over_microbatches(rank, world_size, run):
    """Gathers 3, 0, 0; equal to FSDP2, and gathered anew after the optimizer's step."""
    model = shard(small(blocks=2), fully_shard)
    reference = fsdp2(small(blocks=2), reshard_after_forward=False)
    call = model if run == "eager" else compiled(model, bucket="module")
    found = []

    def step(m, call, index, count=3):
        losses = []

        def run_micro(micro):
            losses.append(loss_of(call, rank, index * count + micro))
            losses[-1].backward()

        for micro in range(count):
            m.set_requires_gradient_sync(micro == count - 1)
            m.set_reshard_after_backward(micro == count - 1)
            kinds = counted(functools.partial(run_micro, micro))
            if m is model:
                found.append((kinds["AG"], kinds["RS"]))
        return losses[-1].detach()

    ours = train(call, lambda c, index: step(model, c, index))
    assert found[3:] == [(3, 0), (0, 0), (0, 3)] * 2
    assert_same(ours, train(reference, lambda c, index: step(reference, c, index)))
    assert all(
        parameter.retained is None for block in (model, *model.blocks) for parameter in block._fsdp_unit.parameters
    )


class Checkpointed(nn.Sequential):
    """Layers with torch's checkpoint around each, or inside."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
        if where == "inside":
            self[1].forward = functools.partial(checkpoint, self[1].forward, use_reentrant=False)
        self.around = where == "around"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = checkpoint(self[1], x, use_reentrant=False) if self.around else self[1](self[0](x))
        return self[2](middle)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("where", ["inside", "around"])
def test_what_a_checkpoint_in_a_graph_reads_is_kept(rank, world_size, where):
    """Code in its body can store nothing: its full parameters leave it as results. fullgraph=True holds."""
    found = []
    for function in (fully_shard, torch_fully_shard):
        model = Checkpointed(where)
        for layer in model:
            function(layer)
        function(model)
        run = compiled(model, bucket="module") if function is fully_shard else model
        for _step in range(2):
            counts = []
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model.set_reshard_after_backward(micro == 2)

                def run_micro(run=run, micro=micro):
                    run(torch.full((2, 8), 0.1 + rank + micro)).square().mean().backward()

                counts.append(counted(run_micro)["AG"])
        found.append(model)
        if function is fully_shard:
            layers = 3 if where == "inside" else 2
            assert counts == [layers, 0, 0]
    assert_same_gradients(*found)


@distributed(world_size=2)
def test_kept_parameters_are_dropped_by_an_optimizers_step(rank, world_size):
    """Whoever forgets to reshard trains on what the optimizer wrote; FSDP2 would go on with the old values."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    model.set_reshard_after_backward(False)
    assert_same(train(compiled(model)), train(reference))


@distributed(world_size=2)
@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("when", ["before", "after", "reset"])
def test_unsharded_and_kept_parameters_are_dropped_by_a_step(rank, world_size, run, when):
    """Whether `unshard()` comes before the forward or after it, or the flag is set back before the step."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    call = WAYS[run](model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    losses = []
    for index in range(3):
        model.set_reshard_after_backward(False)
        if when != "after":
            model.unshard()
        loss = loss_of(call, rank, index)
        if when == "after":
            model.unshard()
        model.set_reshard_after_backward(when == "reset")
        loss.backward()
        expected = loss_of(reference, rank, index)
        expected.backward()
        losses.append((loss.detach(), expected.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in losses), losses


class Penalized(nn.Module):
    """Its backward computes with the full weight, element by element, what has the weight's size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(x, self.weight) + 0.01 * self.weight.square().sum()


@pytest.mark.more
@distributed(world_size=2)
def test_inductor_does_not_write_to_kept_parameters(rank, world_size):
    """AOTAutograd gives Inductor what only a backward has saved, to write to; a kept parameter is not only saved."""
    found = []
    for way in (fully_shard, torch_fully_shard):
        model = Penalized()
        way(model)
        run = torch.compile(model, backend="compiled_fsdp") if way is fully_shard else model
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            run(
                torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * micro + rank))
            ).square().mean().backward()
        found.append(model.weight.grad.full_tensor())
    torch.testing.assert_close(*found)


class ReadBefore(nn.Module):
    """A graph break stands between a parameter's read and its use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        weight = self.weight
        torch._dynamo.graph_break()
        return F.linear(x, weight)


@distributed(world_size=2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_kept_parameters_under_torchs_own_backends(rank, world_size, backend):
    """They have memory of their own, because these backends use a graph's memory again. (An op's result that shares
    memory with its input is an error in tests, see tests/conftest.py.)
    """
    found = []
    for way in (fully_shard, torch_fully_shard):
        model = way(small(blocks=1))
        run = torch.compile(model, backend=backend) if way is fully_shard else model
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            loss_of(run, rank, micro).backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    for ours, fsdp2s in zip(*found, strict=True):
        torch.testing.assert_close(ours, fsdp2s)


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
@pytest.mark.parametrize("unused", variants([False, True], False))
def test_a_kept_parameter_that_a_graph_gives(rank, world_size, codegen, unused):
    """The kept parameter has no gradient, and the graph's result has one, so they must not be one tensor."""
    found = []
    for way in (fully_shard, torch_fully_shard):
        model = nn.Sequential(ReadBefore(), ReadBefore())
        way(model)
        if unused and way is fully_shard:
            model.set_reduce_scatter_unused_params(True)
        run = compiled(model, codegen=codegen) if way is fully_shard else model
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            loss = sum(run(torch.full((2, 8), 0.1 + k + rank + 10 * micro)).square().mean() for k in range(2))
            loss.backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", variants(["aot_eager", "inductor", None], None))
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_keeps_nothing(rank, world_size, codegen, without):
    """No backward is to come, and what is computed in inference mode cannot be saved for one."""
    found = []
    for evaluates in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model[0])
        fully_shard(model)
        model.set_reshard_after_backward(False)
        run = model if codegen is None else compiled(model, codegen=codegen)
        x = torch.full((2, 8), 0.1 + rank)
        for step in range(3):
            if evaluates and step != 1:
                with without():
                    run(x)
                kept = [p.retained for unit in model._fsdp_unit.tree_units() for p in unit.parameters]
                assert all(full is None for full in kept) == (step == 0)  # after a backward they stay
            run(x).square().mean().backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
