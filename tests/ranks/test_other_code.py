"""One rank runs other code than the rest for the same parameters.

Collectives belong to compiled code, so a rank with other code has to follow the plan of the others (see
docs/design/ranks.md, "Ranks with other code follow the agreed plan").
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import CPUOffloadPolicy, WirePolicy, compiled_autograd, count_communication, fully_shard
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.compiler.following import check_can_be_followed
from compiled_fsdp.ranks import waiting
from compiled_fsdp.ranks.agreement import Agreement, agreement_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.meeting import called_key
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import RankFailure, compiled, distributed, run_ranks, variants

Forward = Callable[["Model", torch.Tensor], torch.Tensor]


def plain(model: "Model", x: torch.Tensor) -> torch.Tensor:
    return x + model.b(model.a(x))


def logs(model: "Model", x: torch.Tensor) -> torch.Tensor:
    y = model.a(x)
    model.seen = y.detach().norm(), model.a[0].weight.detach().norm()
    return x + model.b(y)


def breaks(model: "Model", x: torch.Tensor) -> torch.Tensor:
    y = model.a(x)
    torch._dynamo.graph_break()
    return x + model.b(y)


def breaks_early(model: "Model", x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + model.b(model.a(x))


def prints(model: "Model", x: torch.Tensor) -> torch.Tensor:
    """Dynamo cannot go on behind it: nothing of the frame is compiled."""
    y = model.a(x)
    try:
        torch._dynamo.graph_break()
        return x + model.b(y)
    finally:
        model.seen = len(x)


def penalty(model: "Model", x: torch.Tensor) -> torch.Tensor:
    y = model.a(x)
    return x + model.b(y) + 0.1 * y.square().mean()


# The forwards that the odd rank runs instead of `plain`.
OTHERS: dict[str, Forward] = {
    "checkpoint": lambda m, x: x + m.b(checkpoint(m.a, x, use_reentrant=False)),
    "all in checkpoints": lambda m, x: checkpoint(lambda y: y + m.b(m.a(y)), x, use_reentrant=False),
    "logs": logs,
    "breaks": breaks,
    "breaks early": breaks_early,
    "prints": prints,
    "penalty": penalty,
    "mask": lambda m, x: x + m.b(m.a(x) * (x > 0)),
    "first row": lambda m, x: x + m.b(m.a(x[:1])),
    "cast": lambda m, x: x + m.b(m.a(x.bfloat16().float())),
    "zeros": lambda m, x: x + m.b(0.0 * m.a(torch.zeros(1, 4))),
    "ones": lambda m, x: x + m.b(m.a(torch.ones(3, 4))),
    "constants": lambda m, x: x + m.b(m.a(torch.arange(4.0)[None] / 4)),
    "summed": lambda m, x: x + m.b(m.a(x)).sum(),
    "no rows": lambda m, x: x + m.b(m.a(x[:0])).sum(),
    "detached": lambda m, x: x + m.b(m.a(x.detach())),
    "disabled": lambda m, x: x + m.b(torch.compiler.disable(m.a)(x)),
}


class Block(nn.Sequential):
    """Its frame is of this file: before torch 2.15 Dynamo compiles no frame of torch's own modules by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Model(nn.Module):
    """Four layers, of which two are used in another way where `other` says so."""

    def __init__(self, other: Forward) -> None:
        super().__init__()
        self.start, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 4), other
        self.a = Block(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.b = Block(nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.start(x)
        return self.head(self.other(self, x) if odd else plain(self, x))


def whole(model: nn.Module) -> nn.Module:
    return compiled(model)


def blocks(model: nn.Module) -> nn.Module:
    for block in (model.a, model.b):
        block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    return model


def broken(model: nn.Module) -> nn.Module:
    """A break behind `start` on all ranks."""
    model.start.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return compiled(model)


WAYS = {"whole": whole, "blocks": blocks, "broken": broken, "eager": lambda model: model}


def train_and_compare(
    rank: int,
    other: Forward,
    way: str,
    odd_ranks: tuple[int, ...],
    odd_steps: tuple[int, ...],
    units: bool = True,
    mesh: DeviceMesh | None = None,
) -> None:
    """Five steps; in some of them the odd ranks take the other way. Gradients are those of the unsharded model.

    FSDP2 is no reference here: in some of these programs it reduces units in another order on each rank, and gives one
    unit the gradient of the other where their sizes are equal ("zeros": the input of `a` needs no gradient).
    """
    world = dist.get_world_size()
    mesh = mesh or DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=5)), "cpu")
    torch.manual_seed(7)
    model = Model(other)
    reference = copy.deepcopy(model)
    for unit in (model.a, model.b) if units else ():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = WAYS[way](model)
    totals = {name: torch.zeros_like(param) for name, param in reference.named_parameters()}
    for step in range(5):
        odd = rank in odd_ranks and step in odd_steps
        x = torch.randn(3 + rank * (step == 4), 4)
        run(x, odd).square().sum().backward()
        reference(x, odd).square().sum().backward()
        for name, param in reference.named_parameters():
            dist.all_reduce(param.grad)
            totals[name] += param.grad / world
            param.grad = None
        found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        tolerance = {"rtol": 0, "atol": 0} if world == 2 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found, totals, **tolerance, msg=lambda m, step=step: f"step {step}: {m}")


