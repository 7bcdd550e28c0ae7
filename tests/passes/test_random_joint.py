"""Joint graphs at random, cut by ours: forward and backward compute together what the joint graph does.

Whatever stays unsharded from forward to backward, is gathered again, or is computed again: as parameters were sharded,
or as the planner chooses, under a budget and without.
"""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.fx import GraphModule, Node

from compiled_fsdp.compat.graphs import copy_of, min_cut_partition
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cost.hardware import Wires
from compiled_fsdp.passes.cost.profiles import PROFILES
from compiled_fsdp.passes.cut import cut
from compiled_fsdp.passes.graph import argument, calls, ops
from compiled_fsdp.passes.memory import peak_bytes
from compiled_fsdp.passes.offload import Candidates, offload
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, JOINT_PASSES, run_on_halves, run_passes, through
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.views import memory_of
from compiled_fsdp.passes.ways_to_cut import Halves, WaysToCut
from tests.passes.joint import LENGTH, Joint, joints
from tests.passes.random_cases import cases
from tests.passes.ranks import Ranks
from tests.passes.regions import Mesh, MeshParam, Region
from tests.passes.test_random_regions import options


def parts(joint: Joint, ctx: PassContext) -> tuple[GraphModule, Halves]:
    """The joint graph as it was, and forward and backward as the backend cuts them."""
    original = joint.graph()

    def partition(gm: GraphModule) -> Halves:
        return min_cut_partition(gm, None, num_fwd_outputs=1)

    ways = WaysToCut(copy_of(original), ctx, lambda gm, ctx: run_passes(JOINT_PASSES, gm, ctx), partition)
    halves = cut(ways, ctx, lambda _, ask: ask())
    run_on_halves(*halves, ctx)
    return original, halves


def inputs_of(joint: Joint) -> tuple[list[list[Any]], list[list[Any]]]:
    """Of each rank: shards, ids, gates and the input; and the gradient of the output."""
    primals = joint.region.inputs(LENGTH)
    for of in primals:
        of[-1:-1] = [torch.zeros_like(of[i]) for i in joint.trained]
    return primals, [[torch.linspace(-1, 1, LENGTH) * (rank + 2)] for rank in range(joint.region.ranks)]


def check(joint: Joint, asked: dict[str, Any], *, kept: Any = None, offloaded: Any = None, **more: Any) -> PassContext:
    """Cut and rewrite; run the joint graph, and the halves one after the other; compare."""
    if "user_buckets" in asked:
        numbers = tuple(zip(range(len(joint.region.params)), asked["user_buckets"], strict=False))
        asked = asked | {"user_buckets": numbers}
    alone = joint.region.ranks == 1
    ctx = joint.region.context("joint", collectives_at_world_size_1=alone, **asked, **more)
    if kept is not None:
        ctx = replace(ctx, kept_reads=frozenset(kept))
    original, (forward, backward) = parts(joint, ctx)
    saved = list(next(iter(reversed(forward.graph.nodes))).args[0])[1:]
    if ctx.rules.keep_as_sharded:
        _check_saved(saved, backward, ctx)
    if offloaded is not None:
        found = Candidates(forward, backward, replace(ctx, host_memory=float("inf"))).all
        offload(forward, backward, [each.name for i, each in enumerate(found) if i in offloaded])
    half, seconds = {}, 0.0
    for phase, gm in (("forward", forward), ("backward", backward)):
        own = replace(ctx, phase=phase, summary={}, planned=None)
        half[phase] = run_passes(GRAPH_PASSES, gm, own)
        _check_memory(half[phase], own, len(joint.region.params))
        seconds += own.planned.simulation.seconds if own.planned.simulation is not None else math.inf
    if ctx.for_backward is not None and ctx.for_backward.bound is not None:
        assert ctx.for_backward.bound <= seconds * (1 + 1e-9)
    primals, tangents = inputs_of(joint)
    given = [[*of, *grads] for of, grads in zip(primals, tangents, strict=True)]
    torch.manual_seed(0)
    expected = Ranks(joint.region).run(original, given)
    # each half has those of the inputs that it needs
    numbers = [int(node.name.removeprefix("primals_")) for node in forward.graph.nodes if node.op == "placeholder"]
    torch.manual_seed(0)  # forward drops the same elements, and backward draws no numbers
    first = Ranks(joint.region).run(half["forward"], [[of[i] for i in numbers] for of in primals])
    second = Ranks(joint.region).run(
        half["backward"], [[*out[1:], *grads] for out, grads in zip(first, tangents, strict=True)]
    )
    for out, grads, wanted in zip(first, second, expected, strict=True):
        for ours, theirs in zip([out[0], *grads], wanted, strict=True):
            _same(ours, theirs, joint, ctx)
    return ctx


