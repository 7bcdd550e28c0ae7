"""What crosses a graph's edges: fragments of a broken forward, and gradients published in the graph."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.graph import argument, calls, ops, spec_of, waits_of
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.plan import choose
from compiled_fsdp.passes.plan.search import Found, search
from compiled_fsdp.passes.verify import GraphIsWrong, check_graph
from tests.passes.graphs import Param, backward_of_layers, bucketed, context, launched, planned, text, trace


def test_a_fragment_of_a_backward():
    """The first gather may be in flight, the last one starts the next graph's, the last reductions stay in flight."""
    gm, params, _ = backward_of_layers(layers=2)
    gm = run_passes(GRAPH_PASSES, gm, context(params, is_fragment=True))
    takes = [(*spec_of(node).edge, spec_of(node).recheck) for node in launched(gm, Kind.GATHER, crossing=True)]
    assert takes == [(True, False, True), (False, True, True)]
    left = launched(gm, Kind.REDUCE, crossing=True)
    assert [spec_of(node).reads for node in left] == [(2, 3), (0, 1), (4,)]  # that early only in so short a graph
    assert [len(argument(node, "param_ids")) for node in left] == [2, 2, 1]


def test_a_rank_that_defers_nothing_sends_what_the_others_do():
    """Kernels would leave gaps between shards of odd sizes, which a deferred reduction has not."""
    gm, params, _ = backward_of_layers(layers=2, dim=3)
    ctx = context(params, is_fragment=True, kernels=True)
    gm = run_passes(through("plan"), gm, ctx)
    agreed = ctx.planned.plan
    at_once = replace(agreed, launches=tuple(replace(launch, wait=launch.at) for launch in agreed.launches))
    sizes = []
    for plan in (agreed, at_once):
        gm, params, _ = backward_of_layers(layers=2, dim=3)
        ctx = context(params, is_fragment=True, kernels=True, agree=lambda *_, plan=plan: plan)
        gm = bucketed(gm, ctx)
        deferred, inside = (launched(gm, Kind.REDUCE, crossing=crossing) for crossing in (True, False))
        assert deferred if plan is agreed else inside
        sizes.append({spec_of(n).reads: sum(spec_of(n).numels) for n in (*deferred, *inside)})
        for node in inside:
            assert node.meta["val"][0].numel() == sum(spec_of(node).numels)
    assert sizes[0] == sizes[1]


def coalescing(**changes):
    """A machine whose copies are so dear that the planner makes none."""
    hardware = replace(PROFILES["cpu"], copy=1e5, each=0.0)
    return {"bucket": "auto", "hardware": hardware, "is_fragment": True, **changes}


def test_what_is_in_flight_beside_other_graphs_is_not_copied():
    """Where grouped calls are cheaper, at the edges, too; the memory of the plan is counted so."""
    gm, params, _ = backward_of_layers(layers=1, dim=32)
    ctx = context(params, **coalescing())
    gm = bucketed(gm, ctx)
    assert {bucket.form for bucket in ctx.planned.plan.launches} <= {"coalesced", "single"}
    prefetched = launched(gm, Kind.GATHER, crossing=True)
    assert [len(argument(node, "tensors")) for node in prefetched] == [2]
    assert len(prefetched[0].users) == 2
    assert all(len(waits_of(node)) == 2 for node in prefetched)
    deferred = [node for node in launched(gm, Kind.REDUCE, crossing=True) if spec_of(node).coalesced]
    assert [len(argument(node, "tensors")) for node in deferred] == [2]


