"""Several meshes in one model and in one process: experts, parameters with a mesh of their own, `dp_mesh_dims`, a part
of a mesh."""

import functools
import uuid
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from compiled_fsdp import explain, fully_shard, replicate
from tests.harness import Transformer, alone, assert_same, compiled, distributed, fsdp2, loss_of, shard, train, variants
from tests.harness.fake import fake_group
from tests.harness.meshes import mesh_2d
from tests.harness.models import small
from tests.harness.ours import counted
from tests.harness.spawn import run_ranks
from tests.harness.untouched import refused

RUN = {"eager": lambda model: model, "whole": partial(compiled, fullgraph=True)}


def with_experts(mesh: DeviceMesh, *, blocks: int = 2) -> Transformer:
    """A transformer whose MLPs are experts: others on each rank of mesh["ep"], the same along mesh["dp"]."""
    model = small(blocks=blocks)
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight.mul_(1 + mesh.get_local_rank("ep"))
            block.down.weight.mul_(1 + mesh.get_local_rank("ep"))
    return model


def shard_with_experts(function, mesh: DeviceMesh) -> nn.Module:
    model = with_experts(mesh)
    for block in model.blocks:
        function([block.up, block.down], mesh=mesh["dp"])
    return shard(model, function)


@pytest.mark.parametrize("run", variants(RUN, "eager"))
@distributed(world_size=4)
def test_experts_on_a_part_of_the_mesh(rank, world_size, run):
    """They are gathered and averaged over their own two ranks, everything else over all four."""
    mesh = mesh_2d("dp", "ep")
    model, reference = shard_with_experts(fully_shard, mesh), shard_with_experts(torch_fully_shard, mesh)
    up, norm = model.blocks[0].up.weight, model.blocks[0].norm2.weight
    assert (up.device_mesh.size(), norm.device_mesh.size()) == (2, 4)
    assert_same(train(RUN[run](model)), train(reference), rtol=1e-6)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, up.full_tensor())
    assert torch.equal(everyone[0], everyone[2])
    assert not torch.equal(everyone[0], everyone[1]), "two experts that were reduced together"


@distributed(world_size=4)
def test_plans_of_several_meshes(rank, world_size):
    """No bucket holds parameters of two meshes, and all ranks have one plan."""
    model = shard_with_experts(fully_shard, mesh_2d("dp", "ep"))
    run = compiled(model, fullgraph=True)
    loss_of(run, rank, 0).backward()
    graphs = explain(model).graphs
    meshes = [sorted({bucket.group_id for bucket in graph.plan.launches}) for graph in graphs]
    assert meshes == [[0, 1], [0, 1]]
    texts = [None] * world_size
    dist.all_gather_object(texts, [graph.planned for graph in graphs])
    assert all(text == texts[0] for text in texts)


