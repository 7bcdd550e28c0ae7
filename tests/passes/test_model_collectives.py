"""Collectives that the model has of its own, as the planner sees them: places, prices, links."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compiler.hardware import place_of_group
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.context import GroupPlace
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.plan.convert import plan_of
from compiled_fsdp.passes.plan.search import search
from compiled_fsdp.passes.plan.simulate import simulate
from compiled_fsdp.passes.plan.tasks import Tasks
from tests.harness import Transformer, compiled, loss_of, shard
from tests.harness.fake import fake_group
from tests.passes.graphs import Param, context, launch_sum, trace, wait
from tests.sharding.test_tensor_parallel import parallel

c10d = torch.ops._c10d_functional
PARAMS = [Param((64, 64), 0), Param((64, 64), 1)]


def tasks_of(between: Callable[[Tensor], Tensor], **options: Any) -> Tasks:
    """Two layers, with what ``between`` makes of the first one's result in between."""

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        first, second = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(PARAMS))
        return [between(x @ first) @ second]

    ctx = context(PARAMS, "forward", **options)
    return extract(arrange(trace(function, PARAMS, torch.ones(64, 64)), ctx), ctx)[0]


def places(tasks: Tasks) -> list[tuple[str, int, int]]:
    return [(of.kind, of.at, of.wait) for of in tasks.model_collectives]


# ---- places ----------------------------------------------------------------------------------------------------------
def test_launch_and_wait_begin_segments():
    """At once: one segment; with compute in between: two."""
    tasks = tasks_of(lambda x: wait(launch_sum(x)).cos())
    assert places(tasks) == [("all_reduce", 1, 1)]
    milestones = [("start", "use 0"), ("all_reduce 0", "wait 0"), ("use 1",), ("end",)]
    assert [segment.milestones for segment in tasks.segments] == milestones

    def later(x: Tensor) -> Tensor:
        flying = launch_sum(x)
        return x.cos() + wait(flying)

    tasks = tasks_of(later)
    assert places(tasks) == [("all_reduce", 1, 2)]
    assert tasks.segments[2].milestones == ("wait 0",)


def test_several_at_once_and_one_after_the_other():
    def at_once(x: Tensor) -> Tensor:
        first, second = launch_sum(x), launch_sum(x)
        return wait(first) + wait(second)

    assert places(tasks_of(at_once)) == [("all_reduce", 1, 1), ("all_reduce", 1, 1)]
    chained = tasks_of(lambda x: wait(launch_sum(wait(launch_sum(x)))))
    assert places(chained) == [("all_reduce", 1, 1), ("all_reduce", 2, 2)]


def test_a_grouped_one_is_waited_for_once():
    def grouped(x: Tensor) -> Tensor:
        first, second = map(wait, c10d.all_gather_into_tensor_coalesced([x, x[:32]], 2, "another group"))
        return first[:64] + second

    tasks = tasks_of(grouped)
    assert places(tasks) == [("all_gather_into_tensor", 1, 1)]
    (found,) = tasks.model_collectives
    assert (found.tensors, found.bytes) == (2, 2 * (64 + 32) * 64 * 4)


def test_what_one_reads_is_there_until_its_wait():
    """Memory: 16 kB that nothing else needs, beside compute that needs much."""

    def later(keep: bool) -> Callable[[Tensor], Tensor]:
        def between(x: Tensor) -> Tensor:
            sent = x.cos()
            flying = launch_sum(sent)
            large = x.repeat(8, 1).sin().view(8, 64, 64).sum(0)
            return large + wait(flying) + (sent if keep else 0)

        return between

    assert max(s.bytes for s in tasks_of(later(False)).segments) == max(s.bytes for s in tasks_of(later(True)).segments)


# ---- prices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("launch", "kinds", "size"),
    [
        (lambda x: c10d.all_reduce(x, "sum", "g"), ("reduce", "gather"), 1),
        (lambda x: c10d.all_gather_into_tensor(x, 2, "g")[:64], ("gather",), 2),
        (lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, "g").repeat(2, 1), ("reduce",), 1),
        (lambda x: c10d.all_to_all_single(x, [32, 32], [32, 32], "g"), ("alltoall",), 1),
        (lambda x: c10d.broadcast(x, 0, "g"), ("gather",), 1),
    ],
)
def test_each_kind_costs_what_the_hardware_says(launch, kinds, size):
    hardware = PROFILES["h100"]
    tasks = tasks_of(lambda x: wait(launch(x)), hardware=hardware, place_of_group=lambda name: GroupPlace(name, 2, 1))
    curves = [hardware.curve(kind, 2, 1) for kind in kinds]
    expected = sum(curve.seconds(size * 64 * 64 * 4) for curve in curves)
    assert tasks.model_seconds == pytest.approx((expected,))


