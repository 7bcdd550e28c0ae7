"""All passes on random regions: every rank computes what it did, with the plan's collectives over the right links.

More than ``test_random_graphs.py`` has: meshes, replicas, other dimensions, gradients of any layout, the model's own
collectives over links of ours, fragments, published gradients, budgets, prefetch lists, variants of one region. And
simulator, bound, verifier and plan are asked about one graph, and have to agree.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, reject
from torch import Tensor
from torch.fx import GraphModule

from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import COALESCED
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.memory import peak_bytes
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.choose import choose
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit, schedule_of
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.plan.simulate import memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import Tasks
from tests.passes.graphs import ALL_REDUCE, calls
from tests.passes.plan.simulator import curve, play
from tests.passes.random_cases import cases
from tests.passes.ranks import Ranks
from tests.passes.regions import Mesh, MeshParam, Region, regions
from tests.passes.test_random_graphs import WIRES, hardware_of

COPIES = st.sampled_from([{}, {}, {"kernels": True}, {"library_copies": True}])


@st.composite
def options(draw: Any) -> dict[str, Any]:
    """What a user may ask of a plan, and how the hardware may be."""
    bucket = draw(st.sampled_from(["auto", "auto", "auto", "module", "parameter", 4e-5, 1e-3, "user"]))
    found = {
        "bucket": bucket,
        "hardware": hardware_of(draw(WIRES)),
        "may_use_all_to_all": draw(st.booleans()),
        "overlap": draw(st.integers(0, 5)) > 0,
        "prefetch": draw(st.sampled_from(["before", "after"])),
        "verify_level": "full",
        **draw(COPIES),
    }
    if bucket == "user":
        numbers = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
        found |= {"bucket": (("*",),), "user_buckets": numbers}
    return found


@dataclass
class Case:
    """A region, what its graph gives, and how it was asked to be rewritten."""

    region: Region
    asked: dict[str, Any]
    phase: str = "backward"

    def context(self, **more: Any) -> PassContext:
        asked = self.asked | more
        if "user_buckets" in asked:
            numbers = tuple(zip(range(len(self.region.params)), asked["user_buckets"], strict=False))
            asked = asked | {"user_buckets": numbers}
        return self.region.context(self.phase, collectives_at_world_size_1=self.region.ranks == 1, **asked)

    def check(self, length: int = 3, **more: Any) -> PassContext:
        """Rewrite the region's graph, run both, and compare."""
        original = self.region.graph(length)
        ctx = self.context(**more)
        gm = run_passes(GRAPH_PASSES, copy.deepcopy(original), ctx)
        before, after = Ranks(self.region), Ranks(self.region)
        expected = before.run(original, self.region.inputs(length))
        found = after.run(gm, self.region.inputs(length))
        self._compare(original, found, expected, before, after, ctx)
        _check_launches(after, gm, ctx)
        # what is deferred lives on outside of the graph; gradients that are parts of larger memory keep all of it,
        # where no budget has them copied
        deferred = ctx.rules.is_fragment and ctx.phase == "backward"
        _check_numbers(gm, ctx, counted=not deferred and not (self.region.has_parts and ctx.rules.budget is None))
        return ctx

    def _compare(
        self, original: GraphModule, found: list[list[Tensor]], expected: list[list[Tensor]], before: Ranks,
        after: Ranks, ctx: PassContext,
    ) -> None:  # fmt: skip
        reads = [_read_of(node) for node in _outputs(original)]
        for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for read, a, b in zip(reads, ours, theirs, strict=True):
                if read in after.deferred:
                    assert not a.any(), "zeros stand for what is in flight"
                    a = after.deferred[read][rank]
                self._same(a, b, ctx)
        assert set(after.deferred) <= {*reads}
        assert after.published.keys() == before.published.keys()
        for read, grads in before.published.items():
            for a, b in zip(after.published[read], grads, strict=True):
                self._same(a, b, ctx)

    def _same(self, a: Tensor, b: Tensor, ctx: PassContext) -> None:
        """Equal, but where sums are taken in another order."""
        assert a.dtype == b.dtype
        reduced = [of[0] for kind, *of in self.region.steps if kind == "reduce"]
        if len(set(reduced)) == len(reduced) and not ctx.may_use_all_to_all:
            assert torch.equal(a, b)
            return
        dtypes = {getattr(torch, p.spec.dtype) for p in self.region.params} | {p.dtype for p in self.region.params}
        rounding = 0.1 if torch.bfloat16 in dtypes else 1e-4
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)


