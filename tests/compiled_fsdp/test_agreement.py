"""Ranks that do not fit together: an error on every rank that names the first difference, and no hang. Rows N11, E3, E5."""

import copy
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compiler.agreement import Agreement, RanksDiffer, agreement_of
from compiled_fsdp.passes.cost import PROFILES, Curve
from compiled_fsdp.sharding.process_groups import shard_group
from tests.harness import RankFailure, Ranks, compiled, distributed
from tests.harness.fake import fake_group
from tests.harness.spawn import TIMEOUT

SIGNATURE = ("options of ours", "training", "read a", "read b")


_groups = itertools.count()


# ---- the protocol, on threads ----------------------------------------------------------------------------------------
class Group:
    """Agreements of `size` ranks over one store, and a call on some of them at once."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.store = dist.HashStore()
        # rounds are counted by name, in a dictionary of the process that a rank usually has for itself; an id() may come again
        number = next(_groups)
        with mock.patch(
            "compiled_fsdp.compiler.agreement.store_of", return_value=(self.store, timedelta(seconds=timeout))
        ):
            self.ranks = [
                Agreement(
                    SimpleNamespace(
                        name=f"{number} {rank}", place=rank, ranks=range(size), size=size, process_group=None
                    )
                )
                for rank in range(size)
            ]

    def run(self, call: Callable[[int, Agreement], Any], *only: int) -> list[Any]:
        """What `call(rank, agreement)` returns or raises on each rank; None on those that do not take part."""
        outcomes: list[Any] = [None] * len(self.ranks)

        def body(rank: int) -> None:
            try:
                outcomes[rank] = call(rank, self.ranks[rank])
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in only or range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in threads), "hangs"
        return outcomes


def same_error(outcomes: list[Any]) -> str:
    """The message of the RanksDiffer that every rank has."""
    assert [type(outcome) for outcome in outcomes] == [RanksDiffer] * len(outcomes)
    (message,) = {str(outcome) for outcome in outcomes}
    return message


def test_the_first_rank_decides():
    group = Group(3)
    asked = []

    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(SIGNATURE, "forward", lambda: asked.append(rank) or f"plan of rank {rank}")

    assert group.run(call) == ["plan of rank 0"] * 3
    assert asked == [0]
    keys = group.store.num_keys()
    for rank in (2, 0, 1):  # a later variant: alone, whenever it likes
        assert group.run(call, rank)[rank] == "plan of rank 0"
    assert asked == [0]
    assert group.store.num_keys() == keys


def test_other_regions_and_phases_are_other_rounds():
    group = Group(2)
    for region, what in [("a", "forward"), ("a", "backward"), ("b", "forward")]:
        text = f"{region} {what}"
        assert group.run(lambda rank, mine, r=region, w=what, t=text: mine.agree((r,), w, lambda: t)) == [text] * 2


@pytest.mark.parametrize(
    ("theirs", "ours_says", "theirs_says"),
    [
        (("other options", *SIGNATURE[1:]), "options of ours", "other options"),
        ((*SIGNATURE[:2], "read c", "read b"), "read 0: read a", "read 0: read c"),
        (SIGNATURE[:3], "read 1: read b", "read 1: nothing more"),
        ((*SIGNATURE, "read d"), "read 2: nothing more", "read 2: read d"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_first_difference_is_named_everywhere(theirs, ours_says, theirs_says, odd):
    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(theirs if rank == odd else SIGNATURE, "forward", lambda: "plan")

    outcomes = Group(3).run(call)
    one, other = (theirs_says, ours_says) if odd == 2 else (ours_says, theirs_says)
    for outcome in outcomes:
        assert isinstance(outcome, RanksDiffer)
        assert f"of the group has: {one}; rank 0 has: {other}." in str(outcome)
        assert odd == 0 or "Rank 2 of the group" in str(outcome)


def test_other_layers_of_one_kind_are_a_difference_the_first_time():
    group = Group(2)

    def call(rank: int, mine: Agreement) -> str:
        return mine.agree(SIGNATURE, "forward", lambda: "plan", who=(f"layers.{rank}.weight",))

    message = same_error(group.run(call))
    assert "has: parameter 0: layers.1.weight; rank 0 has: parameter 0: layers.0.weight." in message
    group = Group(2)
    for layer in "01":  # later it is a region that is known
        call_one = lambda rank, mine, layer=layer: mine.agree(SIGNATURE, "forward", lambda: "plan", who=(layer,))  # noqa: E731
        assert group.run(call_one) == ["plan"] * 2


def test_another_phase_is_a_difference():
    message = same_error(
        Group(2).run(lambda rank, mine: mine.agree(SIGNATURE, ["forward", "backward"][rank], lambda: ""))
    )
    assert "Rank 1 of the group has: the plan of its backward; rank 0 has: the plan of its forward" in message


@pytest.mark.parametrize(
    ("missing", "match"), [(0, "rank 0 of the group posted no plan"), (2, "not all 3 ranks of the group came")]
)
@pytest.mark.parametrize(
    ("timeout", "patience"),
    [(3, None), pytest.param(60, 3, marks=pytest.mark.more), pytest.param(3, 60, marks=pytest.mark.more)],
)
def test_a_rank_that_never_comes(missing, match, timeout, patience):
    def call(rank: int, mine: Agreement) -> str:
        wait = None if patience is None else timedelta(seconds=patience)
        return mine.agree(SIGNATURE, "forward", lambda: "plan", patience=wait)

    here = [rank for rank in range(3) if rank != missing]
    outcomes = Group(3, timeout=timeout).run(call, *here)
    for rank in here:
        assert isinstance(outcomes[rank], RanksDiffer)
        assert "within 0:00:03" in str(outcomes[rank])
    assert match in str(outcomes[1])


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_rank_that_fails(failing, rounds):
    def call(rank: int, mine: Agreement) -> str:
        for i in range(rounds):
            mine.agree(SIGNATURE, f"round {i}", lambda: "")
        if rank == failing:
            mine.abandon(KeyError("who knows"))
            raise RanksDiffer(f"compiled_fsdp: rank {failing} of the group failed to compile: KeyError: 'who knows'")
        return mine.agree(SIGNATURE, "forward", lambda: "plan")

    assert "KeyError: 'who knows'" in same_error(Group(3).run(call))


def test_nothing_is_asked_of_a_store_in_a_group_of_one():
    assert Group(1).run(lambda rank, mine: mine.agree(SIGNATURE, "forward", lambda: "mine")) == ["mine"]
    group = Group(1)
    group.run(lambda rank, mine: (mine.agree(SIGNATURE, "forward", str), mine.abandon(KeyError())))
    assert group.store.num_keys() == 0


def test_an_agreement_lives_as_long_as_its_process_group():
    """Not as long as the models: when a model is collected differs between ranks, and what they know must not."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        first = agreement_of(shard_group(mesh))
        gc.collect()
        assert agreement_of(shard_group(mesh)) is first


