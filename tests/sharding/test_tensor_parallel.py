"""Parameters that tensor parallelism has made DTensors, sharded once more."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.frontend.eager_reads import BlockHandle
from tests.harness import Transformer, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, variants
from tests.harness.checkpoints import state_of
from tests.harness.fake import fake_group
from tests.harness.meshes import mesh_2d
from tests.harness.models import broken, small
from tests.harness.reference import assert_equal
from tests.harness.untouched import refused


def parallel(mesh: DeviceMesh, *, sequence: bool = False, build=small) -> nn.Module:
    """A transformer, its attention and MLP split over mesh["tp"]; with `sequence` everything else too, by sequence or
    vocabulary."""
    model = build()
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": rows, "down": rows}
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": PrepareModuleInput(**gather)}
        plan["up"] = ColwiseParallel(input_layouts=Shard(1))
        root = {"position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
        root["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        root |= {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], root)
    else:
        plan["up"] = ColwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {name: how for name, how in plan.items() if _has(block, name)})
    return model


def _has(block: nn.Module, name: str) -> bool:
    return any(found == name for found, _ in block.named_modules())


def step(model: nn.Module, index: int) -> torch.Tensor:
    """Ranks of one tensor-parallel group have the same batch."""
    loss = loss_of(model, torch.distributed.get_rank() // 2, index)
    loss.backward()
    return loss.detach()


def both(mesh: DeviceMesh, *, sequence: bool = False, build=small, **options) -> tuple[nn.Module, nn.Module]:
    model, reference = parallel(mesh, sequence=sequence, build=build), parallel(mesh, sequence=sequence, build=build)
    return shard(model, fully_shard, mesh=mesh["dp"], **options), fsdp2(reference, mesh=mesh["dp"], **options)


def same_layout(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.placements == theirs.placements, name
        assert mine.device_mesh == theirs.device_mesh, name
        layouts = [(param.shape, param.stride(), param.to_local().shape) for param in (mine, theirs)]
        assert layouts[0] == layouts[1], name
        assert mine.grad is None or mine.grad.placements == theirs.grad.placements, name


# ---- results ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "sequence"),
    variants([("eager", True), ("whole", False), ("eager", False), ("whole", True)], ("eager", True)),
)
@distributed(world_size=4)
def test_equal_to_fsdp2(rank, world_size, run, sequence):
    """Placements (_StridedShard where both cut dimension 0), local shapes, losses, gradients and parameters are
    FSDP2's."""
    model, reference = both(mesh_2d("dp", "tp"), sequence=sequence, build=partial(Transformer, blocks=1))
    same_layout(model, reference)
    if not sequence:
        up, down, norm = model.blocks[0].up.weight, model.blocks[0].down.weight, model.blocks[0].norm1.weight
        assert [type(p).__name__ for p in up.placements] == ["_StridedShard", "Shard"]
        assert (down.placements, norm.placements) == ((Shard(0), Shard(1)), (Shard(0),))
    call = compiled(model, fullgraph=True) if run == "whole" else model
    assert_same(train(call, step), train(reference, step), rtol=1e-6)
    step(call, 5), step(reference, 5)
    same_layout(model, reference)
    if run == "whole":  # planned with tensor parallelism's own collectives, over the same wires
        assert all(graph.tasks.shares_links for graph in explain(model).graphs)


@pytest.mark.more
@distributed(world_size=4)
def test_graph_breaks(rank, world_size):
    """Each block is a graph of its own: gathers across the breaks are in flight beside tensor parallelism's
    collectives."""
    model, reference = both(mesh_2d("dp", "tp"), build=broken)
    assert_same(train(compiled(model), step), train(reference, step), rtol=1e-6)
    # on torch 2.11 equal blocks share theirs
    assert len(explain(model).graphs) > 2 or torch.__version__ < "2.13"


@pytest.mark.more
@distributed(world_size=4)
def test_inductor(rank, world_size):
    model, reference = both(mesh_2d("dp", "tp"))
    call = compiled(model, codegen="inductor", fullgraph=True, bucket="module")
    assert_same(train(call, step, steps=1), train(reference, step, steps=1), rtol=1e-4)
    forward, backward = explain(model).graphs
    assert (forward.count("gather"), backward.count("reduce")) == (2, 2), (
        "plain parameters and others, a unit's in one bucket"
    )