FIRST, LATER = (0, 3), (2, 3)
# One checkpoint around layers that are compiled or run by themselves gathers them in another order in backward than
# ranks without it, which hangs with FSDP2, too.
UNORDERED = {(way, "all in checkpoints") for way in ("blocks", "eager")}
# Each kind by turns on rank 0 and rank 1, from the first step on or later: in the whole model, and in one of the other
# ways. The fuzzer draws the rest.
QUICK = {("whole", "breaks early"), ("whole", "mask"), ("blocks", "cast"), ("eager", "ones")}
CASES = [
    pytest.param(
        way, kind, i % 2, steps, marks=() if (way, kind) in QUICK else pytest.mark.more, id=f"{way}, {kind}, {steps}"
    )
    for w, way in enumerate(WAYS)
    for i, kind in enumerate(OTHERS)
    if (w == 0 or i % 3 == w - 1) and (way, kind) not in UNORDERED
    for steps in [(FIRST, LATER)[(i // 2 + w) % 2]]
] + [pytest.param("broken", "disabled", 1, FIRST, id="broken, disabled, hung")]


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize(("way", "kind", "odd_rank", "odd_steps"), CASES)
def test_one_rank_has_other_code(rank, world_size, way, kind, odd_rank, odd_steps):
    if torch.__version__ < "2.12" and (way, kind, odd_steps) == ("whole", "logs", LATER):
        return  # this torch's Dynamo fails where an attribute holds a DTensor that has become dynamic
    train_and_compare(rank, OTHERS[kind], way, (odd_rank,), odd_steps)


class PartlyFrozen(nn.Module):
    """Where `odd` says so, the input of the frozen layer needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = Block(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.start(x)
        return self.head(x + self.frozen(torch.ones_like(x)) if odd else self.frozen(x))


@pytest.mark.more
@distributed(world_size=3, reset=True)
@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize("first", [0, 2])
def test_a_frozen_layer_whose_input_needs_no_gradient_on_one_rank(rank, world_size, odd_rank, first):
    """The layer's graph has no backward there; the other ranks gather its parameters once more in their backward."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(3)
    model = PartlyFrozen()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.frozen.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for step in range(4):
        x, odd = torch.randn(3, 4), rank == odd_rank and step >= first and step % 2 == 0
        for each in (model, reference):
            each.zero_grad()
            each(x, odd).square().sum().backward()
        wanted = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
        for grad in wanted.values():
            dist.all_reduce(grad.div_(world_size))
        found = {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}
        torch.testing.assert_close(found, wanted)


class StartsFrozen(nn.Module):
    """Where `odd` says so, the frozen layer has a graph of its own, which has no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.frozen(x)
        if odd:
            torch._dynamo.graph_break()
        return self.head(x)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odd_steps", [(0, 2), pytest.param((1,), marks=pytest.mark.more)])
def test_a_frozen_layer_before_a_break_on_one_rank(rank, world_size, odd_steps):
    """It is read in a forward that trains, as the other rank's code says, though nothing in its graph does."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = StartsFrozen()
    reference = copy.deepcopy(model)
    run = compiled(fully_shard(model, mesh=mesh))
    for step in range(3):
        x, odd = torch.randn(2, 4), rank == 1 and step in odd_steps
        for each, call in ((model, run), (reference, reference)):
            each.zero_grad()
            call(x, odd).square().sum().backward()
        for name, param in reference.head.named_parameters():
            dist.all_reduce(param.grad)
            assert torch.equal(model.head.get_parameter(name).grad.full_tensor(), param.grad / 2), step
        assert model.frozen.weight.grad is None


class FrozenTwice(nn.Sequential):
    """A frozen layer that is called before a trained one and after it, each time in a graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self[0](x)
        torch._dynamo.graph_break()
        y = self[1](y)
        torch._dynamo.graph_break()
        return self[0](y)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("reshard", variants(["as sharded", "auto"], "auto"))
def test_a_frozen_layer_is_called_without_and_with_a_gradient(rank, world_size, reshard):
    """Its plan becomes that of the call with a backward, which the other call follows: nothing is compiled again."""
    torch.manual_seed(7)
    model = FrozenTwice(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    run = compiled(fully_shard(model), reshard_after_forward=reshard)
    for step in range(4):
        x = torch.randn(3, 4)
        with mock.patch.object(Compilation, "compile", autospec=True, side_effect=Compilation.compile) as compiles:
            run(x).square().sum().backward()
        reference(x).square().sum().backward()
        assert step < 2 or not compiles.called
        for param, expected in zip(model[1].parameters(), reference[1].parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / world_size)
            param.grad = expected.grad = None


@distributed(world_size=2, reset=True)
def test_the_input_of_a_frozen_layer_needs_a_gradient_on_one_rank_later(rank, world_size):
    """The others run code without a backward, and that rank has a backward all the same."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))
    reference = copy.deepcopy(model)
    run = compiled(fully_shard(model, mesh=mesh))
    for step in range(3):
        x = torch.randn(3, 4, requires_grad=rank == 1 and step == 1)
        loss = run(x).square().sum()
        torch.testing.assert_close(loss, reference(x).square().sum())
        if x.requires_grad:
            wanted = torch.autograd.grad(reference(x).square().sum(), x)
            torch.testing.assert_close(torch.autograd.grad(loss, x), wanted)


class Layer(nn.Module):
    """Where `odd` says so, Dynamo leaves its frame out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        return left_out(self, self.inner, x).tanh() if odd else self.inner(x).tanh()


def left_out(owner: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    try:
        torch._dynamo.graph_break()
        return function(x)
    finally:
        owner.seen = len(x)


class Ends(nn.Module):
    """A unit whose first layer is compiled, unless `odd`, and whose last one is not; another unit lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.head = Layer(), Layer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        return left_out(self, lambda y: self.head(self.middle(self.start(y, odd))), x)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odd_steps", [(2,), pytest.param((0, 2), marks=pytest.mark.more)])
def test_a_part_of_a_block_is_compiled_on_one_rank(rank, world_size, odd_steps):
    """What of a block follows a plan has no part in the bucket of the rest."""
    torch.manual_seed(7)
    model = Ends()
    reference = copy.deepcopy(model)
    fully_shard(model.middle)
    run = compiled(fully_shard(model))
    for step in range(4):
        x, odd = torch.randn(2, 4), rank == 0 and step in odd_steps
        run(x, odd).square().sum().backward()
        reference(x, odd).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            assert torch.equal(param.grad.full_tensor(), expected.grad / 2)
        model.zero_grad()
        reference.zero_grad()


@distributed(world_size=2, reset=True)
def test_one_rank_evaluates_alone_what_all_have_unsharded(rank, world_size):
    """Forwards without collectives do not count among those that all ranks run, by which ranks meet later."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
    run, x = compiled(model), torch.ones(2, 4)
    run(x).sum().backward()
    model.unshard()
    with torch.no_grad():
        expected = run(x)
        for _ in range(3 if rank == 0 else 0):
            assert torch.equal(run(x), expected)
        if rank == 0:  # it compiles code that the other rank does not have
            assert torch.equal(run(torch.ones(3, 4))[:2], expected)
            assert torch.equal(compiled(model[1])(model[0](x)), expected)
    model.reshard()
    model[0].requires_grad_(False)  # both compile anew
    model.zero_grad()
    run(x).sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[1].bias.grad.full_tensor(), torch.full((4,), 2.0))


@pytest.mark.more
@distributed(world_size=3, reset=True)
@pytest.mark.parametrize("steps", [FIRST, LATER])
@pytest.mark.parametrize("kind", ["checkpoint", "breaks", "zeros"])
def test_two_of_three_ranks_have_other_code(rank, world_size, kind, steps):
    train_and_compare(rank, OTHERS[kind], "whole", (0, 2), steps)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_new_model_whose_graphs_are_known(rank, world_size, odd_rank):
    """Models before it had the whole graph on all ranks, and the broken one; it has each of them on one rank."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=5)), "cpu")
    for odd_ranks in [(), (0, 1), (odd_rank,)]:
        train_and_compare(rank, OTHERS["breaks"], "whole", odd_ranks, (0, 1, 2, 3, 4), mesh=mesh)


@pytest.mark.more
@distributed(world_size=3, reset=True)
@pytest.mark.parametrize("steps", [FIRST, LATER])
def test_each_rank_has_other_code(rank, world_size, steps):
    train_and_compare(rank, OTHERS[["breaks", "checkpoint", "prints"][rank]], "whole", (0, 1, 2), steps)


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("kind", ["breaks", "checkpoint"])
@pytest.mark.parametrize("odd_steps", [(0, 1), (1, 2)])
def test_replicas_whose_shards_are_whole(rank, world_size, kind, odd_steps):
    """Parameters are read without a gather, and their gradients still are reduced: in the last microbatch only."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    model = Model(OTHERS[kind])
    reference = copy.deepcopy(model)
    fully_shard(model.a, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = compiled(model)
    for step in range(3):
        odd = rank == 1 and step in odd_steps
        for microbatch in range(2):
            model.set_requires_all_reduce(microbatch == 1)
            x = torch.randn(2, 4)
            run(x, odd).square().sum().backward()
            reference(x, odd).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            assert torch.equal(param.grad.full_tensor(), expected.grad / 2), step
        with torch.inference_mode():
            assert torch.equal(run(x, odd), reference(x, odd))
        model.zero_grad()
        reference.zero_grad()


def train_with_replicas_and_kernels(rank: int, kind: str, shards: int) -> None:
    """Our kernels leave gaps between the gradients in a bucket, and the gaps go on over the replicas."""
    world = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(world).view(-1, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    model = Model(OTHERS[kind])
    reference = copy.deepcopy(model)
    run = compiled(fully_shard(model, mesh=mesh), kernels=True)
    for step, microbatches in enumerate((1, 2, 1)):
        odd = rank == (1, 1, 0)[step]
        for microbatch in range(microbatches):
            model.set_requires_all_reduce(microbatch == microbatches - 1)
            x = torch.randn(2, 4)
            run(x, odd).square().sum().backward()
            reference(x, odd).square().sum().backward()
        for name, expected in reference.named_parameters():
            dist.all_reduce(expected.grad)
            found = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, expected.grad / world, msg=lambda m, at=(step, name): f"{at}: {m}")
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("kind", ["breaks", "prints"])
def test_replicas_and_kernels(rank, world_size, kind):
    train_with_replicas_and_kernels(rank, kind, shards=1)


@pytest.mark.more
@distributed(world_size=4, reset=True)
def test_replicas_of_shards_and_kernels(rank, world_size):
    train_with_replicas_and_kernels(rank, "breaks", shards=2)


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("kind", ["breaks", "prints"])
def test_one_rank_evaluates_in_another_way(rank, world_size, kind):
    """Before any step, too: a plan without gradients is known by the parameters that it reads."""
    torch.manual_seed(7)
    model = Model(OTHERS[kind])
    reference = copy.deepcopy(model)
    run, x = compiled(fully_shard(model)), torch.randn(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        for odd in (rank == 0, False, rank == 1):
            with mode():
                assert torch.equal(run(x, odd), reference(x, odd))


@pytest.mark.more
@distributed(world_size=4, reset=True)
def test_replicas_run_ahead_of_a_rank_that_asks(rank, world_size):
    """Ranks 2 and 3 evaluate without the others, and ask in the next step while rank 1 still asks in the evaluation.

    What rank 1 runs there is known to code of another model only. Each rank calls once, and rank 1 first.
    """
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    x = torch.ones(2, 4)
    with mock.patch.multiple(waiting, _SECONDS_BEFORE_CALLING=0.0, _SECONDS_BETWEEN_LIVENESS_CHECKS=3600.0):
        for odd in (False, rank == 1):
            torch.manual_seed(7)
            model = Model(breaks)
            reference = copy.deepcopy(model)
            run = compiled(fully_shard(model, mesh=mesh))
            journal = agreement_of(model._fsdp_unit.parameters[0].group).journal
            position = journal.position
            with torch.no_grad():
                assert torch.equal(run(x, odd), reference(x, odd))
        while rank >= 2 and journal.liveness.value(called_key(journal.liveness)) != f"{position}.1":
            time.sleep(0.01)
        run(x, False).square().sum().backward()
    reference(x, False).square().sum().backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


class Shift(nn.Module):
    """Its backward needs no parameter, but a checkpoint that runs its forward again does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.bias)


class Shifts(nn.ModuleList):
    """Layers one after the other; in checkpoints where `odd` says so."""

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if odd else layer(x)
        return x


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("compiles", variants([False, True], False))
def test_one_rank_checkpoints_layers(rank, world_size, compiles, reshards):
    """Uncompiled all ranks gather a layer again in backward, or none does. Compiled all do, as the first plan says.

    On the rank without the checkpoint, no backward needs a parameter, and without gradient sync none reduces.
    """
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = Shifts(Shift() for _ in range(3))
    reference = copy.deepcopy(model)
    for layer in model if reshards else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    for layer in model if compiles else ():
        layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for step in range(3):
        odd = rank == step % 2
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            x, y = torch.randn(2, 4), torch.randn(2, 4)
            (model(x, odd).sum() + model(y, odd).square().sum()).backward()
            (reference(x, odd).sum() + reference(y, odd).square().sum()).backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)  # each forward's is reduced alone
            param.grad = expected.grad = None


class Pair(nn.Module):
    """Two layers, whose parameters are read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class AllInCheckpoints(nn.Sequential):
    def forward(self, x: torch.Tensor, without: int | None) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = layer(x) if number == without else checkpoint(layer, x, use_reentrant=False)
        return x


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("reshards", [True, pytest.param(False, marks=pytest.mark.more)])
@pytest.mark.parametrize("odd_ranks", [(0, None, 1, None), pytest.param((None, 1, None, 0), marks=pytest.mark.more)])
@pytest.mark.parametrize("order", [pytest.param((0, 1, 2, 3), marks=pytest.mark.more), (0, 1, 1, 1)])
def test_one_rank_leaves_one_of_equal_layers_without_its_checkpoint(rank, world_size, order, odd_ranks, reshards):
    """The rank's code for the next layer is new, too; and then all layers have it, also the one that was different."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    layers = [Pair() for _ in range(4)]
    model = AllInCheckpoints(*(layers[number] for number in order))
    reference = copy.deepcopy(model)
    for layer in dict.fromkeys(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_reshard_after_forward(reshards)
    for layer in dict.fromkeys(model):
        layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for odd_rank in odd_ranks:
        x = torch.randn(3, 4)
        for each in (model, reference):
            out = each(x, 1 if rank == odd_rank else None)
            out.sum().backward(retain_graph=True)
            out.square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
            param.grad = expected.grad = None
    assert not any(bound.kept for bound in RUNTIME.follower.known._all("training"))


WAYS_TO_SHARD: dict[str, dict[str, Any]] = {
    "replicas": {},
    "codecs": {"wire_policy": WirePolicy(gather="int8", reduce="bfloat16")},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "fewer ranks": {"reshard_after_forward": 2},
}


@distributed(world_size=4, reset=True)
@pytest.mark.parametrize("way", variants(WAYS_TO_SHARD, "replicas"))
def test_code_for_another_batch_needs_no_meeting(rank, world_size, way):
    """Its graph has the plan's collectives, so one rank may compile it while the others run the code that they have."""
    shape = (2, 2) if way == "replicas" else (4,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[2 - len(shape) :])
    model = nn.Sequential(*(Block(Shift()) for _ in range(2)), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh, **WAYS_TO_SHARD[way])
    fully_shard(model, mesh=mesh, **WAYS_TO_SHARD[way])
    model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"}, dynamic=False)
    for batch in (2, 3):
        with mock.patch.object(Agreement, "meet", autospec=True, side_effect=Agreement.meet) as meet:
            model(torch.ones(batch, 4)).sum().backward()
        assert bool(meet.call_count) == (batch == 2)


class SomeInCheckpoints(nn.Sequential):
    def forward(self, x: torch.Tensor, outside: set[int]) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = layer(x) if number in outside else checkpoint(layer, x, use_reentrant=False)
        return x


def _choose_code(rank: int, world_size: int, *, whole: bool, steps: Sequence[tuple[set[int], set[int]]]) -> None:
    """Train for ``steps``: in each, the layers outside of checkpoints on rank 0 and on rank 1."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = SomeInCheckpoints(*(Pair() for _ in range(4)))
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in [model] if whole else model:
        module.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for outside in steps:
        x = torch.randn(3, 4, requires_grad=True)
        for each in (model, reference):
            each(x, outside[rank]).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
            param.grad = expected.grad = None


NO_PLAN_YET = [({1}, {1, 2})]  # for layer 2
HAS_RUN_OTHER_CODE = [({1, 3}, {1, 3}), ({1, 2, 3}, {1, 3})]  # layer 2, on both ranks
FOLLOWS = [({0, 1}, {0}), ({0}, {0})]  # rank 1 follows rank 0's plan for layer 1


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("steps", variants([HAS_RUN_OTHER_CODE, NO_PLAN_YET, FOLLOWS], HAS_RUN_OTHER_CODE))
def test_ranks_choose_different_code_for_equal_layers_of_a_compiled_model(rank, world_size, steps):
    _choose_code(rank, world_size, whole=True, steps=steps)


@distributed(world_size=2, reset=True)
def test_ranks_choose_different_code_for_equal_layers(rank, world_size):
    """Both have code for layers in and outside of checkpoints, so none compiles. Without a meeting gloo would abort."""
    with pytest.raises(RanksDiffer, match=r"ranks run different code for equal layers\..* from '2\.a\.weight' on"):
        _choose_code(rank, world_size, whole=False, steps=NO_PLAN_YET)


@pytest.mark.more
@pytest.mark.parametrize("steps", [HAS_RUN_OTHER_CODE, FOLLOWS])
def test_ranks_choose_other_code_for_a_layer_that_has_run(steps):
    """Only one of them meets; the other may wait in a collective, so this takes processes of its own."""
    with pytest.raises(RankFailure, match="ranks run different code for equal layers"):
        run_ranks(_choose_code, 2, whole=False, steps=steps)


class BreaksInside(nn.Sequential):
    """A layer that a checkpoint runs uncompiled, because it has a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        return x.tanh()


class SometimesReentrant(nn.Sequential):
    """The first layer is in a reentrant checkpoint, except where `odd` says so."""

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self[0](x) if odd else checkpoint(self[0], x, use_reentrant=True)
        return self[1](x)


def _checkpoint_on_other_ranks(rank: int, world_size: int, last_batch: int) -> None:
    """Take a step with a reentrant checkpoint on all ranks, and one with it on rank 1 only."""
    model = SometimesReentrant(BreaksInside(nn.Linear(4, 4)), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    run = compiled(fully_shard(model))
    for batch, odd in ((3, False), (last_batch, rank == 0)):
        loss = run(torch.randn(batch, 4, requires_grad=True), odd).square().sum()
        with compiled_autograd(codegen="aot_eager"):
            loss.backward()


@pytest.mark.parametrize("last_batch", variants([3, 2], 3))
def test_a_layer_in_a_reentrant_checkpoint_on_other_ranks_only(last_batch):
    """Rank 0's plan for the layer is that of compiled autograd's recomputations; rank 1 reads it without gradients."""
    with pytest.raises(RankFailure, match="use_reentrant=True"):
        run_ranks(_checkpoint_on_other_ranks, 2, last_batch=last_batch)


class Apart(nn.Sequential):
    """Equal layers in graphs of their own. The first one's input needs no gradient, and `odd`'s on some ranks only."""

    def forward(self, x: torch.Tensor, odd: int) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        x = x + self[1](torch.ones_like(x)) if odd == 1 else self[1](x)
        torch._dynamo.graph_break()
        x = x + self[2](torch.ones_like(x)) if odd == 2 else checkpoint(self[2], x, use_reentrant=False)
        torch._dynamo.graph_break()
        return self[3](x)


def _train_apart(
    rank: int, mesh: DeviceMesh, odds: Sequence[int], *, compiled_backward: bool, overlap: bool, accumulates=False,
    twice: Sequence[int] = (),
) -> None:  # fmt: skip
    """Train for as many steps as there are `odds`, each with the layer whose input needs no gradient on rank 1.

    `accumulates`: layers have one weight each, and the last step alone reduces gradients.
    `twice`: the steps that have two forwards before their backward, from 1.
    """
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4)]
    model = Apart(*(layer[0] if accumulates else layer for layer in layers))
    reference = copy.deepcopy(model)
    run = compiled(fully_shard(model, mesh=mesh, reshard_after_forward=True), overlap=overlap)
    for step, odd in enumerate(odds, start=1):
        model.set_requires_gradient_sync(not accumulates or step == len(odds))
        inputs = [torch.randn(3, 4) for _ in range(1 + (step in twice))]
        loss = sum(run(x, odd if rank == 1 else -1).square().sum() for x in inputs)
        with compiled_autograd(codegen="aot_eager", overlap=overlap) if compiled_backward else nullcontext():
            loss.backward()
        sum(reference(x, odd if rank == 1 else -1).square().sum() for x in inputs).backward()
        if accumulates and step < len(odds):
            continue
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / dist.get_world_size())
            param.grad = expected.grad = None


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odds", variants([[-1, 2, -1], [1, -1, 2]], [-1, 2, -1]), ids=str)
@pytest.mark.parametrize("compiled_backward", variants([False, True], False))
def test_the_next_equal_layer_needs_no_gather_in_backward_on_one_rank(rank, world_size, compiled_backward, odds):
    """Its rank has agreed on such a graph for the first layer, and both ranks on the other graph for the second."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    _train_apart(rank, mesh, odds, compiled_backward=compiled_backward, overlap=True)


TWICE = variants([([-1, -1, 2], [2]), ([-1, 2], [1]), ([-1, 2], [2]), ([2, -1], [1])], ([-1, -1, 2], [2]))


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize(("odds", "twice"), TWICE, ids=str)
def test_two_forwards_before_a_backward_have_a_plan_of_their_own(rank, world_size, odds, twice):
    """Rank 1 follows the plan of a backward with as many forwards, not another one for the same parameters."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    _train_apart(rank, mesh, odds, compiled_backward=True, overlap=False, twice=twice)


