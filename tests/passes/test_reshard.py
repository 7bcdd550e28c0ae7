"""What is marked to be gathered again in backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from compiled_fsdp.passes.pipeline import JOINT_PASSES, run_passes
from tests.passes.graphs import Param, context, trace

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def marks(function: Any, params: list[Param], **options: Any) -> dict[str, CheckpointPolicy | None]:
    """The marks by op; ops that occur several times are numbered as FX does."""
    gm = run_passes(JOINT_PASSES, trace(function, params, torch.ones(2, 4)), context(params, "joint", **options))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in gm.graph.nodes:
        assert ("recompute" in node.meta) == ("ac_graph_id" in node.meta), node
        assert node.op == "call_function" or "recompute" not in node.meta, node
    return {node.name: node.meta.get("recompute") for node in calls}


@pytest.mark.parametrize(("keep", "expected"), [(False, AGAIN), (True, SAVE)])
def test_the_read_and_what_follows_from_it_alone(keep, expected):
    """A kept read is saved itself; what follows from it is for the partitioner to choose."""

    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        full = params[0].unshard(shards[0], slots[0], 0)
        cast = full.to(torch.bfloat16)
        return [x.to(torch.bfloat16) @ cast.t()]

    params = [Param((4, 4), keep=keep)]
    dependents = AGAIN if not keep else None
    assert marks(function, params) == {
        "unshard": expected,
        "_to_copy": dependents,  # the weight's cast
        "_to_copy_1": None,  # the activation's
        "t": dependents,
        "mm": None,
    }


def test_merged_weights_and_norms():
    """`W + A @ B` and `W / W.norm()`: computed from parameters alone, so not to be saved."""

    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        w, a, b = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        merged = w + a @ b
        return [x @ (merged / merged.norm())]

    params = [Param((4, 4)), Param((4, 2)), Param((2, 4))]
    found = marks(function, params)
    assert found.pop("mm_1") is None
    assert set(found.values()) == {AGAIN}
    assert len(found) == 7  # three reads, mm, add, norm, div


def test_constants_are_part_of_it():
    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        return [x @ (params[0].unshard(shards[0], slots[0], 0) * torch.arange(4.0))]

    params = [Param((4, 4))]
    found = marks(function, params)
    assert found["mul"] == AGAIN
    assert found["mm"] is None


def test_what_mixes_kept_and_resharded_parameters_is_not_saved():
    """It would hold on to the resharded one, too; the kept read itself still is."""

    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        kept, resharded = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        mixed = kept + resharded
        return [x @ mixed.t(), x @ kept.t()]

    params = [Param((4, 4), keep=True), Param((4, 4))]
    assert marks(function, params) == {
        "unshard": SAVE,
        "unshard_1": AGAIN,
        "add": AGAIN,
        "t": AGAIN,
        "mm": None,
        "t_1": None,
        "mm_1": None,
    }


def test_random_numbers_are_not_drawn_again():
    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        full = params[0].unshard(shards[0], slots[0], 0)
        noisy = torch.bernoulli(full.sigmoid())
        return [x @ noisy.t()]

    params = [Param((4, 4))]
    assert marks(function, params) == {"unshard": AGAIN, "sigmoid": AGAIN, "bernoulli": None, "t": None, "mm": None}


@pytest.mark.parametrize(("keep_single", "expected"), [(False, AGAIN), (True, SAVE)])
def test_in_a_group_of_one_nothing_is_saved(keep_single, expected):
    """There the shard is the parameter, and saved anyway."""

    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        return [x @ params[0].unshard(shards[0], slots[0], 0)]

    params = [Param((4, 4), keep=True, world=1)]
    assert marks(function, params, collectives_at_world_size_1=keep_single)["unshard"] == expected


def test_the_summary_counts():
    def function(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
        kept, resharded = (p.unshard(shards[i], slots[i], i) for i, p in enumerate(params))
        return [x @ kept.t() @ resharded.t()]

    params = [Param((4, 4), keep=True), Param((4, 4))]
    ctx = context(params, "joint")
    run_passes(JOINT_PASSES, trace(function, params, torch.ones(2, 4)), ctx)
    assert ctx.summary == {"reshard": "1 of 2 reads gathered again in backward, with 1 dependents"}