@pytest.mark.parametrize("run", [pytest.param("eager", marks=pytest.mark.more), "whole"])
@distributed(world_size=4)
def test_mixed_precision(rank, world_size, run):
    """Computed and communicated in bf16, tensor parallelism's activations too; shards stay float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = both(mesh_2d("dp", "tp"), mp_policy=policy)
    call = compiled(model, fullgraph=True) if run == "whole" else model
    assert_same(train(call, step, steps=2), train(reference, step, steps=2), rtol=1e-5)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("run", ["eager", pytest.param("whole", marks=pytest.mark.more)])
@distributed(world_size=4)
def test_accumulation(rank, world_size, run):
    """Without sync nothing is reduced over data parallelism's ranks; the sum is FSDP2's."""
    model, reference = both(mesh_2d("dp", "tp"))
    call = compiled(model, fullgraph=True) if run == "whole" else model

    def steps_of(m):
        def three(called, index):
            for number in range(3):
                m.set_requires_gradient_sync(number == 2)
                loss = step(called, 3 * index + number)
                assert (next(m.parameters()).grad is None) == (number < 2)
            return loss

        return three

    assert_same(train(call, steps_of(model), steps=2), train(reference, steps_of(reference), steps=2), rtol=1e-5)


@distributed(world_size=4)
def test_nothing_is_held_for_backward(rank, world_size):
    """Uncompiled: what autograd saves of a DTensor is gathered again, as of a plain parameter."""
    model, _ = both(mesh_2d("dp", "tp"), reshard_after_forward=True)
    storages = []
    gather = BlockHandle.gather

    def recorded(block: BlockHandle, index: int) -> dict[int, torch.Tensor]:
        fulls = gather(block, index)
        storages.extend(StorageWeakRef(full.untyped_storage()) for full in fulls.values())
        return fulls

    with mock.patch.object(BlockHandle, "gather", recorded):
        loss = loss_of(model, rank // 2, 0)
    assert len(storages) == len(list(model.parameters()))
    assert all(storage.expired() for storage in storages)
    loss.backward()


# ---- what others see -------------------------------------------------------------------------------------------------
@distributed(world_size=4)
def test_clipping_and_checkpoints(rank, world_size, tmp_path: Path):
    """FSDP2's norm; state dicts and checkpoints under the plain names, FSDP2's own too."""
    mesh = mesh_2d("dp", "tp")
    model, reference = both(mesh)
    plain = small()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_equal(state_of(model), {name: value.detach() for name, value in plain.state_dict().items()})
    norms = []
    for m in (model, reference):
        step(m, 0)
        # of tensors on different meshes torch's function makes no one norm
        for where in (mesh, mesh["dp"]):
            norm = clip_grad_norm_([p for p in m.parameters() if p.device_mesh == where], 0.05, foreach=True)
            norms.append(norm.full_tensor())
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    torch.testing.assert_close(norms[:2], norms[2:], rtol=1e-6, atol=0)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=1e-6, atol=1e-7)

    for number, (saved, build) in enumerate(
        [(model, fully_shard), (reference, fully_shard), (model, torch_fully_shard)]
    ):
        dcp.save(get_model_state_dict(saved), checkpoint_id=tmp_path / str(number))
        other = shard(parallel(mesh), build, mesh=mesh["dp"])
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=tmp_path / str(number))
        assert_equal(state_of(other), state_of(saved))


def test_replicas():
    """HSDP and tensor parallelism, 2 x 2 x 2: placements and shapes as FSDP2's."""
    with fake_group(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "dp", "tp"))
        model = shard(parallel(mesh), fully_shard, mesh=mesh["replicas", "dp"])
        reference = fsdp2(parallel(mesh), mesh=mesh["replicas", "dp"])
        same_layout(model, reference)
        assert model.blocks[0].down.weight.placements == (Replicate(), Shard(0), Shard(1))


def test_what_cannot_be():
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))

        def linear(inner: DeviceMesh, *placements) -> nn.Module:
            model = nn.Linear(8, 8, bias=False)
            model.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), inner, placements, run_check=False))
            return model

        for model, error, match in (
            (linear(mesh["tp"], Partial()), NotImplementedError, "redistribute Partial to Replicate or Shard"),
            (linear(mesh, Replicate(), Replicate(), Shard(0)), NotImplementedError, "3 mesh dimensions.*at most two"),
            (linear(init_device_mesh("cpu", (8,)), Shard(0)), ValueError, "Make both as slices of one mesh"),
        ):
            with refused(error, f"'weight' of Linear.*{match}", model):
                fully_shard(model, mesh=mesh["dp"])