# Each test compiles anew: code that raises what ranks differed in stays Dynamo's code for such models.
# ---- models on two ranks ---------------------------------------------------------------------------------------------
def two_layers(rows: int = 4, layers: int = 2, **options: Any) -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, rows) for _ in range(layers - 1))), **options)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    return fully_shard(model)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "model": (lambda: two_layers(rows=6), {}, r"float32\[6, 4\]", r"float32\[4, 4\]"),
    "layers": (lambda: two_layers(layers=3), {}, r"read 4: 2\.weight float32\[4, 4\]", "read 4: nothing more"),
    "reshard": (lambda: two_layers(reshard_after_forward=True), {}, "resharded", "kept"),
    "frozen": (frozen, {}, r"read 3: 1\.bias .*frozen", r"read 3: 1\.bias .*"),
    "budget": (two_layers, {"memory_budget": 10**9}, "option memory_budget=1000000000", "option memory_budget=None"),
    "options": (two_layers, {"bucket": "none"}, "bucket='none'", "bucket='auto'"),
    "inductor": (two_layers, {"inductor": {"max_autotune": True}}, "'max_autotune': True", r"inductor=\{\}"),
}  # fmt: skip


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_models_or_options(rank, world_size, what):
    """Nor does `suppress_errors` hide it."""
    make, options, odd, usual = DIFFERENT[what]
    run = compiled(make(), **options) if rank == 1 else compiled(two_layers())
    with (
        torch._dynamo.config.patch(suppress_errors=what in ("model", "options")),
        pytest.raises(RanksDiffer, match=f"Rank 1 of the group has: .*{odd}.*; rank 0 has: .*{usual}"),
    ):
        run(torch.ones(2, 4))


