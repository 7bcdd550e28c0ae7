"""The order of launches and waits. Rows C9, V4."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from compiled_fsdp.passes.graph import argument, calls, spec_of, waits_of
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from tests.passes.graphs import Machine, Param, backward_of_layers, context, inputs_of, launched, planned, text, trace


def launches(gm: torch.fx.GraphModule) -> list[str]:
    """Launches in order: U and P for gather and reduction, with the layer."""
    specs = map(spec_of, launched(gm))
    return [f"{'PU'[spec.kind.supplies]}{spec.reads[0] // 2}" for spec in specs]


def places(gm: torch.fx.GraphModule) -> dict[str, int]:
    return {node.name: i for i, node in enumerate(gm.graph.nodes)}


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "U2 U1 P2 U0 P1 P0 P3"),
        ({"prefetch": "after"}, "U2 P2 U1 P1 U0 P0 P3"),
        ({"overlap": False}, "U2 P2 U1 P1 U0 P0 P3"),
    ],
)
def test_order_of_a_backward(options, order):
    """C9: the next gather goes out before the reduction of the layer that runs; the last is the root's (P3)."""
    gm, params, _ = backward_of_layers(layers=3)
    ctx = context(params, **options)
    gm = planned(gm, ctx)
    assert " ".join(launches(gm)) == order
    assert ctx.planned.plan.phase == "backward"
    assert [f"{'UP'[b.kind == 'reduce']}{b.reads[0] // 2}" for b in ctx.planned.plan.launches] == order.split()


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, (2, 2)), ({"prefetch": "after"}, (1, 2)), ({"overlap": False}, (1, 1))],
)
def test_how_much_is_in_flight(options, most):
    """V4: less with "after"."""
    gm, params, others = backward_of_layers(layers=4)
    machine = Machine()
    machine.run(run_passes(GRAPH_PASSES, gm, context(params, **options)), inputs_of(params, *others))
    assert (machine.most["gather"], machine.most["reduce"]) == most


def test_compute_runs_between_a_launch_and_its_wait():
    """And without overlap there is none."""
    for overlap in (True, False):
        gm, params, _ = backward_of_layers(layers=3)
        gm = planned(gm, context(params, overlap=overlap))
        place = places(gm)
        compute = [place[n.name] for n in calls(gm, torch.ops.aten.mm.default)]
        between = [
            sum(place[launch.name] < at < place[wait.name] for at in compute)
            for launch in launched(gm)
            for wait in waits_of(launch)
        ]
        if overlap:  # but for the first gather and the last reduction
            assert [count > 0 for count in between] == [False, *[True] * 5, False]
        else:
            assert between == [0] * 7


def test_a_backward_of_two_layers():
    gm, params, _ = backward_of_layers(layers=2)
    assert_expected_inline(
        text(planned(gm, context(params))),
        """\
launch = launch([shard2, shard3], all_gather)
launch_1 = launch([shard0, shard1], all_gather)
getitem = getitem(launch)
wait = wait_tensor(getitem)
unpack_gather = unpack_gather(wait)
unpack_gather_1 = unpack_gather(wait)
t = t(unpack_gather)
mm = mm(x2, t)
add = add(mm, unpack_gather_1)
cos = cos(add)
mul = mul(x0, cos)
t_1 = t(mul)
mm_1 = mm(t_1, x2)
sum_1 = sum(mul)
launch_2 = launch([mm_1, sum_1], reduce_scatter)
mm_2 = mm(mul, unpack_gather)
getitem_1 = getitem(launch_1)
wait_1 = wait_tensor(getitem_1)
unpack_gather_2 = unpack_gather(wait_1)
unpack_gather_3 = unpack_gather(wait_1)
t_2 = t(unpack_gather_2)
mm_3 = mm(x1, t_2)
add_1 = add(mm_3, unpack_gather_3)
cos_1 = cos(add_1)
mul_1 = mul(mm_2, cos_1)
t_3 = t(mul_1)
mm_4 = mm(t_3, x1)
sum_2 = sum(mul_1)
getitem_2 = getitem(launch_2)
launch_3 = launch([mm_4, sum_2], reduce_scatter)
mm_5 = mm(mul_1, unpack_gather_2)
new_zeros = new_zeros(mm_5)
arange = arange()
remainder = remainder(arange)
index_add = index_add(new_zeros, remainder, mm_5)
wait_2 = wait_tensor(getitem_2)
unpack_reduce = unpack_reduce(wait_2)
unpack_reduce_1 = unpack_reduce(wait_2)
getitem_3 = getitem(launch_3)
wait_3 = wait_tensor(getitem_3)
unpack_reduce_2 = unpack_reduce(wait_3)
unpack_reduce_3 = unpack_reduce(wait_3)
launch_4 = launch([index_add], reduce_scatter)
getitem_4 = getitem(launch_4)
wait_4 = wait_tensor(getitem_4)
unpack_reduce_4 = unpack_reduce(wait_4)
return [unpack_reduce, unpack_reduce_1, unpack_reduce_2, unpack_reduce_3, unpack_reduce_4]""",
    )