def _outputs(gm: GraphModule) -> Any:
    return next(iter(reversed(gm.graph.nodes))).args[0]


def _read_of(node: Any) -> int | None:
    """The parameter whose gradient an output is."""
    while node.target is torch.ops.aten.add.Tensor:
        node = node.args[0]
    return node.args[-1] if node.target is torch.ops.compiled_fsdp.reduce_grad.default else None


def _check_launches(after: Ranks, gm: GraphModule, ctx: PassContext) -> None:
    """The plan's launches in its order, over their links, and the second reduction of each that has one."""
    assert ctx.planned is not None
    wanted, seconds = [], 0
    for bucket in ctx.planned.plan.launches:
        groups = ctx.groups[bucket.group_id]
        # on the CPU a grouped bucket is one collective for each tensor
        count = len(bucket.reads) if bucket.form == COALESCED else 1
        link = groups.all_gather if bucket.kind == "gather" else groups.reduce_scatter
        wanted += [(bucket.kind, link)] * (0 if bucket.transport == "all_reduce" else count)
        whole = all(ctx.reads[read].reduce_spec.sync.value == "all" for read in bucket.reads)
        seconds += count * (bucket.kind == "reduce" and groups.replicate is not None and whole)
    again = {groups.replicate for groups in ctx.groups.values()}
    assert [launch for launch in after.launches if launch[1] not in again] == wanted
    if all(ctx.reads[read].reduces_again_over == 1 for read in after.deferred):
        assert sum(group in again for _, group in after.launches) == seconds
    assert len(calls(gm, ALL_REDUCE)) >= 0


def _check_numbers(gm: GraphModule, ctx: PassContext, *, counted: bool) -> None:
    """What simulator, another simulator, bound, verifier and JSON say of one graph's plan.

    ``counted``: whether the graph holds no more than the simulator says.
    """
    assert ctx.planned is not None
    tasks, schedule, simulation = ctx.planned.tasks, ctx.planned.schedule, ctx.planned.simulation
    if tasks is None:
        return
    assert simulation is not None
    assert simulation == simulate(tasks, schedule)
    again = Tasks.from_json(tasks.to_json())
    assert again == tasks
    assert simulate(again, schedule) == simulation
    assert GraphPlan.from_json(ctx.planned.plan.to_json()) == ctx.planned.plan
    assert simulation.peak == max(curve(tasks, schedule))
    assert abs(simulation.seconds - play(tasks, schedule).now) <= 1e-9 * (1 + simulation.seconds)
    bound = lower_bound(tasks)
    assert bound.seconds <= simulation.seconds * (1 + 1e-9)
    assert bound.peak <= simulation.peak
    if counted:
        shards = frozenset(f"shard{i}" for i in range(len(ctx.reads)))
        held = peak_bytes(gm, backward=ctx.phase == "backward", shards=shards) + tasks.persistent
        assert held <= simulation.peak, (held, simulation.peak)
    if ctx.rules.budget is None:
        assert schedule_of(ctx.planned.plan, tasks) == schedule


PHASES = st.sampled_from(["backward", "backward", "forward", "inference"])


@cases(60)
@given(regions(), options(), PHASES)
def test_any_region(region, asked, phase):
    Case(region, asked, phase).check()


@cases(40)
@given(regions(in_parts=True), options(), st.booleans())
def test_a_part_of_the_ranks_reduces_first(region, asked, is_fragment):
    Case(region, asked).check(is_fragment=is_fragment)


