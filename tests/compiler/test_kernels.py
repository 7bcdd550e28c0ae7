"""Bucket kernels in training: the same ops run on the CPU as torch's own operations, and nothing changes but the
copies."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    assert_same,
    collectives_of,
    compiled,
    distributed,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
)
from tests.harness.models import small

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def copies(model: torch.nn.Module, rank: int) -> set[str]:
    """Which of the kernels' ops one step runs."""
    ran = collectives_of(lambda: loss_of(model, rank, 0).backward(), "compiled_fsdp::")
    return {line.split()[0] for line in ran if line.startswith(("pack_", "unpack_"))}


HALF = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
# How the model is sharded, and the kernels' ops that a step runs.
CASES = {
    "float32": ({}, {"pack_shards", "unpack_fulls", "pack_grads"}),
    "bf16": ({"mp_policy": HALF}, {"pack_shards", "unpack_fulls", "pack_grads", "unpack_shards"}),
    "fp16, divided": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=fp16, reduce_dtype=fp16)},
        {"pack_shards", "unpack_fulls", "pack_grads", "unpack_shards"},
    ),
    "another dimension": (
        {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None},
        {"pack_shards", "unpack_fulls", "pack_grads"},
    ),
    "kept": (
        {"reshard_after_forward": False, "mp_policy": HALF},
        {"pack_shards", "unpack_fulls", "pack_grads", "unpack_shards"},
    ),
}  # fmt: skip


@distributed(world_size=2)
@pytest.mark.parametrize("case", variants(CASES, "bf16"))
def test_kernels_change_no_number(rank, world_size, case):
    """Casts and divisions with the copies: equal to FSDP2 in every precision, sharded on another dimension, and with
    parameters kept."""
    options, ops = CASES[case]
    model = shard(small(), fully_shard, **options)
    run = compiled(model, kernels=True, bucket="module", hardware="h100", verify="full")
    record = train(run, steps=2)
    assert_same(record, fsdp2_record(small(), **options, steps=2))
    assert copies(run, rank) == ops
    assert all("kernels" in graph.summary["lower"] for graph in explain(model).graphs)


@pytest.mark.more
@distributed(world_size=2)
def test_kernels_under_inductor(rank, world_size):
    """Its code calls the same ops."""
    run = compiled(shard(small(), fully_shard), codegen="inductor", kernels=True, bucket="module", hardware="h100")
    assert_same(train(run, steps=2), fsdp2_record(small(), steps=2), rtol=1e-5)
    assert copies(run, rank) == {"pack_shards", "unpack_fulls", "pack_grads"}


@pytest.mark.more
@distributed(world_size=2)
def test_a_budget_counts_one_tensor_for_all(rank, world_size):
    """What one kernel unpacks is held until the last of it is used: the peak without a budget is one that is kept, and
    verified."""
    options = {"kernels": True, "hardware": "h100"}
    peak = 0
    for _ in range(2):
        model = shard(small(blocks=2), fully_shard)
        record = train(compiled(model, memory_budget=peak or None, **options), steps=2)
        peak = max(graph.simulation.peak for graph in explain(model).graphs)
    assert_same(record, fsdp2_record(small(blocks=2), steps=2))