def test_an_all_reduce_moves_as_much_as_a_reduce_scatter_that_is_one():
    """Gloo's."""
    hardware = replace(PROFILES["cpu"], reduce_moves=2.0)
    tasks = tasks_of(lambda x: wait(launch_sum(x)), hardware=hardware)
    curve = hardware.curve("all_reduce", 2)
    assert curve.bytes_per_second == hardware.curve("reduce", 2).bytes_per_second
    assert tasks.model_seconds == pytest.approx((curve.latency + 64 * 64 * 4 / curve.bytes_per_second,))


def test_the_host_launches_them_too():
    hardware = replace(PROFILES["h100"], host_collective=1.0)
    without = tasks_of(torch.cos, hardware=hardware)
    assert tasks_of(lambda x: wait(launch_sum(x)).cos(), hardware=hardware).host_seconds - without.host_seconds == 1.0


# ---- links -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("world", "nodes", "link"),
    [
        (8, 1, "inside"),
        (8, 8, "between"),
        (16, 2, "between"),
        (2, 2, "between"),
        (1, 1, "inside"),
        (16, None, "between"),
    ],
)
def test_the_link_of_a_group(world, nodes, link):
    assert PROFILES["h100"].link(world, nodes) == link


def placed(shared: bool) -> Callable[[Any], GroupPlace]:
    return lambda name: GroupPlace(name, 2, 1 if shared else 2)


@pytest.mark.parametrize("shared", [True, False])
def test_what_shares_a_link_shares_a_queue(shared):
    """The gathers' link is inside of a node."""
    tasks = tasks_of(lambda x: wait(launch_sum(x)), hardware=PROFILES["h100"], place_of_group=placed(shared))
    (found,) = tasks.model_collectives
    assert (tasks.channels[tasks.gathers[0].channel].stream in found.streams) == tasks.shares_links == shared


def test_our_own_group_is_one_queue():
    """A collective of the model's own over the ranks that shard its parameters, wherever they are."""
    place = GroupPlace("a group", 2, 2)  # said to be elsewhere
    tasks = tasks_of(lambda x: wait(launch_sum(x)), place_of_group=lambda name: place, hardware=PROFILES["h100"])
    assert tasks.shares_links


@mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"})
def test_places_of_groups_by_name():
    with fake_group(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        found = [place_of_group(mesh[name].get_group().group_name, PROFILES["h100"]) for name in ("dp", "tp")]
        again = place_of_group(mesh["tp"].get_group(), PROFILES["h100"])
    assert [(place.world, place.nodes) for place in found] == [(4, 4), (2, 1)]
    assert again == found[1]


# ---- a model with tensor parallelism ---------------------------------------------------------------------------------
QUICK_HOST = replace(PROFILES["h100"], host_kernel=0.0, host_collective=0.0)


@functools.cache
def tensor_parallel(ranks_per_node: int) -> Any:
    """Forward and backward of 2 x 4 ranks as planned: tensor parallelism inside of nodes of 2, or all inside of one."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks_per_node)}), fake_group(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(mesh, build=lambda: Transformer(blocks=2, dim=128))
        model = shard(model, fully_shard, mesh=mesh["dp"])
        loss_of(compiled(model, fullgraph=True, hardware=QUICK_HOST, verify="full"), 0, 0).backward()
        return explain(model)


@pytest.mark.more
def test_the_plan_of_a_tensor_parallel_forward():
    forward, backward = tensor_parallel(2).graphs
    assert [of.kind for of in forward.tasks.model_collectives] == ["all_reduce"] * 4
    assert [of.kind for of in backward.tasks.model_collectives] == ["all_reduce"] * 8
    assert not forward.tasks.shares_links
    assert_expected_inline(
        str(forward.plan),
        """\
forward:
  0: gather [0, 1, 2, 3, 4, 5] 107,520 bytes, mesh 0, coalesced, at start
  1: gather [6, 7] 65,536 bytes, mesh 0, coalesced, at start
  2: gather [8, 9, 10, 11, 12, 13, 14, 15, 16] 362,496 bytes, mesh 0, coalesced, at use 1
  3: gather [17, 18, 19, 20, 21, 22, 23, 24] 329,728 bytes, mesh 0, coalesced, at use 11""",
    )
    assert forward.model_collectives == (
        "the model's own collectives: 4 all_reduce of 0.131 MB over other links than ours, 0.059 ms, 0.059 exposed, "
        "of which 0.000 queued"
    )


@pytest.mark.more
def test_a_gather_hides_where_the_model_waits_on_another_link():
    """The same graph, planned as if tensor parallelism took no time and simulated with it, is not quicker."""
    for ranks_per_node in (2, 8):
        explanation = tensor_parallel(ranks_per_node)
        for graph in explanation.graphs:
            assert "the model's own collectives: " in graph.model_collectives
            assert "with a rate 30% lower or higher, ms: compute" in str(graph.sensitivity)
        for graph in explanation.graphs:
            tasks = graph.tasks
            assert tasks.shares_links == (ranks_per_node == 8)
            unaware = search(replace(tasks, model_collectives=())).schedule
            assert graph.simulation.seconds <= simulate(tasks, unaware).seconds * 1.003
            assert plan_of(tasks, search(tasks).schedule) == graph.plan