def mesh_for_each(mesh: DeviceMesh, experts: set[nn.Parameter]):
    """A `shard_placement_fn` that gives the experts mesh["dp"]; None where torch has no result for that."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        return None
    info = common.FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0)
    everywhere = common.FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)

    def place(param: nn.Parameter):
        return common.ShardPlacementResult(Shard(0), info if param in experts else everywhere)

    return place


@pytest.mark.parametrize("run", ["eager", pytest.param("whole", marks=pytest.mark.more)])
@distributed(world_size=4)
def test_a_mesh_for_each_parameter(rank, world_size, run):
    """`shard_placement_fn` returns a `ShardPlacementResult`: parameters of one unit on two meshes."""
    mesh = mesh_2d("dp", "ep")
    models = []
    for function in (fully_shard, torch_fully_shard):
        model = with_experts(mesh)
        experts = {p for block in model.blocks for p in (block.up.weight, block.down.weight)}
        if (place := mesh_for_each(mesh, experts)) is None:
            return  # torch 2.11
        models.append(shard(model, function, shard_placement_fn=place))
    model, reference = models
    sizes = [p.device_mesh.size() for p in model.parameters()]
    assert sizes == [p.device_mesh.size() for p in reference.parameters()]
    assert set(sizes) == {2, 4}
    assert_same(train(RUN[run](model)), train(reference), rtol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("run", [pytest.param("eager", marks=pytest.mark.more), "whole"])
@distributed(world_size=4)
def test_models_on_different_meshes_that_take_turns(rank, world_size, run):
    """Of the same classes, with other meshes, policies and options: each keeps its own."""
    mesh = mesh_2d("dp", "ep")
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = [
        {"mesh": mesh["dp"]},
        {"mesh": mesh["ep"], "reshard_after_forward": False},
        {"mesh": mesh},
        {"mp_policy": half},
        {"shard_placement_fn": lambda param: Shard(param.dim() - 1) if param.shape[-1] % 4 == 0 else None},
    ]
    ours, theirs = [], []
    for seed, how in enumerate(options):
        model, reference = shard(small(seed), fully_shard, **how), fsdp2(small(seed), **how)
        ours.append((RUN[run](model), torch.optim.AdamW(model.parameters(), lr=0.01)))
        theirs.append((reference, torch.optim.AdamW(reference.parameters(), lr=0.01)))
    for _ in range(2):
        for (mine, optimizer), (reference, other) in zip(ours, theirs, strict=True):
            assert_same(
                train(mine, steps=1, optimizer=optimizer), train(reference, steps=1, optimizer=other), rtol=1e-5
            )


def on_two_groups(rank: int, world_size: int) -> list[tuple[int, int, bool]]:
    """Equal models, first along one dimension of the mesh, then along the other: hits and misses of Inductor's cache,
    and whether the gradients were FSDP2's."""
    mesh, x = mesh_2d("dp", "ep"), torch.full((2, 4), rank + 1.0)
    results = []
    for where in ("dp", "ep", "dp", "ep"):
        torch.compiler.reset()
        counters.clear()
        grads = []
        for function in (fully_shard, torch_fully_shard):
            torch.manual_seed(0)
            model = function(nn.Linear(4, 4), mesh=mesh[where])
            run = compiled(model, codegen="inductor") if function is fully_shard else model
            run(x).square().sum().backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
        same = [torch.allclose(mine, theirs) for mine, theirs in zip(*grads, strict=True)]
        found = counters["inductor"]
        results.append(
            (found["fxgraph_cache_hit"], found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"], all(same))
        )
    return results


@pytest.mark.more
def test_equal_models_on_different_groups_with_a_warm_cache(monkeypatch):
    """Code that names one group's collectives is never taken for the other's."""
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", uuid.uuid4().hex)  # no graph of an earlier run
    for first, second, third, fourth in run_ranks(on_two_groups, 4):
        assert all(same for *_, same in (first, second, third, fourth))
        assert sum(first[:2]) == sum(second[:2]) == 2
        assert [found[:2] for found in (third, fourth)] == [(2, 0), (2, 0)]


class Mlp(nn.Module):
    """A norm and two layers, without vocabulary or positions: DTensors go in and come out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(seed) for seed in range(2))
        self.last = nn.Linear(8, 7, bias=False)  # rows that the shards do not divide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def spread(mesh: DeviceMesh, build: Callable[[], nn.Module] = Stack) -> nn.Module:
    """Columns, then rows over "tp"; replicated along every other dimension."""
    model = build()
    tp = mesh.mesh_dim_names.index("tp")
    how = {"up.weight": Shard(0), "down.weight": Shard(1)}
    for name, param in list(model.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        placements[tp] = next((p for end, p in how.items() if name.endswith(end)), Replicate())
        module, _, attribute = name.rpartition(".")
        setattr(
            model.get_submodule(module), attribute, nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
        )
    return model


def step_on_full_mesh(mesh: DeviceMesh):
    """Inputs are DTensors on the mesh, too: by batch along data parallelism."""
    where = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]

    def step(model: nn.Module, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        x = distribute_tensor(torch.randn(8, 8), mesh, where)
        y = model(x).redistribute(placements=where).to_local()
        loss = y.square().mean()
        loss.backward()
        return loss.detach()

    return step


DIMS = {
    "shards": ((2, 2), ("data", "tp"), {"shard": "data"}),
    "tp first": ((2, 2), ("tp", "data"), {"shard": "data"}),
    "two flattened": ((2, 2, 1), ("data", "cp", "tp"), {"shard": ("data", "cp")}),
    "replicas": ((2, 2, 1), ("replicas", "data", "tp"), {"shard": "data", "replicate": "replicas"}),
    "replicas alone": ((2, 2), ("data", "tp"), {"replicate": "data"}),
    "two of replicas": ((2, 2, 1), ("data", "cp", "tp"), {"replicate": ("data", "cp")}),
}


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One object in a process: torch's FSDP2 takes no equal one, which DTensor's caches may bring from an earlier
    test."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 and later")
@pytest.mark.parametrize(
    ("run", "what"),
    variants(
        [*(("eager", what) for what in DIMS), *(("whole", what) for what in ("shards", "replicas", "replicas alone"))],
        ("eager", "shards"),
        ("whole", "replicas alone"),
    ),
)
@distributed(world_size=4)
def test_dimensions_of_a_full_mesh(rank, world_size, run, what):
    """`dp_mesh_dims`: placements, gradients and parameters as FSDP2's; gradients stay Partial until they are
    reduced."""
    from torch.distributed.fsdp import DataParallelMeshDims

    shape, names, dims = DIMS[what]
    mesh = mesh_of(shape, names)
    options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(**dims)}
    model, reference = shard(spread(mesh), fully_shard, **options), fsdp2(spread(mesh), **options)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.placements == theirs.placements, name
        assert mine.device_mesh == theirs.device_mesh, name
        assert mine.to_local().shape == theirs.to_local().shape, name
    step = step_on_full_mesh(mesh)
    assert_same(train(RUN[run](model), step), train(reference, step), rtol=1e-6)
    if run == "eager" and mesh["tp"].size() == 1:  # no collectives but ours
        found = counted(lambda: step(model, 0))
        assert (found["RS"], found["AR"]) == (3 if "shard" in dims else 0, 3 if "replicate" in dims else 0), found


class Local(nn.Module):
    """Rows of a table looked up in the local tensor of the full parameter, as torchtitan's embedding does under a full
    mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(13, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(x.to_local().abs().mul(3).long()[:, 0].clamp(0, 12), self.weight.to_local())
        return x + DTensor.from_local(rows, x.device_mesh, x.placements, run_check=False)


class LocalGradients(Local):
    """The same, where the module says what its gradient is: a sum over data parallelism that is still to be made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = self.weight.device_mesh.mesh_dim_names
        sums = [Replicate() if name == "tp" else Partial() for name in names]
        rows = nn.functional.embedding(
            x.to_local().abs().mul(3).long()[:, 0].clamp(0, 12), self.weight.to_local(grad_placements=sums)
        )
        return x + DTensor.from_local(rows, x.device_mesh, x.placements, run_check=False)


class Mapped(Local):
    """The same by ``local_map``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.embedding(x.abs().mul(3).long()[:, 0].clamp(0, 12), weight)

        placements = (tuple(x.placements), (Replicate(),) * x.device_mesh.ndim)
        return local_map(rows, out_placements=list(x.placements), in_placements=placements)(x, self.weight)


class Lookup(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Sequential(Local(), LocalGradients(), Mapped())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tables(x))


def step_on_local_batches(mesh: DeviceMesh):
    """Each rank's own batch, in a DTensor that says it was the same along data parallelism."""

    def step(model: nn.Module, index: int) -> torch.Tensor:
        torch.manual_seed(100 * mesh.get_local_rank("data") + index)
        x = DTensor.from_local(torch.randn(4, 8), mesh, [Replicate()] * mesh.ndim, run_check=False)
        loss = model(x).redistribute(placements=[Replicate()] * mesh.ndim).to_local().square().mean()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 and later")
@pytest.mark.parametrize("inputs", ["replicated", pytest.param("by batch", marks=pytest.mark.more)])
@pytest.mark.parametrize("run", variants(RUN, "eager"))
@distributed(world_size=4)
def test_gradients_that_say_replicate(rank, world_size, run, inputs):
    """Along data parallelism a gradient's local tensor is reduced, whatever its placement says: inputs that say
    Replicate, and ``weight.to_local()``, with ``grad_placements`` and without, and ``local_map`` in a module."""
    from torch.distributed.fsdp import DataParallelMeshDims

    shape, names, dims = DIMS["shards"]
    mesh = mesh_of(shape, names)
    options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(**dims)}
    model, reference = (function(spread(mesh, Lookup), **options) for function in (fully_shard, torch_fully_shard))
    step = step_on_local_batches(mesh) if inputs == "replicated" else step_on_full_mesh(mesh)
    assert_same(train(RUN[run](model), step, steps=2), train(reference, step, steps=2), rtol=1e-6)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 and later")
def test_dimensions_that_cannot_be():
    from torch.distributed.fsdp import DataParallelMeshDims as Dims

    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
        wrong = spread(mesh)
        weight = wrong.last.weight.detach().full_tensor()
        wrong.last.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Replicate(), Replicate()]))
        for model, dims, error, match in (
            (Stack(), Dims(shard="dp"), ValueError, "dp_mesh_dims all parameters must be DTensors.*plain tensor"),
            (wrong, Dims(shard="dp"), ValueError, r"'last.weight' of Stack has S.*'dp'.*expects Replicate\(\) there"),
            (spread(mesh), Dims(shard="pp"), ValueError, "no dimension 'pp'"),
            (spread(mesh), Dims(shard=("dp", "cp")), ValueError, "must be neighbours"),
            (spread(mesh), ("dp",), ValueError, "DataParallelMeshDims, but got tuple"),
        ):
            with refused(error, match, model):
                fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        with refused(ValueError, "replicate: dp_mesh_dims names dimensions to shard over", model := spread(mesh)):
            replicate(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
        with refused(ValueError, "shard_placement_fn chooses the dimension that is sharded", model := spread(mesh)):
            fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(replicate="dp"), shard_placement_fn=lambda p: Shard(0))
        with refused(ValueError, "on mesh=", model := spread(init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)))):
            fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["slice", pytest.param("flattened", marks=pytest.mark.more)])
def test_a_mesh_that_is_part_of_a_larger_one(rank, world_size, kind):
    """Nothing may assume the world's rank or size."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    mesh = world["dp"] if kind == "slice" else world["other", "dp"]._flatten("all")
    model = shard(small(), fully_shard, mesh=mesh)
    mine = dist.get_rank(mesh.get_group())

    def step(run, index):
        loss = loss_of(run, mine, index)
        loss.backward()
        return loss.detach()

    record, expected = train(compiled(model), step), train(small(), alone(mesh.size()))
    for name, tensor in expected.parameters[-1].items():
        torch.testing.assert_close(record.parameters[-1][name], tensor, rtol=1e-4, atol=1e-5)
    if kind == "slice":
        assert_same(record, train(fsdp2(small(), mesh=mesh), step))