class Block(nn.Module):
    """A linear layer behind a graph break: equal ones share compiled code."""

    def __init__(self, inner: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.down(self.up(x))


def blocks(number: int = 4, **change: Any) -> nn.Module:
    """Blocks, each a unit; `change` is of the last one."""
    layers = [Block(change.get("inner", 4) if i == number - 1 else 4) for i in range(number)]
    layers[-1].down.weight.requires_grad_(not change.get("frozen", False))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=change.get("reshard") if layer is layers[-1] else None)
    return fully_shard(nn.Sequential(*layers))


IN_PARTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "fewer": (lambda: blocks(3), {}, r"no 3\.down\.bias", r"3\.down\.bias: float32\[4\]"),
    "more": (lambda: blocks(5), {}, r"4\.down\.bias: float32\[4\]", r"no 4\.down\.bias"),
    "size": (lambda: blocks(inner=6), {}, r"3\.down\.weight: float32\[4, 6\]", r"3\.down\.weight: float32\[4, 4\]"),
    "frozen": (lambda: blocks(frozen=True), {}, r"3\.down\.weight: .*frozen", r"3\.down\.weight: .*trained"),
    "reshard": (lambda: blocks(reshard=False), {}, "forward=False", "forward=None"),
    "budget": (blocks, {"memory_budget": 10**9}, "option memory_budget=1000000000", "option memory_budget=None"),
}  # fmt: skip


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.more)])
@pytest.mark.parametrize("what", IN_PARTS)
def test_ranks_with_different_models_in_parts(rank, world_size, what, odd):
    """Before any collective, and so before one waits for another."""
    make, options, theirs, usual = IN_PARTS[what]
    run = compiled(make(), **options) if rank == odd else compiled(blocks())
    one, zero = (theirs, usual) if odd == 1 else (usual, theirs)
    with pytest.raises(RanksDiffer, match=f"Rank 1 of the group has: .*{one}.*; rank 0 has: .*{zero}"):
        run(torch.ones(2, 4)).sum().backward()


@distributed(world_size=2, reset=True)
def test_a_failure_of_one_rank_alone_that_is_caught(rank, world_size):
    """Of a variant that one rank compiles alone the others know nothing."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    run = torch.compile(two_layers(mesh=mesh), backend="compiled_fsdp", dynamic=False, options={"codegen": "aot_eager"})
    run(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        failing = mock.patch("compiled_fsdp.compiler.backend.run_passes", side_effect=KeyError("no memory"))
        with failing, pytest.raises(Exception, match="no memory"):
            run(torch.ones(7, 4))
    for rows in (4, 3):  # the second one is a new region
        compiled(two_layers(rows=rows, mesh=mesh))(torch.ones(2, 4)).sum().backward()


def killed_while_compiling(rank: int, world_size: int, victim: int) -> None:
    def die(gm: Any, ctx: Any) -> Any:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return gm

    with (
        mock.patch("compiled_fsdp.compiler.backend.GRAPH_PASSES", (die,)),
        pytest.raises(RanksDiffer, match=f"rank {victim} of the group has ended .process"),
    ):
        compiled(two_layers())(torch.ones(2, 4))
    raise ValueError("this rank knows")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_compiles(victim):
    """The others know within seconds: those of the harness, which ends them after the first failure."""
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(killed_while_compiling, victim, grace=TIMEOUT)
    assert "this rank knows" in str(caught.value)


@distributed(world_size=2, reset=True)
def test_an_error_is_not_kept_for_equal_models(rank, world_size):
    """Dynamo would give the code that raises to the next model of the same shape, on the rank whose model was the usual one."""
    with pytest.raises(RanksDiffer):
        compiled(two_layers(rows=5 + rank))(torch.ones(2, 4))
    model = two_layers(rows=5)
    compiled(model)(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(world_size=2, reset=True)
def test_ranks_that_run_different_layers(rank, world_size):
    """Their collectives would fit each other, and give each rank half of the other's layer."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.layers[rank](x)

    with pytest.raises(RanksDiffer, match=r"layers\.1\.weight; rank 0 has: parameter 0: layers\.0\.weight"):
        compiled(fully_shard(Either()))(torch.ones(2, 4))


