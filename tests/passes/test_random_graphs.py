"""All passes on random graphs: the result stays what it was, on every rank, and the promises of the plan hold."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.fx import GraphModule

from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cost import PROFILES, Contention, Hardware, Wires
from compiled_fsdp.passes.memory import peak_bytes
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from compiled_fsdp.passes.plan.plain_schedules import usual_limit
from tests.passes.graphs import Machine, Param, context, gathers, inputs_of, launch_sum, reductions, trace, wait
from tests.passes.random_cases import cases

QUICK = cases(40)


@dataclass(frozen=True)
class Program:
    """What a random graph does. Its steps take and leave a list of values, at first the input alone:

    ("compute", a, b)    a new value from two others
    ("read", i, a)       a new value from parameter i and another; reads the parameter again each time
    ("alone", i)         something computed from parameter i alone, not used before the next "compute" or the end
    ("sum", a)           an all-reduce of the model's own, of a value; the next "compute" or the end waits for it
    ("reduce", i, a)     a gradient of parameter i from a value; several of one parameter are summed
    """

    params: tuple[Param, ...]
    steps: tuple[tuple[Any, ...], ...]

    def trace(self) -> GraphModule:
        return trace(self._run, self.params, torch.ones(3))

    def _run(self, shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        values, alone, sums, reduced = [x], [], [], {}
        for kind, *of in self.steps:
            if kind == "compute":
                a, b = (values[j % len(values)] for j in of)
                values.append(torch.tanh(a + 2 * b + sum(t.sum() for t in (*alone, *map(wait, sums)))))
                alone, sums = [], []
            elif kind == "sum":
                sums.append(launch_sum(values[of[0] % len(values)]))
            elif kind == "read":
                full = self.params[of[0]].unshard(shards[of[0]], slots[of[0]], of[0])
                values.append(values[of[1] % len(values)] * full.sum().float().sin())
            elif kind == "alone":
                full = self.params[of[0]].unshard(shards[of[0]], slots[of[0]], of[0])
                alone.append((full.transpose(0, -1) * 2).float().abs())
            elif kind == "reduce":
                param, value = self.params[of[0]], values[of[1] % len(values)]
                grad = torch.linspace(-1, 1, torch.Size(param.size).numel()).view(param.size) * value.sum()
                grad = param.reduce(grad.to(param.dtype), slots[of[0]], of[0])
                reduced[of[0]] = reduced[of[0]] + grad if of[0] in reduced else grad
        return [values[-1], *alone, *map(wait, sums), *reduced.values()]


@st.composite
def programs(draw: Any) -> Program:
    world = draw(st.sampled_from([2, 2, 3]))
    buckets = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    positions = draw(st.permutations(range(len(buckets))))
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple)
    dtypes = st.sampled_from([torch.float32] * 2 + [torch.bfloat16, torch.float64])
    stored = st.sampled_from([None, None, torch.float32])
    params = [
        Param(draw(sizes), b, p, dtype=draw(dtypes), world=world, stored=draw(stored))
        for b, p in zip(buckets, positions, strict=True)
    ]
    param, value = st.integers(0, len(params) - 1), st.integers(0, 30)
    step = st.one_of(
        st.tuples(st.just("compute"), value, value),
        st.tuples(st.just("read"), param, value),
        st.tuples(st.just("alone"), param),
        st.tuples(st.just("sum"), value),
        st.tuples(st.just("reduce"), param, value),
    )
    return Program(tuple(params), tuple(draw(st.lists(step, min_size=1, max_size=14))))


def sums_gradients(program: Program) -> bool:
    """Whether a parameter has several gradients."""
    reduced = [of[0] for kind, *of in program.steps if kind == "reduce"]
    return len(set(reduced)) < len(reduced)


def check(program: Program, ctx: PassContext) -> tuple[Machine, GraphModule]:
    """After the passes the graph does on all ranks what the program does, by the plan."""
    original = program.trace()
    gm = run_passes(GRAPH_PASSES, copy.deepcopy(original), ctx)
    gm.graph.lint()
    for launch in [*gathers(gm), *reductions(gm)]:
        assert [user.target for user in launch.users] == [WAIT]
    inputs = inputs_of(program.params, torch.tensor([0.1, -0.2, 0.3]))
    expected, machine = Machine().run(original, inputs), Machine()
    for ours, theirs in zip(machine.run(gm, inputs), expected, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            if (
                sums_gradients(program) or ctx.may_use_all_to_all
            ):  # added before they are reduced, where the program adds them afterwards
                half = any(param.dtype is torch.bfloat16 for param in program.params)
                torch.testing.assert_close(a, b, **({"rtol": 0.05, "atol": 0.05} if half else {}))
            else:
                assert torch.equal(a, b)
    if not ctx.disabled_passes & {
        "bucket",
        "schedule",
    }:  # on the CPU a grouped bucket is one collective for each tensor
        counts = [len(bucket.reads) if bucket.form == "coalesced" else 1 for bucket in ctx.planned.plan.launches]
        kinds = [bucket.kind for bucket in ctx.planned.plan.launches]
        assert machine.launches == [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    return machine, gm


@pytest.mark.more
@QUICK
@given(programs(), st.sampled_from(["module", "parameter"]), st.sampled_from(["before", "after"]))
def test_results_order_and_what_is_in_flight(program, bucket, prefetch):
    ctx = context(program.params, bucket=bucket, prefetch=prefetch, verify_level="full")
    machine, _ = check(program, ctx)
    assert machine.most["gather"] <= 2
    assert machine.most["reduce"] <= 2


# latency, what a further tensor of a grouped call costs, bandwidth, speed of copies, contention
WIRES = st.tuples(st.sampled_from([1e-6, 1e-3]), st.sampled_from([1e-7, 1e-2]), st.sampled_from([1e3, 1e9]),
                  st.sampled_from([1e3, 1e9]), st.sampled_from([0.0, 0.5]))  # fmt: skip


def hardware_of(wires: tuple[float, ...]) -> Hardware:
    latency, each, speed, copy, contention = wires
    return replace(
        PROFILES["cpu"], latency=latency, each=each, inside=Wires(0.0, speed), copy=copy,
        contention=Contention(contention, contention, contention / 2, contention / 2),
    )  # fmt: skip


@QUICK
@given(
    programs(),
    WIRES,
    st.booleans(),
    st.sampled_from(["auto", 4e-5, 1e-3]),
    st.sampled_from([{}, {"kernels": True}, {"library_copies": True}]),
)
def test_any_hardware_gives_a_plan_that_is_right(program, wires, all_to_all, bucket, copies):
    """The planner's plans, by size too, with all-to-alls, grouped buckets and buckets that kernels or torch copy.

    They are the same on every rank, and not above the limit.
    """
    options = {
        "bucket": bucket,
        "hardware": hardware_of(wires),
        "may_use_all_to_all": all_to_all,
        "verify_level": "full",
        **copies,
    }
    ctx = context(program.params, **options)
    _, gm = check(program, ctx)
    again = context(program.params, **options)
    run_passes(GRAPH_PASSES, program.trace(), again)
    assert again.planned.plan == ctx.planned.plan
    if ctx.planned.tasks is not None:
        bound = lower_bound(ctx.planned.tasks)
        assert bound.seconds <= ctx.planned.simulation.seconds * (1 + 1e-9)
        assert bound.peak <= ctx.planned.simulation.peak
        shards = frozenset(f"shard{i}" for i in range(len(program.params)))
        assert (
            peak_bytes(gm, backward=True, shards=shards) + ctx.planned.tasks.persistent <= ctx.planned.simulation.peak
        )
        if bucket == "auto":
            assert ctx.planned.simulation.peak <= usual_limit(ctx.planned.tasks)


@pytest.mark.more
@QUICK
@given(programs())
def test_without_overlap_one_is_in_flight(program):
    ctx = context(program.params, overlap=False, verify_level="full")
    machine, _ = check(program, ctx)
    assert machine.most["gather"] <= 1
    assert machine.most["reduce"] <= 1


@pytest.mark.more
@QUICK
@given(programs(), st.randoms(use_true_random=False))
def test_any_agreed_order_is_followed_or_refused(program, random):
    def agree(_: Any, propose: Callable[[], GraphPlan]) -> GraphPlan:
        plan = propose()
        return GraphPlan(plan.phase, tuple(random.sample(plan.launches, len(plan.launches))))

    ctx = context(program.params, agree=agree, verify_level="full")
    with contextlib.suppress(PlanDoesNotFit):
        check(program, ctx)


@pytest.mark.more
@QUICK
@given(programs(), st.sets(st.sampled_from(["bucket", "schedule", "verify"])))
def test_passes_can_be_switched_off(program, off):
    check(program, context(program.params, disabled_passes=frozenset(off)))