@pytest.mark.parametrize("copies", [{}, {"library_copies": True}])
@pytest.mark.parametrize("form", ["flat", "coalesced"])
@pytest.mark.parametrize("by", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    "mesh", [Mesh(0, 8, within=2), Mesh(0, 8, within=4), Mesh(0, 4, replicas=2)], ids=["2 of 8", "4 of 8", "replicas"]
)
def test_a_bucket_is_reduced_twice(mesh, by, form, copies):
    """A bucket of several gradients, one of them padded and one sharded on its second dimension, flat or coalesced."""
    within = (mesh.within, mesh.number_of_parts) if mesh.within else None
    spec = ReduceSpec("float32", (1.0, 3.0), within=within)
    sizes = ((16, 3), 0), ((2, 8), 1), ((24,), 0), ((5,), 0)
    params = tuple(MeshParam(size, 0, i, mesh=mesh, dim=dim, spec=spec) for i, (size, dim) in enumerate(sizes))
    region = Region(8, params, (("compute", 0, 0), *(("reduce", i, 1, "places") for i in range(4))))
    # the planner chooses coalesced buckets if copies are slow
    hardware = hardware_of((1e-3, 1e-7, 1e9, 1e9 if form == "flat" else 1e3, 0.0))
    asked = {"bucket": 1e-3, "hardware": hardware, "may_use_all_to_all": by == "all_to_all", **copies}
    found = Case(region, asked).check(replicates=form == "flat")
    assert found.planned is not None
    (bucket,) = found.planned.plan.launches
    assert (bucket.reads, bucket.form, bucket.transport or "reduce_scatter") == ((0, 1, 2, 3), form, by)
    in_parts = region.context("backward", **asked, replicates=form == "flat", is_fragment=True)
    left = calls(run_passes(GRAPH_PASSES, region.graph(), in_parts), torch.ops.compiled_fsdp.launch.default)
    assert len(left) == (form == "flat")  # in a fragment only a flat bucket is deferred: the runtime reduces one tensor


@pytest.mark.parametrize("divided", [False, True])
def test_gradients_that_are_divided_before_the_sum_are_copied(divided):
    """As with float16: the peak counts the copies, also of a bucket that would be sent without."""
    mesh, spec = Mesh(0, 2), ReduceSpec("float32", (2.0, 2.0) if divided else (1.0, 3.0))
    params = tuple(MeshParam((size,), 0, i, mesh=mesh, spec=spec) for i, size in enumerate((400, 800)))
    region = Region(2, params, (("compute", 0, 0), ("reduce", 0, 1, "places"), ("reduce", 1, 1, "places")))
    found = Case(region, {"bucket": "parameter", "hardware": hardware_of((1e-3, 1e-7, 1e9, 1e3, 0.0))}).check()
    assert found.planned is not None
    assert [task.size.copied for task in found.planned.tasks.reductions] == [divided] * 2


@cases(40)
@given(regions(publishes=True), options())
def test_gradients_are_published_once_and_after_the_last_gather(region, asked):
    Case(region, asked).check()


@pytest.mark.more
@cases(40)
@given(regions(), options(), st.sampled_from(["backward", "backward", "forward"]), st.booleans())
def test_a_fragment(region, asked, phase, recheck):
    """What crosses its edges has the values, too."""
    Case(region, asked, phase).check(is_fragment=True, recheck_prefetched=recheck)


@pytest.mark.more
@cases(40)
@given(regions(), options(), st.floats(0, 1.2))
def test_a_budget_is_kept_or_refused(region, asked, share):
    """The verifier counts the rewritten graph; what an error asks for is enough."""
    case = Case(region, asked)
    ctx = case.check()
    if ctx.planned is None or ctx.planned.tasks is None:
        return
    lowest, highest = lower_bound(ctx.planned.tasks).peak, ctx.planned.simulation.peak
    budget = lowest + int(share * (highest - lowest))
    refused = None
    try:
        within = case.check(budget=budget)
    except OverBudget as error:
        refused = error
    if refused is not None:
        assert "'memory_budget'" in str(refused)
        assert refused.least > budget
        within = case.check(budget=refused.least)
        budget = refused.least
    assert within.planned.simulation.peak <= budget


@cases(40)
@given(regions(), options(), st.sampled_from([1, 2, 7, 64]))
def test_a_rank_with_another_shape_follows_the_first_ones_plan(region, asked, length):
    """Reads and milestones mean the same in every variant, so each can follow, in the same order of collectives."""
    case = Case(region, asked)
    first = case.check()
    plan = first.planned.plan
    second = case.check(length, agree=lambda *_: plan)
    assert second.planned.plan == plan
    order = [(launch.kind, launch.indices) for launch in first.planned.schedule]
    assert [(launch.kind, launch.indices) for launch in second.planned.schedule] == order