@distributed(world_size=4, reset=True)
def test_replicas_without_overlap(rank, world_size):
    """Code waits for each all-reduce before its next gather, so a rank that follows launches it as early."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _train_apart(rank, mesh, [2], compiled_backward=True, overlap=False)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("overlap", variants([False, True], False))
def test_only_other_ranks_gather_a_layer_in_a_backward_that_reduces_nothing(rank, world_size, overlap):
    """Compiled autograd's graph has none of its parameters on rank 1, which takes part in the gathers all the same."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    _train_apart(rank, mesh, [2, 2], compiled_backward=True, overlap=overlap, accumulates=True)


@distributed(world_size=2, reset=True)
def test_one_rank_checkpoints_a_layer_that_was_full(rank, world_size):
    """After ``unshard()`` no rank gathers it in forward, and the others not in backward either."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = Shifts([Pair(), Pair()])
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True).set_reduce_scatter_unused_params(True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    run = compiled(model)
    for _ in range(2):
        for layer in model:
            layer.unshard()
        x = torch.randn(3, 4)
        run(x, rank == 0).square().sum().backward()
        reference(x, False).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
            param.grad = expected.grad = None


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("units", variants([False, True], False))
@pytest.mark.parametrize("kind", variants(["checkpoint", "all in checkpoints", "break"], "break"))
def test_one_rank_checkpoints_a_layer_whose_parameters_stay_for_the_next_microbatch(rank, world_size, kind, units):
    """Ranks keep the same parameters, in and outside of checkpoints, so that none gathers alone in the next one."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = Model(OTHERS["checkpoint" if kind == "break" else kind])
    reference = copy.deepcopy(model)
    for unit in (model.a, model.b) if units else ():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = broken(model) if kind == "break" else compiled(model)
    for odds in [(0, 1), (None, None), (None, 0, 1, None)]:
        for micro, odd in enumerate(odds):
            model.set_reshard_after_backward(micro == len(odds) - 1)
            x = torch.randn(3, 4)
            with count_communication() as volume:
                run(x, rank == odd).square().sum().backward()
            reference(x, rank == odd).square().sum().backward()
            assert micro == 0 or not volume["gather"].launches, str(volume)
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
            param.grad = expected.grad = None


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_the_rank_that_leads_with_another_layers_plan_fails_to_compile(rank, world_size):
    """Ranks that wait for its plan hear of it. They would wait until the group's timeout, which is a minute here."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    model = AllInCheckpoints(*(Pair() for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
        layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    fully_shard(model, mesh=mesh)
    fails = mock.patch.object(Compilation, "_conform", side_effect=ZeroDivisionError) if rank == 0 else nullcontext()
    error = ZeroDivisionError if rank == 0 else RanksDiffer
    with fails, pytest.raises(Exception, match="rank 0 of the group failed to compile" if rank else "") as caught:
        model(torch.ones(2, 4), 1 if rank == 0 else None)
    assert error.__name__ in f"{type(caught.value).__name__} {caught.value}"


class InOneCheckpoint(Shifts):
    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        run = super().forward
        return checkpoint(run, x, False, use_reentrant=False) if odd else run(x, False)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("kind", [Shifts, InOneCheckpoint])
def test_which_plans_of_checkpoints_are_followed(rank, world_size, kind):
    """One checkpoint around two layers gathers both before the first one's backward, which the plan of no layer has."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    model = fully_shard(kind([Shift(), Shift()]), mesh=mesh)
    for layer in model:
        layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    model(torch.ones(2, 4), True).sum().backward()
    for layer in model:
        (bound,) = (b for b in RUNTIME.follower.known._all("training") if b.holds({id(layer.bias)}))
        can_be = kind is Shifts or layer is model[0]
        with nullcontext() if can_be else pytest.raises(RanksDiffer, match="one checkpoint has several compiled"):
            check_can_be_followed(bound)


