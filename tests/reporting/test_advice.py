"""Advice of ``explain`` is true: taken, it gains about what was promised."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp.reporting.advice import MIN_GAIN, Advice
from tests.reporting.planned import plan, ranks, seconds, sharded


def advice_of(explanation, kind: str) -> Advice:
    found = [advice for advice in explanation.advice if advice.kind == kind]
    assert found, f"no {kind} in {[advice.text for advice in explanation.advice]}"
    return found[0]


def check(before, after, kind: str, off_by: float = 0.1) -> Advice:
    """The new step is as much quicker as was promised, up to a share ``off_by`` of it."""
    advice = advice_of(before, kind)
    gained = seconds(before) - seconds(after)
    assert gained == pytest.approx(advice.gain_seconds, rel=off_by), (advice, gained)
    assert advice.step_seconds == pytest.approx(seconds(before))
    assert advice.gain_seconds >= MIN_GAIN * advice.step_seconds
    return advice


def test_leave_buckets_to_the_planner():
    with ranks() as mesh:
        before, after = plan(sharded(mesh), bucket="module"), plan(sharded(mesh))
        advice = check(before, after, "planner_buckets")
        assert "bucket='auto' instead of 'module' saves" in advice.text
        assert not [advice for advice in after.advice if advice.kind == "planner_buckets"]


def test_overlap():
    with ranks() as mesh:
        check(plan(sharded(mesh), overlap=False), plan(sharded(mesh)), "overlap")


def test_give_a_module_its_own_unit():
    with ranks() as mesh:
        before = plan(sharded(mesh), bucket="module")
        own = advice_of(before, "own_unit").change["fully_shard"]
        assert own in (("table",), ("head",))
        advice = check(before, plan(sharded(mesh, own=own), bucket="module"), "own_unit")
        assert f"the gather of {own[0]} is exposed" in advice.text
        assert "give it its own unit" in advice.text


def test_keep_layers_unsharded():
    with ranks() as mesh:
        before = plan(sharded(mesh), length=256)
        kept = advice_of(before, "keep_unsharded").change["modules"]
        assert any(name.startswith("layers.") for name in kept)
        check(before, plan(sharded(mesh, own=kept, kept=kept), length=256), "keep_unsharded")


def test_nothing_is_kept_that_does_not_fit():
    with ranks() as mesh:
        before = plan(sharded(mesh), length=256)
        peak = max(graph.numbers.peak for graph in before.graphs)
        tight = plan(sharded(mesh), length=256, memory_budget=peak)
        for advice in tight.advice:
            if advice.kind == "keep_unsharded":
                kept = advice.change["modules"]
                after = plan(sharded(mesh, own=kept, kept=kept), length=256, memory_budget=peak)
                assert max(graph.numbers.peak for graph in after.graphs) <= peak


def test_more_memory():
    with ranks() as mesh:
        least = max(graph.numbers.peak for graph in plan(sharded(mesh), overlap=False, bucket="none").graphs)
        before = plan(sharded(mesh), memory_budget=least)
        needed = advice_of(before, "memory_budget").change["memory_budget"]
        assert needed > least
        check(before, plan(sharded(mesh), memory_budget=needed), "memory_budget")


def test_a_larger_batch():
    with ranks() as mesh:
        before = plan(sharded(mesh))
        advice = advice_of(before, "batch")
        wanted = advice.change["batch"]
        after = plan(sharded(mesh), batch=wanted)
        assert f"from batch {wanted} on (2 now)" in advice.text
        gained = seconds(before) - seconds(after) * 2 / wanted
        assert gained == pytest.approx(advice.gain_seconds, rel=0.15)
        assert sum(graph.numbers.exposed for graph in after.graphs) < 0.03 * seconds(after)
        assert not [advice for advice in after.advice if advice.kind == "batch"]


def test_reductions_in_bfloat16():
    with ranks() as mesh:
        full = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        before, after = plan(sharded(mesh, mp_policy=full), length=256), plan(sharded(mesh), length=256)
        check(before, after, "reduce_dtype", off_by=0.2)
        assert not [advice for advice in after.advice if advice.kind == "reduce_dtype"]


def test_the_greatest_gain_comes_first_and_nothing_is_said_for_nothing():
    with ranks() as mesh:
        advice = plan(sharded(mesh), bucket="module").advice
        gains = [one.gain_seconds for one in advice]
        assert len(advice) >= 2
        assert gains == sorted(gains, reverse=True)
    with ranks(1) as mesh:
        assert plan(sharded(mesh), length=128).advice == ()