def test_what_is_computed_from_parameters_alone_waits_for_its_first_use():
    """The transpose of the second parameter stands first, as autocast's casts do: it must not pull the wait forward."""
    params = [Param((4, 4), 0), Param((4, 4), 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        first, second = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        transposed = second.t().contiguous()
        return [((x @ first).cos()) @ transposed]

    assert_expected_inline(
        text(planned(trace(function, params, torch.ones(2, 4)), context(params, "forward"))),
        """\
launch = launch([shard0], all_gather)
launch_1 = launch([shard1], all_gather)
getitem = getitem(launch)
wait = wait_tensor(getitem)
unpack_gather = unpack_gather(wait)
mm = mm(x0, unpack_gather)
cos = cos(mm)
getitem_1 = getitem(launch_1)
wait_1 = wait_tensor(getitem_1)
unpack_gather_1 = unpack_gather(wait_1)
t = t(unpack_gather_1)
clone = clone(t)
mm_1 = mm(cos, clone)
return [mm_1]""",
    )


def test_random_numbers_are_not_moved():
    """Drawing in another order would give other numbers."""
    params = [Param((4, 4), 0), Param((4, 4), 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        noisy = [p.unshard(shards[i], slots[i], i) for i, p in enumerate(params)]
        noisy = [full * torch.rand_like(full) for full in reversed(noisy)]
        return [x @ noisy[1] @ noisy[0]]

    gm = planned(trace(function, params, torch.ones(2, 4)), context(params, "forward"))
    drawn = calls(gm, torch.ops.aten.rand_like.default)
    sources = [argument(node.args[0], "bucket").args[0].args[0].args[0] for node in drawn]
    assert [[shard.name for shard in shards] for shards in sources] == [["shard1"], ["shard0"]]


def test_a_gather_that_nothing_uses_is_still_launched_and_waited_for():
    """Another rank may use it: the plan belongs to all."""
    params = [Param((4, 4), 0), Param((4, 4), 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        used, unused = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        return [x @ used, unused]

    gm = trace(function, params, torch.ones(2, 4))
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    output.args = (output.args[0][:1],)
    machine = Machine()
    machine.run(run_passes(GRAPH_PASSES, gm, context(params, "forward")), inputs_of(params, torch.ones(2, 4)))
    assert machine.launches == ["gather", "gather"]


@pytest.mark.parametrize("overlap", [True, False])
def test_gathers_that_only_the_output_needs_are_not_all_in_flight_at_once(overlap):
    params = [Param((4, 4), i) for i in range(4)]

    def function(shards: Any, slots: Any) -> list[torch.Tensor]:
        return [p.unshard(shards[i], slots[i], i).t().contiguous() for i, p in enumerate(params)]

    machine = Machine()
    machine.run(
        run_passes(GRAPH_PASSES, trace(function, params), context(params, "forward", overlap=overlap)),
        inputs_of(params),
    )
    assert machine.most["gather"] <= (2 if overlap else 1)


# ---- the order that ranks agreed on ----------------------------------------------------------------------------------
def test_any_order_is_followed_or_refused():
    """Another rank's order (every third of the 120 there are): the same result, or PlanDoesNotFit."""
    gm, params, others = backward_of_layers(layers=2)
    expected = Machine().run(gm, inputs_of(params, *others))
    plans: list[GraphPlan] = []
    planned(
        backward_of_layers(layers=2)[0], context(params, agree=lambda _, propose: plans.append(propose()) or plans[-1])
    )
    followed = 0
    for order in itertools.islice(itertools.permutations(plans[0].launches), 0, None, 3):
        agreed = GraphPlan("backward", order)
        gm = backward_of_layers(layers=2)[0]
        ctx = context(params, agree=lambda _, propose, agreed=agreed: agreed)
        try:
            gm = planned(gm, ctx)
        except PlanDoesNotFit:
            # a reduction would have to start before the gather that its gradient needs
            assert not feasible(agreed)
            continue
        assert feasible(agreed)
        followed += 1
        assert ctx.planned.plan == agreed
        assert launches(gm) == [f"{'UP'[b.kind == 'reduce']}{b.reads[0] // 2}" for b in order]
        machine = Machine()
        actual = machine.run(run_passes(GRAPH_PASSES[len(through("schedule")) :], gm, ctx), inputs_of(params, *others))
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(actual, expected, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
    assert followed > 1


def feasible(plan: GraphPlan) -> bool:
    """P1 needs U1; P0 needs U1 and U0; P2 (the root's, the embedding's) needs both."""
    at = {f"{'UP'[b.kind == 'reduce']}{b.reads[0] // 2}": i for i, b in enumerate(plan.launches)}
    return at["U1"] < at["P1"] and max(at["U0"], at["U1"]) < min(at["P0"], at["P2"])


def test_compute_is_not_pulled_forward_by_an_agreed_order():
    """An order in which the gathers come first and last holds more in flight, but compute stays as it was."""
    gm, params, _ = backward_of_layers(layers=3)
    compute = [n.name for n in gm.graph.nodes if "reduce" not in n.name and "unshard" not in n.name]

    def agree(_: Any, propose: Callable[[], GraphPlan]) -> GraphPlan:
        plan = propose()
        return GraphPlan("backward", tuple(sorted(plan.launches, key=lambda b: b.kind)))

    gm = planned(gm, context(params, agree=agree))
    assert launches(gm)[:3] == ["U2", "U1", "U0"]
    assert [n.name for n in gm.graph.nodes if n.name in compute] == compute


@pytest.mark.parametrize("change", ["missing", "extra", "other bytes"])
def test_a_plan_with_other_collectives_does_not_fit(change):
    gm, params, _ = backward_of_layers(layers=2)

    def agree(_: Any, propose: Callable[[], GraphPlan]) -> GraphPlan:
        plan = propose()
        first, *rest = plan.launches
        other = replace(first, reads=(6,)) if change == "extra" else replace(first, bytes=first.bytes + 1)
        return GraphPlan(
            "backward", {"missing": (*rest,), "extra": (first, *rest, other), "other bytes": (other, *rest)}[change]
        )

    names = {
        "missing": "only here: .*gather",
        "extra": "only in the plan: .*gather",
        "other bytes": "bytes here .*, in the plan",
    }
    with pytest.raises(PlanDoesNotFit, match=f"backward graph of this rank does not have.*{names[change]}"):
        planned(gm, context(params, agree=agree))
