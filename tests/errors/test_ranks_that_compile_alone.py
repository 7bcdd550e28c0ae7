"""One rank compiles what the others do not, or comes to one of Dynamo's limits: no failure, and no hang."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.cost import PROFILES, Curve
from compiled_fsdp.ranks.agreement import Agreement
from compiled_fsdp.ranks.failures import RanksDiffer
from tests.harness import compiled, distributed, variants
from tests.harness.ours import two_layers
from tests.harness.reference import assert_same_gradients


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("knowing", variants([0, 1], 1))
def test_the_first_ranks_plan_is_everyones(rank, world_size, knowing):
    """What ranks measured may differ, and so may what each would plan: buckets, their form, and all-to-alls."""
    group = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = two_layers(layers=4, mesh=group)
    fast = replace(PROFILES["cpu"], latency=1e-9, each=0.0, alltoall={(2, 1): Curve(1e-9, 1e12)})
    slow = replace(PROFILES["cpu"], reduce_moves=1.0)
    with mock.patch("compiled_fsdp.compiler.compilation.hardware_of", return_value=fast if rank == knowing else slow):
        compiled(model)(torch.full((2, 4), 1.0 + rank)).sum().backward()
    plans = [graph.plan for graph in explain(model).graphs]
    assert len(plans) == 2
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, plans)
    assert everyone[0] == everyone[1]
    transports = {bucket.transport for plan in plans for bucket in plan.launches if bucket.kind == "reduce"}
    assert transports == ({"all_to_all"} if knowing == 0 else {""})
    # the gradient of the last bias counts the rows of a batch, 2 on each rank
    assert torch.equal(model[-1].bias.grad.full_tensor(), torch.full((4,), 2.0))


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_later_variants_ask_nobody(rank, world_size):
    """One rank compiles again, alone; then the other does; each in the middle of training."""
    model = two_layers()
    run = compiled(model)
    run(torch.ones(2, 4)).sum().backward()
    compiles = len(explain(model).graphs)
    with mock.patch.object(Agreement, "_round", side_effect=AssertionError("asks the other ranks")):
        for rows, who in [((2, 3), [1]), ((4, 3), [0, 1]), ((2, 2), [0, 1]), ((1, 5), [0, 1])]:
            run(torch.ones(rows[rank], 4)).sum().backward()
            assert (len(explain(model).graphs) > compiles) == (rank in who), rows


class Norm(nn.Module):
    """A layer norm with an epsilon that the user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.linear(x), (4,), eps=self.eps)


@pytest.mark.more
@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("alone", [0, 1])
def test_a_restart_of_dynamos_analysis_on_one_rank_is_no_failure(rank, world_size, alone):
    """A float that changes becomes symbolic, and what needs its value makes Dynamo start again."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    model = fully_shard(Norm(), mesh=mesh)
    run = compiled(model)
    run(torch.ones(2, 4)).sum().backward()
    if rank == alone:
        model.eps = 1e-3
    run(torch.ones(2, 4)).sum().backward()
    assert len(explain(model).graphs) > 2 or rank != alone
    new = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), mesh=mesh)
    compiled(new)(torch.ones(2, 4)).sum().backward()


def sizes(rank: int, step: int) -> int:
    """Rows of a batch: the same on rank 0, another one each step on rank 1."""
    return 2 if rank == 0 else 2 + step


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.more)])
def test_one_rank_comes_to_dynamos_limit(rank, world_size, fullgraph):
    """Uncompiled it would wait for other collectives than the other rank, which has one variant."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = fsdp2(copy.deepcopy(model))
    fully_shard(model, mesh=mesh)
    run = torch.compile(
        model, backend="compiled_fsdp", dynamic=False, fullgraph=fullgraph, options={"codegen": "aot_eager"}
    )
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        mock.patch(
            "compiled_fsdp.compiler.recompile_limit._over_limit", set()
        ),  # of this process, whatever it has run before
        mock.patch("compiled_fsdp.compiler.recompile_limit.log.warning") as warns,
    ):
        for step in range(4):
            x = torch.randn(sizes(rank, step), 4)
            run(x).sum().backward()
            expected(x).sum().backward()
    assert_same_gradients(model, expected)
    variants = sum(graph.phase == "forward" for graph in explain(model).graphs)
    assert variants == (1 if rank == 0 else 4)
    said = [call.args[0] % call.args[1:] for call in warns.call_args_list]
    assert len(said) == rank, "warned once, where the limit is reached"
    assert all("torch._dynamo.config.recompile_limit = 2" in text and "make sizes symbolic" in text for text in said)