class MostlyFrozen(nn.Module):
    """Layers of which one is trained; where `odd` says so, `other` runs the frozen ones."""

    def __init__(self, other: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.start, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 4), other
        self.layers = nn.ModuleList([Block(nn.Linear(4, 4)), Block(Shift()), Block(nn.Linear(4, 4)), Block(Shift())])
        self.trained = self.layers[2]
        for layer in self.layers:
            layer.requires_grad_(layer is self.trained)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = x + (self.other(layer, x) if odd and layer is not self.trained else layer(x))
        return self.head(x)


def without_gradients(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


FROZEN_OTHERS = {
    "detached": lambda layer, x: layer(x.detach()),
    "no grad": without_gradients,
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
}
# Which ranks are odd in each step.
ODD_RANKS = {"at once": [(0,), (1,), ()], "later": [(), (1,), (0,)], "all at first": [(0, 1), (1,), (), (0,)]}
FROZEN_CASES = [
    pytest.param(way, kind, when, marks=() if (i + j + w) % 3 == 0 else pytest.mark.more)
    for w, way in enumerate(("units", "blocks", "one is compiled"))
    for i, kind in enumerate(FROZEN_OTHERS)
    for j, when in enumerate(ODD_RANKS)
    if (way, kind) != ("one is compiled", "no grad")  # an error that names the difference
]


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize(("way", "kind", "odd_ranks"), FROZEN_CASES)
def test_uncompiled_frozen_layers_that_some_ranks_need_in_backward(rank, world_size, way, kind, odd_ranks):
    """No gradient comes of them, by which ranks would know: all ranks gather them again, or none does."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(3)
    model = MostlyFrozen(FROZEN_OTHERS[kind])
    reference = copy.deepcopy(model)
    for layer in model.layers if way != "blocks" else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if way == "one is compiled":
        model.trained.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    for odd in ODD_RANKS[odd_ranks]:
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            x = torch.randn(3, 4)
            for each in (model, reference):
                each(x, rank in odd).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                dist.all_reduce(expected.grad)
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
        model.zero_grad()
        reference.zero_grad()


@distributed(world_size=2)
def test_uncompiled_frozen_layers_that_no_rank_needs(rank, world_size):
    """What no rank needs is not gathered again, in the first backward neither."""
    model = MostlyFrozen(FROZEN_OTHERS["detached"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        with count_communication() as volume:
            model(torch.randn(3, 4), True).sum().backward()
        assert volume["gather"].launches == 6, str(volume)  # of five units, and of the trained one once more


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("ends", ["by a backward", "by an optimizer"])
def test_a_followed_forward_ends(rank, world_size, ends):
    """Otherwise the next step's first read would get a full parameter from before the optimizer's step."""
    model = fully_shard(nn.Linear(4, 4))
    weight = next(p for p in model._fsdp_unit.parameters if p.name == "weight")

    def read() -> torch.Tensor:
        return RUNTIME.follower.full_by_block(weight, "training").clone()

    before = read()
    if ends == "by a backward":
        RUNTIME.prefetcher.forward_ended = True  # as the forward's hook says
        RUNTIME.prefetcher.close()  # as a backward's end does that gathers
        with torch.no_grad():
            model.weight.to_local().add_(1)
    else:  # the forward raised
        model.weight.grad = torch.full_like(model.weight, -1.0)
        other = fully_shard(nn.Linear(4, 4))
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert RUNTIME.follower.is_active  # another model's optimizer steps in the middle of the forward
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(read(), before + 1)
    RUNTIME.follower.end_forward()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).relu()
        torch._dynamo.graph_break()
        return x + self.b(y)


class Checkpoints(nn.Module):
    """Dynamo leaves out checkpoints around graph breaks; where `odd`, one layer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Breaks(), Breaks()])

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        return self.layers[1](x) if odd else checkpoint(self.layers[1], x, use_reentrant=False)


@distributed(world_size=2, reset=True)
def test_one_rank_runs_uncompiled_first_of_all(rank, world_size):
    """In torch's checkpoint Dynamo is off: that compiled code has called it is known by the root's forward."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=1)), "cpu")
    torch.manual_seed(7)
    model = Checkpoints()
    reference = copy.deepcopy(model)
    run, x = compiled(fully_shard(model, mesh=mesh)), torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(run(x, rank == 1), reference(x, rank == 1))
    run(x, rank == 0).square().sum().backward()
    reference(x, rank == 0).square().sum().backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        assert torch.equal(param.grad.full_tensor(), expected.grad / 2)
