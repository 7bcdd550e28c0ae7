"""The option ``transport="symm_mem"``: results, errors and plans. Kernels for CPUs stand in for those of GPUs."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import compiled_fsdp
from compiled_fsdp import explain
from tests.harness import assert_same, compiled, distributed, forward_backward, fsdp2_record, shard, train, variants
from tests.harness.fake import fake_group
from tests.harness.hardware import GROUPING
from tests.harness.models import broken, small
from tests.harness.ours import collectives_of
from tests.harness.symm_mem import symm_mem_on_cpus

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Inductor does not know the ops")
OPS = {"_low_contention_all_gather", "_low_contention_reduce_scatter"}
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "whole": (small, {}, {}),
    "graph breaks": (broken, {}, {}),
    "bf16, a bucket for each unit": (small, {"bucket": "module"}, {"mp_policy": BF16}),
    "coalesced": (small, {"bucket": 100, "hardware": GROUPING}, {}),
    "graph breaks, bf16": (broken, {}, {"mp_policy": BF16}),
    "Inductor": (small, {"codegen": "inductor"}, {}),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", variants(CASES, "whole", "graph breaks"))
def test_results_are_fsdp2s(rank, world_size, name):
    """Every gather and reduction is one of torch's ops over symmetric memory."""
    make, options, policy = CASES[name]
    with symm_mem_on_cpus():
        model = shard(make(blocks=2), compiled_fsdp.fully_shard, **policy)
        run = compiled(model, transport="symm_mem", **{"hardware": "h100", **options})
        record = train(run)
        launched = collectives_of(lambda: forward_backward(run, 0), "symm_mem::")
    limits = {"rtol": 1e-5, "rtol_of_parameters": 1e-3} if name == "Inductor" else {}
    assert_same(record, fsdp2_record(make(blocks=2), **policy), **limits)
    assert {op.split()[0] for op in launched} == OPS
    for graph in explain(model).graphs:
        assert {planned.transport for planned in graph.plan.launches} <= {"symm_mem_" + op[16:] for op in OPS}


@distributed(world_size=2)
def test_a_rank_that_follows_launches_the_same_collectives(rank, world_size):
    """Its graph breaks. Gloo would not tell the backend's collectives from those that stand in; GPUs would hang."""
    with symm_mem_on_cpus():
        run = compiled(
            shard((small, broken)[rank](blocks=2), compiled_fsdp.fully_shard), transport="symm_mem", hardware="h100"
        )
        record = train(run)
        launched = Counter(op.split()[0] for op in collectives_of(lambda: forward_backward(run, 0), "symm_mem::"))
    assert_same(record, fsdp2_record(small(blocks=2)))
    everyone: list[object] = [None] * world_size
    dist.all_gather_object(everyone, launched)
    assert everyone[0] == everyone[1]
    assert launched.keys() == OPS


@pytest.mark.more
@distributed(world_size=4)
def test_replicas_are_reduced_by_the_backend(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with symm_mem_on_cpus():
        run = compiled(
            shard(small(blocks=2), compiled_fsdp.fully_shard, mesh=mesh), transport="symm_mem", hardware="h100"
        )
        record = train(run)
        launched = collectives_of(lambda: forward_backward(run, 0), "symm_mem::")
        reduced = collectives_of(lambda: forward_backward(run, 0), "_c10d_functional::all_reduce")
    assert_same(record, fsdp2_record(small(blocks=2), mesh=mesh), rtol=1e-5)
    assert {op.split()[0] for op in launched} == OPS
    assert reduced


def refused(**options: object) -> pytest.ExceptionInfo[ValueError]:
    model = compiled_fsdp.fully_shard(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="option 'transport': 'symm_mem'") as caught:
        compiled(model, transport="symm_mem", **options)(torch.ones(2, 8))
    return caught


def test_without_gpus_it_is_refused():
    with fake_group(2):
        said = str(refused().value)
    assert "needs GPUs: torch's symm_mem::_low_contention_all_gather has no kernel for 'cpu'" in said
    assert "compiled-fsdp plan take it" in said


def test_it_is_planned_without_gpus():
    """Matrix products are slowed down less beside copy engines, so a step that computes much is shorter."""
    with fake_group(8), torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))
        compiled_fsdp.fully_shard(model, mp_policy=BF16, reshard_after_forward=True)
        x = torch.ones(8192, 8192, dtype=torch.bfloat16)
        backend, copies = (
            explain(model, (x,), options={"hardware": "h100", "transport": transport})
            for transport in ("backend", "symm_mem")
        )
    for theirs, ours in zip(backend.graphs, copies.graphs, strict=True):
        assert ours.simulation.contention < 0.5 * theirs.simulation.contention
        assert ours.simulation.seconds < theirs.simulation.seconds
        assert {bucket.transport for bucket in theirs.plan.launches} == {""}
        assert all(bucket.transport.startswith("symm_mem") for bucket in ours.plan.launches)


def test_a_mesh_of_several_nodes_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with fake_group(8), symm_mem_on_cpus():
        said = str(refused().value)
        assert "sharded over 8 ranks on 2 nodes" in said
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = compiled_fsdp.fully_shard(nn.Linear(8, 8), mesh=mesh)
        compiled(model, transport="symm_mem")(torch.ones(2, 8)).sum().backward()
