"""The planner knows what codecs send, copy and hold."""

import math
from dataclasses import replace

import pytest
import torch

from compiled_fsdp import WirePolicy, explain, fully_shard
from compiled_fsdp.buckets.spec import COALESCED, FLAT, Kind
from compiled_fsdp.passes.cost import PROFILES, Wires
from compiled_fsdp.passes.plan.search import OverBudget
from tests.harness import batch, compiled, distributed, shard, variants
from tests.harness.fake import fake_group
from tests.harness.models import small
from tests.memory.test_budget import SIZE, measured_peak

INT8 = WirePolicy("int8", "int8")
SLOW = replace(PROFILES["cpu"], inside=Wires(1e-6, 1e7))
FEEDBACK = WirePolicy("int8", "int8", error_feedback=True)


def planned(policy, **options):
    with fake_group(8):
        model = shard(small(dim=64, blocks=2), fully_shard, wire_policy=policy)
        compiled(model, **options)(batch(0, 0, size=SIZE)[0]).sum().backward()
        return model, explain(model).graphs


@pytest.mark.parametrize("policy", variants([None, INT8], INT8), ids=["exact", "int8"])
def test_costs_of_a_collective(policy):
    """Bytes on the channel are the encoded ones, bytes in memory and of copies those of the full tensors."""
    _, (_, backward) = planned(policy)
    tasks = backward.tasks
    for kind in (tasks.gathers, tasks.reductions):
        for task in kind:
            assert task.size.full == 4 * backward.reads[task.read].elements
            assert (task.size.sent == task.size.full) == (policy is None)
    if policy is None:
        return
    gathered, reduced = tasks.gathers[:2], tasks.reductions[:2]
    rate = tasks.channels[gathered[0].channel].bytes_per_second
    latency = tasks.channels[gathered[0].channel].latency
    assert tasks.seconds(gathered, FLAT) == latency + sum(task.size.sent for task in gathered) / rate
    for form in (FLAT, COALESCED):
        assert tasks.packing(reduced, form, Kind.REDUCE) >= sum(t.size.full for t in reduced) * tasks.copy_seconds
        for kind, members in ((Kind.GATHER, gathered), (Kind.REDUCE, reduced)):
            copied = sum(task.size.full for task in members) * tasks.copy_seconds
            assert tasks.unpacking(members, form, kind) >= copied


@pytest.mark.more
@pytest.mark.parametrize("policy", [INT8, FEEDBACK], ids=["int8", "feedback"])
def test_the_least_budget_is_enough(policy):
    """Of the plan and of the lowered graph, which is counted by itself."""
    with fake_group(8):
        model = shard(small(dim=64, blocks=2), fully_shard, wire_policy=policy)
        with pytest.raises(OverBudget, match="'memory_budget'") as error:
            compiled(model, memory_budget=10_000)(batch(0, 0, size=SIZE)[0])
        torch.compiler.reset()
        compiled(model, memory_budget=error.value.least)(batch(0, 0, size=SIZE)[0]).sum().backward()


def test_what_is_kept_for_the_next_gradient_is_counted():
    _, (forward, _) = planned(INT8)
    model, (with_feedback, _) = planned(FEEDBACK)
    padded = sum(8 * -(-p.shape[0] // 8) * math.prod(p.shape[1:]) for p in model.parameters())
    assert with_feedback.tasks.persistent - forward.tasks.persistent == 4 * padded


@pytest.mark.more
@distributed(world_size=2)
def test_the_measured_peak_is_at_most_the_simulated_one(rank, world_size):
    for policy in (INT8, FEEDBACK):
        measured, graphs = measured_peak(rank, wire=policy)
        simulated = max(graph.simulation.peak for graph in graphs)
        assert 0.7 * simulated < measured <= simulated


# For each policy and each kind of collective: its codecs, and the share of the bytes that is left.
SAVED = {
    None: {},
    INT8: {"gather": (("int8/256",), 0.3), "reduce": (("int8/256",), 0.3)},
    WirePolicy(reduce="bfloat16"): {"reduce": (("bfloat16",), 0.5)},
}


@pytest.mark.parametrize("policy", variants(SAVED, INT8), ids=["exact", "int8", "reductions in bfloat16"])
def test_explain_says_what_codecs_save(policy):
    """Bytes, and the time of a plan without them; nothing of a model that sends what there is."""
    with fake_group(8):
        model = shard(small(dim=64, blocks=2), fully_shard, wire_policy=policy)
        compiled(model, hardware=SLOW)(batch(0, 0, size=SIZE)[0]).sum().backward()
        explained = explain(model)
    for savings in explained.codecs:
        assert savings.saved_seconds > 0.5 * (savings.exact_bytes - savings.bytes) / SLOW.inside.bytes_per_second
        assert str(savings) in " ".join(line.strip() for line in str(explained).splitlines())
    assert {s.kind: (s.codecs, round(s.bytes / s.exact_bytes, 1)) for s in explained.codecs} == SAVED[policy]
    assert [s["kind"] for s in explained.to_dict()["codecs"]] == list(SAVED[policy])
