"""The verifier finds what a broken pass would do to a lowered graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.buckets.transport import ALL_GATHER, WAIT
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.graph import calls
from compiled_fsdp.passes.pipeline import run_passes, through
from compiled_fsdp.passes.verify import GraphIsWrong, verify
from tests.passes.graphs import (
    ALL_REDUCE,
    GROUP,
    Param,
    backward_of_layers,
    context,
    gathers,
    launch_sum,
    reductions,
    trace,
    wait,
)

aten = torch.ops.aten


def lowered(**options: Any) -> tuple[GraphModule, PassContext]:
    gm, params, _ = backward_of_layers(layers=2)
    ctx = context(params, **options)
    return run_passes(through("lower"), gm, ctx), ctx


def node(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def extra_collective(gm: GraphModule) -> None:
    graph: Graph = gm.graph
    with graph.inserting_before(gathers(gm)[1]):
        launch = graph.call_function(ALL_GATHER, (node(gm, "x0"), 2, GROUP))
        graph.call_function(WAIT, (launch,))
    launch.meta["of_bucket"] = True


def missing_collective(gm: GraphModule) -> None:
    launch = reductions(gm)[-1]
    (wait,) = launch.users
    wait.replace_all_uses_with(calls(gm, WAIT)[-2])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(launch)


def gather_after_reduction(gm: GraphModule) -> None:
    """The second layer's gather goes out behind the first reduction."""
    launch = gathers(gm)[1]
    reductions(gm)[0].append(launch)


def two_gathers_change_places(gm: GraphModule) -> None:
    first, second = gathers(gm)

    def move(node: Node) -> None:
        for source in node.all_input_nodes:
            if source.op != "placeholder":
                move(source)
        first.prepend(node)

    move(second)


def no_wait(gm: GraphModule) -> None:
    wait = calls(gm, WAIT)[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def two_waits(gm: GraphModule) -> None:
    launch = gathers(gm)[0]
    with gm.graph.inserting_after(launch):
        gm.graph.call_function(WAIT, (launch,))


def never_waited_for(gm: GraphModule) -> None:
    launch = gathers(gm)[0]
    with gm.graph.inserting_after(launch):
        gm.graph.call_function(ALL_GATHER, (launch.args[0], 2, GROUP)).meta["of_bucket"] = True


def used_before_its_wait(gm: GraphModule) -> None:
    launch = gathers(gm)[0]
    with gm.graph.inserting_after(launch):
        gm.graph.call_function(aten.sum.default, (launch,))


@pytest.mark.parametrize(
    "damage",
    [
        extra_collective,
        missing_collective,
        gather_after_reduction,
        two_gathers_change_places,
        no_wait,
        two_waits,
        never_waited_for,
        used_before_its_wait,
    ],
)
def test_what_is_found(damage):
    gm, ctx = lowered()
    verify(gm, ctx)
    damage(gm)
    with pytest.raises(GraphIsWrong):
        verify(gm, ctx)


WRITES: dict[str, Callable[[Graph, Node, Node], Any]] = {
    "in place": lambda graph, shard, grad: graph.call_function(aten.add_.Tensor, (shard, grad)),
    "copy": lambda graph, shard, grad: graph.call_function(aten.copy_.default, (shard, grad)),
    "out": lambda graph, shard, grad: graph.call_function(aten.add.out, (grad, grad), {"out": shard}),
    "keyword": lambda graph, shard, grad: graph.call_function(aten.add_.Tensor, (), {"self": shard, "other": grad}),
    "foreach": lambda graph, shard, grad: graph.call_function(aten._foreach_add_.List, ([shard], [grad])),
    "through a view": lambda graph, shard, grad: graph.call_function(
        aten.add_.Tensor, (graph.call_function(aten.view.default, (shard, [-1])), 1)
    ),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("before", [True, False])
def test_a_parameter_is_not_written_before_it_is_gathered(how, before):
    """An optimizer step in the graph, perhaps; after the gather it is fine."""
    gm, ctx = lowered()
    shard, launch = node(gm, "shard0"), gathers(gm)[1]
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first if before else launch.next):
        WRITES[how](gm.graph, shard, node(gm, "x1"))
    if before:
        with pytest.raises(GraphIsWrong, match="writes shard0 before"):
            verify(gm, ctx)
    else:
        verify(gm, ctx)


def with_a_sum() -> tuple[GraphModule, PassContext]:
    """Lowered: two layers, between which the model sums over a group of its own."""
    params = [Param((4, 4), 0), Param((4, 4), 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        first, second = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        return [wait(launch_sum(x @ first)).cos() @ second]

    ctx = context(params, "forward")
    return run_passes(through("lower"), trace(function, params, torch.ones(2, 4)), ctx), ctx


def test_collectives_of_the_models_own_stay_where_they_were():
    gm, ctx = with_a_sum()
    verify(gm, ctx)
    with pytest.raises(GraphIsWrong, match="the model's own collectives"):
        verify(*with_another_sum())
    (launch,) = calls(gm, ALL_REDUCE)
    last = gathers(gm)[1]
    launch.prepend(last)  # planned ahead of the sum
    verify(gm, ctx)
    next(iter(launch.users)).append(last)
    with pytest.raises(GraphIsWrong, match=r"'all_reduce', 1.*planned were .*'all_reduce', 2"):
        verify(gm, ctx)


def with_another_sum() -> tuple[GraphModule, PassContext]:
    gm, ctx = with_a_sum()
    (launch,) = calls(gm, ALL_REDUCE)
    with gm.graph.inserting_before(launch):
        gm.graph.call_function(WAIT, (gm.graph.call_function(ALL_REDUCE, launch.args),))
    return gm, ctx


def test_full_checks_after_every_pass_and_names_it():
    gm, params, _ = backward_of_layers(layers=2)

    def clumsy(gm: GraphModule, ctx: PassContext) -> GraphModule:
        no_wait(gm)
        return gm

    with pytest.raises(GraphIsWrong, match="after clumsy"):
        run_passes((*through("lower"), clumsy), gm, context(params, verify_level="full"))


def test_off_checks_nothing():
    gm, ctx = lowered(verify_level="off")
    extra_collective(gm)
    verify(gm, ctx)
    assert ctx.summary["verify"] == "off"