@distributed(world_size=2, reset=True)
def test_one_rank_is_told_to_run_uncompiled_instead_of_compiling_again(rank, world_size):
    """Of "eager_on_recompile" the other rank, which has code for its sizes, would know nothing."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = fsdp2(copy.deepcopy(model))
    run = compiled(fully_shard(model, mesh=mesh))
    run(torch.ones(2, 4)).sum().backward()
    expected(torch.ones(2, 4)).sum().backward()
    compiles = len(explain(model).graphs)
    with (
        torch.compiler.set_stance("eager_on_recompile"),
        mock.patch("compiled_fsdp.compiler.recompile_limit._told_of_stance", set()),
        mock.patch("compiled_fsdp.compiler.recompile_limit.log.warning") as warns,
    ):
        for step in range(3):
            x = torch.randn(sizes(rank, step), 4)
            run(x).sum().backward()
            expected(x).sum().backward()
        plain = torch.compile(nn.functional.gelu, backend=mock.Mock(side_effect=AssertionError("compiles")))
        plain(x)  # what others compile stays as it was asked for
    assert_same_gradients(model, expected)
    assert (len(explain(model).graphs) > compiles) == (rank == 1)
    said = [call.args[0] % call.args[1:] for call in warns.call_args_list]
    assert len(said) == rank, "warned once"
    assert all('torch.compiler.set_stance("eager_on_recompile")' in text for text in said)


class Says(nn.Module):
    """Two layers, and perhaps a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.says = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.says:
            torch._dynamo.graph_break()
        return self.second(x)


class Tries(Says):
    """Dynamo cannot go on behind the break, and compiles nothing of the frame."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        finally:
            self.called = True


class Around(nn.Module):
    """Layers around it; perhaps it is checkpointed."""

    def __init__(self, inner: nn.Module, checkpoints: bool = False) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        return self.after(x)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("kind", variants(["call", "try", "checkpoint"], "checkpoint"))
def test_a_break_in_some_steps(rank, world_size, kind):
    """Where it is not in this step, no rank takes the code with the break: another may have other code for its rows."""
    model = Around(Tries() if kind == "try" else Says(), kind == "checkpoint")
    expected = fsdp2(copy.deepcopy(model))
    fully_shard(model.inner)
    fully_shard(model)
    run = compiled(model, bucket=[["*"]])  # in another graph a unit is gathered by itself
    for says, rows in [(False, (2, 3)), (True, (2, 4)), (True, (2, 4)), (False, (2, 5)), (False, (6, 3))]:
        model.inner.says = says
        x = torch.randn(rows[rank], 4)
        run(x).sum().backward()
        expected(x).sum().backward()
    assert_same_gradients(model, expected)


class Counts(nn.Module):
    """How often it was called: an int, which Dynamo guards on."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) / self.calls


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("made_symbolic", variants([False, True], True))
def test_a_count_of_calls_comes_to_dynamos_limit(rank, world_size, made_symbolic):
    """The warning says how it need not."""
    model = nn.Sequential(Counts(), Counts())
    expected = fsdp2(copy.deepcopy(model))
    run = compiled(fully_shard(model))
    with (
        torch._dynamo.config.patch(recompile_limit=2, allow_unspec_int_on_nn_module=made_symbolic),
        mock.patch("compiled_fsdp.compiler.recompile_limit._over_limit", set()),
        mock.patch("compiled_fsdp.compiler.recompile_limit.log.warning") as warns,
    ):
        for step in range(4):
            run(torch.ones(2, 4) * (1 + step)).sum().backward()
            expected(torch.ones(2, 4) * (1 + step)).sum().backward()
    assert_same_gradients(model, expected)
    said = [call.args[0] % call.args[1:] for call in warns.call_args_list]
    assert len(said) == (not made_symbolic)
    assert all("calls == " in text and "allow_unspec_int_on_nn_module" in text for text in said)
    assert not any("sizes symbolic" in text for text in said)


@distributed(world_size=2, reset=True)
def test_one_rank_comes_to_dynamos_last_limit(rank, world_size):
    """Every rank gets an error that names it, in every group that it agrees in: so there is one alone."""
    with mock.patch("compiled_fsdp.ranks.liveness._signed_in", {}):
        come_to_the_last_limit(rank)


def come_to_the_last_limit(rank: int) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    model = two_layers(mesh=mesh)
    run = torch.compile(model, backend="compiled_fsdp", dynamic=False, options={"codegen": "aot_eager"})
    run(torch.randn(2, 4)).sum().backward()
    limits = {"recompile_limit": 1, "accumulated_recompile_limit": 2}
    with torch._dynamo.config.patch(limits):
        run(torch.randn(sizes(rank, 1), 4)).sum().backward()
        if rank == 1:
            with pytest.raises(Exception, match=r"torch\._dynamo\.config\.accumulated_recompile_limit = 2"):
                run(torch.randn(7, 4))
        else:
            new = compiled(two_layers(rows=3, mesh=mesh))
            with pytest.raises(RanksDiffer, match=r"rank 1 .*accumulated_recompile_limit"):
                new(torch.randn(2, 4))