def test_a_rank_that_defers_nothing_makes_the_same_collectives():
    """A budget may make one rank alone wait at once: a grouped call stays one, with what is sent in it."""
    gm, params, _ = backward_of_layers(layers=1, dim=32)
    ctx = context(params, **coalescing())
    gm = run_passes(through("plan"), gm, ctx)
    agreed = ctx.planned.plan
    at_once = replace(agreed, launches=tuple(replace(launch, wait=launch.at) for launch in agreed.launches))
    grouped = []
    for plan in (agreed, at_once):
        gm, params, _ = backward_of_layers(layers=1, dim=32)
        gm = bucketed(gm, context(params, **coalescing(agree=lambda *_, plan=plan: plan)))
        several = [node for node in launched(gm, Kind.REDUCE) if spec_of(node).coalesced]
        assert any(spec_of(node).crosses_graph for node in several) is (plan is agreed)
        grouped.append([(spec_of(node).reads, spec_of(node).numels) for node in several])
    assert grouped[0] == grouped[1]
    assert grouped[0]


def test_a_gradient_that_something_else_sees_is_copied_before_it_is_sent():
    """The gradient of an added parameter is the one that backward goes on with."""
    params = [Param((3, 4)), Param((4, 4), 0, 1)]

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
        w = params[1].unshard(shards[1], slots[1], 1)
        grad = grad * x
        return [params[0].reduce(grad, slots[0], 0), params[1].reduce(x.t() @ grad, slots[1], 1), grad @ w.t()]

    gm = trace(function, params, torch.ones(3, 4), torch.ones(3, 4))
    gm = bucketed(gm, context(params, **coalescing()))
    sent = [grad for node in launched(gm, Kind.REDUCE, crossing=True) for grad in argument(node, "tensors")]
    assert [grad.target for grad in sent] == [torch.ops.aten.clone.default, torch.ops.aten.mm.default]


def test_a_fragment_with_one_bucket_each_way():
    params = [Param((4, 4)), Param((4,), 0, 1)]

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
        w = params[0].unshard(shards[0], slots[0], 0)
        b = params[1].unshard(shards[1], slots[1], 1)
        grad = grad * torch.cos(x @ w + b)
        return [params[0].reduce(x.t() @ grad, slots[0], 0), params[1].reduce(grad.sum(0), slots[1], 1), grad @ w.t()]

    gm = planned(trace(function, params, torch.ones(3, 4), torch.ones(3, 4)), context(params, is_fragment=True))
    assert_expected_inline(
        text(gm),
        """\
launch = launch([shard0, shard1], all_gather)
getitem = getitem(launch)
wait = wait_tensor(getitem)
unpack_gather = unpack_gather(wait)
unpack_gather_1 = unpack_gather(wait)
mm = mm(x0, unpack_gather)
add = add(mm, unpack_gather_1)
cos = cos(add)
mul = mul(x1, cos)
t = t(x0)
mm_1 = mm(t, mul)
sum_1 = sum(mul)
launch_1 = launch([mm_1, sum_1], reduce_scatter)
getitem_1 = getitem(launch_1)
expand = expand(getitem_1)
expand_1 = expand(getitem_1)
t_1 = t(unpack_gather)
mm_2 = mm(mul, t_1)
return [expand, expand_1, mm_2]""",
    )


def published(use_first: bool) -> tuple[GraphModule, list[Param]]:
    """A weight whose gradient is complete before, or after, its only use in backward; and another one."""
    params = [Param((4, 4)), Param((4, 4), 1)]

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
        first = grad @ params[0].unshard(shards[0], slots[0], 0).t() if use_first else None
        token = ops.accumulate_grad(0, params[0].reduce(x.t() @ grad, slots[0], 0), "all", 0)
        out = first if first is not None else grad.sin() @ params[0].unshard(shards[0], slots[0], 0).t()
        other = ops.accumulate_grad(1, params[1].reduce(out.t() @ out, slots[1], 1), "all", 1)
        return [token + other, out]

    return trace(function, params, torch.ones(3, 4), torch.ones(3, 4)), params


@pytest.mark.parametrize("use_first", [True, False])
@pytest.mark.parametrize("bucket", ["module", "auto", "parameter"])
def test_a_gradient_is_published_after_its_parameters_last_gather(use_first, bucket):
    """A hook may update the shard: here even before the gather, were it only for the gradient."""
    gm, params = published(use_first)
    gm = run_passes(GRAPH_PASSES, gm, context(params, bucket=bucket))
    assert len(calls(gm, ops.accumulate_grad.default)) == 2
    check_graph(gm, "all")