def _check_saved(saved: list[Node], backward: GraphModule, ctx: PassContext) -> None:
    """What is to be gathered again is not saved; what is kept is not gathered again."""
    for node in saved:
        memory = memory_of(node)
        if memory.target is ops.unshard.default:
            read = ctx.reads[argument(memory, "read")]
            kept = read.index in ctx.kept_reads if ctx.kept_reads is not None else read.keep_for_backward
            assert kept, f"{node} is saved"
    for node in calls(backward, ops.unshard.default):
        read = ctx.reads[argument(node, "read")]
        kept = read.index in ctx.kept_reads if ctx.kept_reads is not None else read.keep_for_backward
        assert not kept or not ctx.has_collective(read.group_id, read.world), f"{node} is gathered again"


def _check_memory(gm: GraphModule, ctx: PassContext, shards: int) -> None:
    """Forward and backward hold no more than their plans say, and these no more than the budget.

    Gradients are no parts of larger memory here.
    """
    assert ctx.planned is not None
    if ctx.planned.tasks is None:
        return
    assert ctx.rules.budget is None or ctx.planned.simulation.peak <= ctx.rules.budget
    names = frozenset(f"primals_{i}" for i in range(shards))
    held = peak_bytes(gm, backward=ctx.phase == "backward", shards=names) + ctx.planned.tasks.persistent
    assert held <= ctx.planned.simulation.peak, (ctx.phase, held, ctx.planned.simulation.peak)


def _same(ours: torch.Tensor, theirs: torch.Tensor, joint: Joint, ctx: PassContext) -> None:
    """Equal, but where gradients of several reads are added before they are reduced, or pieces in another order."""
    assert ours.dtype == theirs.dtype
    reads = [i for kind, *of in joint.steps if kind in ("scale", "apply", "merge") for i in of[:-1]]
    if len(set(reads)) == len(reads) and not ctx.may_use_all_to_all:
        assert torch.equal(ours, theirs), (ours, theirs)
        return
    params = joint.region.params
    dtypes = {getattr(torch, p.spec.dtype) for p in params} | {p.dtype for p in params}
    rounding = 0.1 if torch.bfloat16 in dtypes else 1e-4
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.more
@cases(30)
@given(joints(), options())
def test_as_units_were_sharded(joint, asked):
    check(joint, asked)


@cases(30)
@given(joints(), options(), st.sets(st.integers(0, 5)))
def test_whatever_is_kept(joint, asked, kept):
    """Any choice of what stays unsharded, as another rank may have made it."""
    check(joint, asked, kept=kept)


@cases(30)
@given(joints(), options(), st.sets(st.integers(0, 5)), st.booleans())
def test_whatever_is_offloaded(joint, asked, offloaded, beside):
    """Any choice of what waits in host memory, copied by the host itself or beside compute."""
    if beside:
        asked = asked | {"hardware": replace(asked["hardware"], host_computes=False, host_copy=1e9)}
    check(joint, asked, offloaded=offloaded)


@pytest.mark.more
@cases(30)
@given(joints(), options())
def test_as_the_planner_chooses(joint, asked):
    check(joint, asked, keep_as_sharded=False)


@pytest.mark.more
@cases(10)
@given(joints(), options(), st.booleans(), st.floats(0.3, 1.2), st.sampled_from([0.0, 16.0, float("inf")]))
def test_within_a_budget_or_refused(joint, asked, as_sharded, share, host_memory):
    """The partitioner saves less, and recomputes more; what the error asks for is enough."""
    found = joint.region.context("joint", **{k: v for k, v in asked.items() if k != "user_buckets"})
    _, halves = parts(joint, found)
    highest = 0
    for phase, gm in zip(("forward", "backward"), halves, strict=True):
        own = replace(found, phase=phase, summary={}, rules=replace(found.rules, bucket="parameter"), planned=None)
        run_passes(through("plan"), gm, own)
        highest = max(highest, 0 if own.planned.simulation is None else own.planned.simulation.peak)
    budget = int(share * highest)
    refused = None
    try:
        check(joint, asked, keep_as_sharded=as_sharded, budget=budget, host_memory=host_memory)
    except OverBudget as error:
        refused = error
    if refused is not None:
        assert refused.least > budget
        check(joint, asked, keep_as_sharded=as_sharded, budget=refused.least, host_memory=host_memory)


# ---- what was found --------------------------------------------------------------------------------------------------
def test_a_parameter_of_one_column_a_rank_is_contiguous():
    """As its read is traced: what flattens it is a view in the graph. Alone in its bucket it was transposed."""
    region = Region(2, (MeshParam((2, 2), dim=1),), ())
    check(Joint(region, (("scale", 0, 0),)), {"bucket": "parameter", "verify_level": "full"})


def test_reads_that_stay_where_they_fit_no_more_are_gathered_again():
    """What stays was chosen by what each graph holds before it is cut anew: four bytes less than afterwards."""
    mesh = Mesh(0, 1)
    params = tuple(MeshParam((1 if i else 2,), position=i, keep=False, world=1, mesh=mesh) for i in range(6))
    joint = Joint(Region(1, params, ()), (("scale", 0, 0),), frozenset({0}))
    asked = {
        "bucket": "auto", "prefetch": "before", "verify_level": "full",
        "hardware": replace(PROFILES["cpu"], copy=1000.0, inside=Wires(0.0, 1000.0)),
    }  # fmt: skip
    check(joint, asked, keep_as_sharded=False, budget=244)
