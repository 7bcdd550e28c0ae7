"""Advice of ``explain`` is true: a program that follows it gains about as much time as the advice promised."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.tools.advice import MIN_GAIN, Advice
from compiled_fsdp.tools.advice_kinds import batch
from compiled_fsdp.tools.explanation import Explanation
from tests.harness import compiled
from tests.reporting.planned import Layer, plan, ranks, seconds, sharded


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


@pytest.mark.more
def test_overlap():
    with ranks() as mesh:
        check(plan(sharded(mesh), overlap=False), plan(sharded(mesh)), "overlap")


@pytest.mark.more
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


@pytest.mark.more
def test_nothing_is_kept_that_does_not_fit():
    """A budget between the least memory and that without a budget has room for some layers, and not for all of them."""
    with ranks() as mesh:
        alone = plan(sharded(mesh), length=256, overlap=False, bucket="parameter")
        least, free = (
            max(graph.numbers.peak for graph in of.graphs) for of in (alone, plan(sharded(mesh), length=256))
        )
        budget = round(least + 0.6 * (free - least))
        kept = advice_of(plan(sharded(mesh), length=256, memory_budget=budget), "keep_unsharded").change["modules"]
        assert set(kept) < {"layers.0", "layers.1", "layers.2", "head"}
        after = plan(sharded(mesh, own=kept, kept=kept), length=256, memory_budget=budget)
        assert max(graph.numbers.peak for graph in after.graphs) <= budget


@pytest.mark.more
def test_more_memory():
    with ranks() as mesh:
        least = max(graph.numbers.peak for graph in plan(sharded(mesh), overlap=False, bucket="parameter").graphs)
        before = plan(sharded(mesh), memory_budget=least)
        needed = advice_of(before, "memory_budget").change["memory_budget"]
        assert needed > least
        check(before, plan(sharded(mesh), memory_budget=needed), "memory_budget")


@pytest.mark.more
def test_one_budget_for_all_graphs():
    """Batches of other sizes and graphs behind graph breaks need other budgets; the option has one value."""

    def steps(model: nn.Module) -> Explanation:
        run = compiled(model, hardware="h100", memory_budget=budget, bucket="auto")
        with torch._dynamo.config.patch(force_parameter_static_shapes=False):
            for batch in (64, 48):
                run(torch.ones(batch, 256, requires_grad=True)).sum().backward()
        return explain(model)

    with ranks() as mesh:
        budget = 12_500_000
        found = steps(fully_shard(nn.Sequential(*(Layer(256) for _ in range(4))), mesh=mesh))
        assert len(found.calls) == 2
        given = [advice.change["memory_budget"] for advice in found.advice if advice.kind == "memory_budget"]
        assert len(given) == 1
        kinds = [advice.kind for advice in found.advice]
        assert len(kinds) == len(set(kinds)), kinds


def test_the_batch_of_training_counts():
    """Not that of the evaluation before it, although it would save more."""
    with ranks() as mesh:
        with torch.no_grad():
            evaluation = plan(sharded(mesh), batch=2, length=8192)
        training = plan(sharded(mesh), batch=4, length=8192)
        (advice,) = batch([*evaluation.calls, *training.calls])
        (of_evaluation,) = batch(evaluation.calls)
        assert "(now 4)" in advice.text
        assert "(now 2)" in of_evaluation.text
        assert of_evaluation.gain_seconds > advice.gain_seconds


@pytest.mark.more
def test_a_larger_batch():
    """It comes last: another batch is another training."""
    with ranks() as mesh:
        before = plan(sharded(mesh), length=8192)
        advice = advice_of(before, "batch")
        wanted = advice.change["batch"]
        after = plan(sharded(mesh), batch=wanted, length=8192)
        assert f"a batch of {wanted} or more (now 2) would hide communication" in advice.text
        gained = seconds(before) - seconds(after) * 2 / wanted
        # Mostly more, because the advice does not know that more rows fill more of the multiprocessors.
        assert gained == pytest.approx(advice.gain_seconds, rel=0.35)
        assert sum(graph.numbers.exposed for graph in after.graphs) < 0.03 * seconds(after)
        assert not [advice for advice in after.advice if advice.kind == "batch"]
        assert before.advice[-1] is advice
        assert not [advice for advice in plan(sharded(mesh)).advice if advice.kind == "batch"], "26 times the batch"


@pytest.mark.more
def test_reductions_in_bfloat16():
    with ranks() as mesh:
        full = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        before, after = plan(sharded(mesh, mp_policy=full), length=256), plan(sharded(mesh), length=256)
        check(before, after, "reduce_dtype", off_by=0.2)
        assert not [advice for advice in after.advice if advice.kind == "reduce_dtype"]


def test_advice_that_changes_results_comes_behind_advice_that_does_not():
    with ranks() as mesh:
        full = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        found = plan(sharded(mesh, mp_policy=full), length=256, bucket="module")
        changing = [advice.changes_results for advice in found.advice]
        assert len(set(changing)) == 2
        assert changing == sorted(changing)
        assert all(advice.text.startswith("(changes results) ") == advice.changes_results for advice in found.advice)
        # it is behind lesser gains
        assert found.advice[-1].gain_seconds > min(advice.gain_seconds for advice in found.advice)


@pytest.mark.more
def test_the_greatest_gain_comes_first_and_nothing_is_said_for_nothing():
    with ranks() as mesh:
        advice = plan(sharded(mesh), bucket="module").advice
        gains = [one.gain_seconds for one in advice if one.kind != "batch" and not one.changes_results]
        assert len(advice) >= 2
        assert gains == sorted(gains, reverse=True)
    with ranks(1) as mesh:
        found = plan(sharded(mesh), length=128)
        assert found.advice == ()
        assert "advice" not in str(found)  # nothing communicates
    with ranks(2) as mesh:
        found = plan(sharded(mesh), batch=64)
        assert found.advice == ()
        assert "no advice: compute waits for collectives 0." in str(found)


class Broken(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_graph_break_costs_what_one_graph_saves():
    """The model is really compiled, because a preview ends at the graph break."""

    def compiled_step(second: type[Layer]) -> Explanation:
        layers = nn.Sequential(*(cls(256) for cls in (Layer, Layer, second, Layer)))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(layers, mesh=mesh)
        x = torch.ones(256, 256, requires_grad=True)
        compiled(model, hardware="h100")(x).sum().backward()
        return explain(model)

    with ranks() as mesh:
        advice = advice_of(compiled_step(Broken), "graph_break")
        assert f"remove the graph break at {__file__}:" in advice.text
        assert "saves about" in advice.text
        assert f"{__file__}:" in advice.change["line"]
    with ranks() as mesh:
        whole = compiled_step(Layer)
        assert not [one for one in whole.advice if one.kind == "graph_break"]
        # what crosses the ends of a whole step has nothing to hide it
        assert 0 < advice.step_seconds - advice.gain_seconds <= seconds(whole)


class BrokenModel(nn.Module):
    """A break in the loop over its layers, of which the last three share graphs."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer(dim), Layer(dim)) for _ in range(4))
        self.head = nn.Linear(dim, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 1:
                torch._dynamo.graph_break()
            x = layer(x)
        return self.head(x)


@pytest.mark.more
def test_advice_behind_graph_breaks_does_not_promise_too_much():
    """What crosses a graph's edges is hidden by other graphs; equal layers share the plan of the first of them."""
    full = MixedPrecisionPolicy()

    def step(policy: MixedPrecisionPolicy = full, **options: Any) -> Explanation:
        torch._dynamo.reset()
        model = fully_shard(BrokenModel(), mesh=mesh, mp_policy=policy)
        compiled(model, hardware="cpu", **options)(torch.ones(1, 16, 256)).sum().backward()
        return explain(model)

    with ranks(2) as mesh:
        before, after = step(), step(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        assert before.calls[0].is_broken
        promised = advice_of(before, "reduce_dtype").gain_seconds
        gained = before.calls[0].seconds - after.calls[0].seconds
        assert promised == pytest.approx(gained, rel=0.1)
        # with all the memory that there is nothing is quicker
        assert step(memory_budget="8GB").calls[0].seconds == pytest.approx(before.calls[0].seconds)
        assert not [advice for advice in before.advice if advice.kind == "memory_budget"]