@pytest.mark.more
@cases(40)
@given(regions(), options(), st.randoms(use_true_random=False))
def test_any_agreed_places_are_followed_or_refused(region, asked, random):
    """Buckets in another order, at milestones drawn by lot, as a rank with another graph might have proposed them."""
    case = Case(region, asked)
    plan = case.check().planned.plan
    if not plan.launches:
        reject()
    names = [bucket.at for bucket in plan.launches] + [bucket.wait for bucket in plan.launches] + ["start", "end"]
    launches = [replace(b, at=random.choice(names), wait=random.choice(names)) for b in plan.launches]
    if random.random() < 0.5:
        random.shuffle(launches)
    agreed = GraphPlan(plan.phase, tuple(launches))
    try:
        followed = case.check(agree=lambda *_: agreed)
    except PlanDoesNotFit:
        return
    assert followed.planned.simulation is not None
    if not region.has_parts:  # under a budget these are copied, and plans count what the verifier does
        case.check(agree=lambda *_: agreed, budget=followed.planned.simulation.peak)


@cases(40)
@given(regions(), options(), st.sets(st.sampled_from(["arrange", "bucket", "schedule", "lower", "verify"]), max_size=1))
def test_each_pass_alone_leaves_a_graph_that_runs(region, asked, off):
    """After each pass: values as before."""
    case = Case(region, asked)
    original, ctx = region.graph(), case.context()
    expected = Ranks(region).run(original, region.inputs())
    gm = copy.deepcopy(original)
    for run in through("arrange"):
        gm = run_passes((run,), gm, ctx)
        for ours, theirs in zip(Ranks(region).run(gm, region.inputs()), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                case._same(a, b, ctx)


@pytest.mark.more
@cases(40)
@given(regions(), options())
def test_a_quick_choice_can_be_planned(region, asked):
    """What asks for memory alone gets a schedule that can run."""
    ctx = Case(region, asked).check()
    if ctx.planned.tasks is None:
        return
    schedule, _ = choose(ctx.planned.tasks, ctx.rules, quick=True)
    assert simulate(ctx.planned.tasks, schedule).peak == max(memory_curve(ctx.planned.tasks, schedule))


# ---- what was found --------------------------------------------------------------------------------------------------
ASKED: dict[str, Any] = {"bucket": "parameter", "overlap": False, "verify_level": "full"}
HALF = ReduceSpec("bfloat16")


def test_a_plan_counts_gradients_that_are_reduced_in_narrower_numbers():
    """In float32 before, and as shards after a reduction in bfloat16: what the verifier finds is in the plan."""
    params = MeshParam((1,), spec=HALF), MeshParam((1, 5), 0, 1), MeshParam((1,), 0, 2)
    steps = ("reduce", 0, 0, "places"), ("retain", 0), ("retain", 1), ("read", 2, 0)
    Case(Region(2, params, steps), ASKED).check()


def test_a_plan_counts_gradients_of_float64_that_are_reduced_in_float32():
    """While a shard is cast at the end both are there, beside all that the graph gives."""
    mesh = Mesh(0, 1, 2)
    params = (MeshParam((2, 2), dtype=torch.float64, world=1, mesh=mesh, spec=ReduceSpec("float32")),)
    steps = ("own", "sum", -1, 0), ("reduce", 0, 0, "places"), ("retain", 0), ("alone", 0, True)
    asked = ASKED | {"hardware": hardware_of((1e-6, 1e-7, 1e3, 1e3, 1e-4))}
    Case(Region(2, params, steps, publishes=True), asked).check()


def check_with_early(case: Case) -> None:
    """The first parameter is gathered from the start on, the others where they are waited for."""
    plan = case.check().planned.plan
    launches = [replace(b, at="start" if 0 in b.reads else b.wait) for b in plan.launches]
    launches.sort(key=lambda bucket: bucket.at != "start")
    case.check(agree=lambda *_: GraphPlan(plan.phase, tuple(launches)))


CAST = {"dtype": torch.float64, "stored": torch.float32, "spec": ReduceSpec("float64")}


def test_a_plan_counts_the_cast_of_what_the_output_alone_holds():
    """Of a shard that is cast to be sent, there until the wait, which stood behind what was computed last."""
    mesh = Mesh(0, 1, 1)
    cast = MeshParam((2, 12), 0, 0, world=1, mesh=mesh, **CAST)
    others = tuple(MeshParam((2, 3, 3), 0, i, world=1, mesh=mesh) for i in (1, 2))
    steps = ("retain", 0), ("alone", 1, True), ("alone", 2, True)
    check_with_early(Case(Region(1, (cast, *others), steps), ASKED | {"overlap": True}))


def test_a_plan_counts_the_cast_of_what_is_waited_for_behind_another():
    """In one segment: while the other one is unpacked."""
    cast = MeshParam((16,), 0, 1, world=2, **CAST)
    other = MeshParam((2, 8), 0, 0, dtype=torch.float64, world=2, dim=1, spec=ReduceSpec("float64"))
    case = Case(Region(2, (other, cast), (("compute", 0, 0), ("retain", 0), ("retain", 1))), ASKED)
    plan = case.check().planned.plan
    early = GraphPlan(plan.phase, tuple(replace(bucket, at="start") for bucket in plan.launches))
    case.check(agree=lambda *_: early)


def test_a_plan_counts_a_cast_while_the_next_reduction_is_in_flight():
    """Where no ranks shard, the cast gradient is larger than what was reduced."""
    mesh = Mesh(0, 1, 2)
    params = (
        MeshParam((1,), 0, 0, dtype=torch.bfloat16, world=1, stored=torch.float32, mesh=mesh, spec=HALF),
        MeshParam((3,), 0, 1, world=1, mesh=mesh, spec=ReduceSpec("float32")),
    )
    reads = ("compute", 0, 0), ("retain", 0), ("retain", 1)
    steps = *reads[:2], ("reduce", 0, 0, "places"), ("reduce", 1, 0, "places"), reads[2]
    Case(Region(2, params, steps), ASKED | {"bucket": "auto", "overlap": True}).check()


def test_a_plan_counts_what_kernels_leave_free_in_what_they_cast():
    """Two numbers, reduced in bfloat16 and unpacked in float32."""
    mesh = Mesh(0, 1, 1)
    params = tuple(MeshParam((1,), 0, i, world=1, mesh=mesh, spec=HALF) for i in range(2))
    asked = ASKED | {"bucket": "auto", "kernels": True, "hardware": hardware_of((1e-6, 1e-7, 1e3, 1e3, 0.0))}
    Case(Region(1, params, (("reduce", 0, 0, "places"), ("reduce", 1, 0, "places"))), asked).check()


def test_a_gradient_that_is_a_part_of_larger_memory_is_copied_under_a_budget():
    """Of merged weights: the plan counts each one's bytes, and a reduction would keep all of it to its end."""
    steps = ("read", 0, 0), ("retain", 0), ("reduce", 0, 0, "view"), ("compute", 0, 0)
    Case(Region(2, (MeshParam((1,)),), steps), ASKED).check(budget=10**9)


def test_a_plan_counts_the_copy_of_a_parameter_that_is_sharded_on_another_dimension():
    """Gathered alone, too: it is there twice while it is unpacked."""
    Case(Region(2, (MeshParam((2, 4, 3), dim=1),), (("read", 0, 0),)), ASKED).check()


def test_a_parameter_of_one_row_a_rank_does_not_keep_its_bucket():
    """As a view of the flat bucket it would, to its last use: a scale of one number all of a unit."""
    small = MeshParam((1,), 0, 1)
    steps = ("alone", 0, True), ("alone", 1, True)
    Case(Region(2, (MeshParam((4, 2, 4)), small), steps), ASKED | {"bucket": "module"}).check()


def test_reductions_over_replicas_are_flat_only_where_the_budget_has_room():
    """The error asks for what the plan needs before that."""
    f32, mesh = ReduceSpec("float32"), Mesh(0, 2, 2)
    params = tuple(MeshParam((2,), 0, i, world=2, mesh=mesh, spec=f32) for i in range(6))
    region = Region(4, params, (("reduce", 0, 0, "expanded"), ("reduce", 1, 0, "places")))
    asked = {"bucket": 4e-5, "hardware": hardware_of((1e-6, 1e-7, 1e3, 1e3, 0.0)), "verify_level": "full"}
    with pytest.raises(OverBudget) as refused:
        Case(region, asked).check(budget=1)
    Case(region, asked).check(budget=refused.value.least)


def test_a_deferred_reduction_is_launched_where_the_plan_has_it():
    """Behind the model's own collective here, for which it would hold compute up. Ranks that wait for it agree."""
    params = tuple(MeshParam((1,), 0, i) for i in range(6))
    steps = ("reduce", 0, 0, "places"), ("own", "sum", -1, 0), ("compute", 0, 0)
    slow = hardware_of((1e-6, 1e-7, 1e3, 1e3, 0.0))
    asked = {"bucket": 4e-5, "hardware": slow, "verify_level": "full"}
    Case(Region(2, params, steps), asked).check(is_fragment=True)