@distributed(world_size=2, reset=True)
def test_one_rank_evaluates_while_the_other_trains(rank, world_size):
    run = compiled(two_layers())
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(RanksDiffer, match=r"Rank 1 of the group has: .*inference; rank 0 has: "),
    ):
        run(torch.ones(2, 4))


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_fails_to_compile(rank, world_size, failing, phase):
    """E3: that rank shows what happened, the others say who it was."""

    def break_down(gm: Any, ctx: Any) -> Any:
        if rank == failing and ctx.phase == phase:
            raise KeyError("out of luck")
        return gm

    error, match = (
        (Exception, "out of luck") if rank == failing else (RanksDiffer, f"rank {failing} of the group failed")
    )
    run = compiled(two_layers())
    with (
        mock.patch("compiled_fsdp.compiler.backend.GRAPH_PASSES", (break_down,)),
        pytest.raises(error, match=match) as caught,
    ):
        run(torch.ones(2, 4)).sum().backward()
    assert "out of luck" in str(caught.value)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_compiles_is_noticed_within_the_groups_timeout(rank, world_size, missing):
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    run = compiled(two_layers(mesh=mesh))
    if rank != missing:
        known = rf"training, 4 reads, the first: 0\.weight float32.*Rank {missing} last did nothing here"
        with pytest.raises(RanksDiffer, match=f"{known}|Rank {missing} last came"):
            run(torch.ones(2, 4))
    dist.barrier()


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("knowing", [0, 1])
def test_the_first_ranks_plan_is_everyones(rank, world_size, knowing):
    """What ranks measured may differ, and so may what each would plan: buckets, their form, and all-to-alls."""
    group = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = two_layers(layers=4, mesh=group)
    fast = replace(PROFILES["cpu"], latency=1e-9, each=0.0, alltoall={2: Curve(1e-9, 1e12)})
    slow = replace(PROFILES["cpu"], reduce_moves=1.0)
    with mock.patch("compiled_fsdp.compiler.backend.hardware_of", return_value=fast if rank == knowing else slow):
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


@distributed(world_size=2, reset=True)
def test_later_variants_ask_nobody(rank, world_size):
    """N16. One rank compiles again, alone; then the other does; each in the middle of training."""
    model = two_layers()
    run = compiled(model)
    run(torch.ones(2, 4)).sum().backward()
    compiles = len(explain(model).graphs)
    with mock.patch.object(Agreement, "_decide", side_effect=AssertionError("asks the other ranks")):
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
        mock.patch("compiled_fsdp.compat.dynamo._over_limit", set()),  # of this process, whatever it has run before
        mock.patch("compiled_fsdp.compiler.recompile_limit.log.warning") as warns,
    ):
        for step in range(4):
            x = torch.randn(sizes(rank, step), 4)
            run(x).sum().backward()
            expected(x).sum().backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
    variants = sum(graph.phase == "forward" for graph in explain(model).graphs)
    assert variants == (1 if rank == 0 else 4)
    said = [call.args[0] % call.args[1:] for call in warns.call_args_list]
    assert len(said) == rank, "warned once, where the limit is reached"
    assert all("torch._dynamo.config.recompile_limit = 2" in text for text in said)


@distributed(world_size=2, reset=True)
def test_one_rank_comes_to_dynamos_last_limit(rank, world_size):
    """Every rank gets an error that names it, in every group that it agrees in: so there is one alone."""
    with mock.patch("compiled_fsdp.compiler.agreement._agreements", {}):
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
