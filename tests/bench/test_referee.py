"""The referee of bench/plan_quality.py against the planner's simulator, which it shares no code with but the cost
model."""

import pytest
import torch

from bench import torch_plans
from bench.capture import Shape, capture, fake_group
from bench.plan_quality import PHASES, plain, priced
from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes
from compiled_fsdp.passes.plan.choose import PlanRules
from tests.harness import variants

SMALL = Shape("tiny", 512, 8, 4, 1024, 3, 4096)


@pytest.fixture(scope="module")
def captured():
    with fake_group(64):
        yield capture(SMALL, 64, 512)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "rules",
    [PlanRules(), PlanRules(bucket="module"), PlanRules(bucket="parameter", overlap=False)],
    ids=str,
)
def test_both_price_a_plan_alike(captured, phase, rules):
    ctx = captured.context(phase, rules)
    gm = run_passes(GRAPH_PASSES, copy_of(getattr(captured, phase)), ctx)
    price = priced(gm, captured, phase, 64)
    assert price.seconds == pytest.approx(ctx.planned.simulation.seconds, rel=0.03)
    assert price.peak + ctx.planned.tasks.persistent <= ctx.planned.simulation.peak


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's passes take other arguments before 2.13")
@pytest.mark.parametrize("name", variants(torch_plans.PASSES, "torch_manual"))
def test_torchs_passes_run_and_keep_what_is_communicated(captured, name):
    gathered = reduced = 0
    for phase in PHASES:
        before = plain(captured, phase, "unbucketed")
        alone = priced(before, captured, phase, 64)
        gm = torch_plans.run(name, before, ["embedding", "layers.0", "layers.1", "layers.2", ["norm", "head"]])
        price = priced(gm, captured, phase, 64)
        assert 0 < price.collectives <= alone.collectives
        gathered += alone.collectives
        reduced += price.collectives
    if name == "torch_manual":
        assert reduced < gathered / 2  # it makes buckets: the units are found