def test_the_verifier_sees_a_gradient_published_too_early():
    gm, params = published(use_first=False)
    gm = run_passes(GRAPH_PASSES, gm, context(params))
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(first):
        shard = next(node for node in gm.graph.nodes if node.name == "shard0")
        gm.graph.call_function(ops.accumulate_grad.default, (0, shard, "all", 0))
    with pytest.raises(GraphIsWrong, match="hands out a gradient"):
        check_graph(gm, "this")


def test_gradients_are_published_as_their_reductions_end():
    """Not at the end: an optimizer that steps in a hook frees them while the rest of the backward runs."""
    gm, params, _ = backward_of_layers(layers=3)
    output = next(iter(reversed(gm.graph.nodes)))
    tokens = []
    with gm.graph.inserting_before(output):
        for reduced in output.args[0]:
            token = gm.graph.call_function(ops.accumulate_grad.default, (0, reduced, "all", argument(reduced, "read")))
            token.meta["val"] = reduced.meta["val"].new_empty(())
            tokens.append(token)
    output.args = (tokens,)
    gm = planned(gm, context(params))
    reductions = launched(gm, Kind.REDUCE)
    order = [n for n in gm.graph.nodes if n in reductions or n.target is ops.accumulate_grad.default]
    kinds = [
        "publish" if node.target is ops.accumulate_grad.default else f"launch {argument(node, 'reads')}"
        for node in order
    ]
    assert_expected_inline(
        "\n".join(kinds),
        """\
launch (4, 5)
launch (2, 3)
publish
publish
launch (0, 1)
publish
publish
launch (6,)
publish
publish
publish""",
    )
    last = [argument(node, "last") for node in order if node.target is ops.accumulate_grad.default]
    assert last == [False, True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("replicas", "budget", "merges"), [("replicas", 10**9, False), ("replicas", None, True), (None, 10**9, True)]
)
def test_merging_leaves_a_budget_the_room_for_what_becomes_flat(replicas, budget, merges, monkeypatch):
    """Reductions that go on over replicas become one tensor each after the search, which copies them."""
    found = []

    def noted(*args: object, merge: bool, **options: object) -> Found:
        found.append(merge)
        return search(*args, merge=merge, **options)

    monkeypatch.setattr(choose, "search", noted)
    gm, params, _ = backward_of_layers(layers=4)
    ctx = context(params, bucket="auto", budget=budget, replicates=replicas is not None)
    ctx.groups[0] = replace(ctx.groups[0], replicate=replicas)
    run_passes(through("plan"), gm, ctx)
    assert found == [merges]


def test_a_gradient_is_published_after_the_last_use_of_a_parameter_that_is_not_gathered():
    """Replicated alone, the full parameter is the shard: a hook that updates it writes to what is computed with."""
    params = [Param((4, 4), world=1), Param((4, 4), 1, world=1)]

    def function(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
        first = x.t() @ grad
        out = grad.sin() @ params[0].unshard(shards[0], slots[0], 0).t()
        grads = first, out.t() @ out
        tokens = [ops.accumulate_grad(i, params[i].reduce(of, slots[i], i), "all", i) for i, of in enumerate(grads)]
        return [*tokens, out]

    gm = trace(function, params, torch.ones(3, 4), torch.ones(3, 4))
    ctx = context(params, overlap=False, replicates=True)
    ctx.groups[0] = replace(ctx.groups[0], replicate="replicas")
    gm = run_passes(GRAPH_PASSES, gm, ctx)
    publishes, products = calls(gm, ops.accumulate_grad.default), calls(gm, torch.ops.aten.mm.default)
    assert [argument(node, "read") for node in publishes] == [0, 1]
    assert products[1] < publishes[0]  # nodes compare by their places
