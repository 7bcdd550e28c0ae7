"""Parameters of dtypes that process groups do not know: complex numbers are trained as with FSDP2, and of the others,
which gloo refuses to send, a frozen copy is sharded and gathered."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import compiled_autograd, explain, fully_shard
from tests.harness import WAYS, Record, assert_same, compiled, distributed, variants
from tests.harness.extensions import Split, assert_all_equal, train_locally, wrap
from tests.harness.meshes import mesh_2d
from tests.harness.models import seeded, small
from tests.harness.reference import full

REFUSED_BY_GLOO = ("int16", "uint16", "uint32", "float8_e4m3fn", "float8_e5m2")


class Filter(nn.Module):
    """[B, 8] to [B, 8]: two complex layers, of uneven shards, and real numbers of their result.

    With `tables` it has a frozen parameter of each dtype that gloo refuses, whose values are 1 and 2. Without matrix
    products: those of complex numbers have other last bits where AOTAutograd traces them.
    """

    def __init__(self, dtype: torch.dtype = torch.complex64, *, tables: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 8, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(7, dtype=dtype))
        self.out = nn.Parameter(torch.randn(8, 7, dtype=dtype))
        self.tables = nn.ParameterDict()
        for number, name in enumerate(REFUSED_BY_GLOO if tables else ()):
            values = (torch.arange(5 + number) % 2 + 1).to(getattr(torch, name))
            self.tables[name] = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = (x.unsqueeze(1) * self.weight).sum(-1) + self.bias
        for table in self.tables.values():
            z = z * table.to(torch.float32).mean()
        z = (z.unsqueeze(1) * self.out).sum(-1)
        real, imaginary = torch.view_as_real(z).tanh().unbind(-1)
        return (real * imaginary).to(x.dtype) + x


class Filters(nn.Module):
    """Layers in both dtypes with a real one in between, and a graph break in front of each where it `breaks`."""

    def __init__(self, *, tables: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.blocks = nn.ModuleList(Filter(dtype, tables=tables) for dtype in (torch.complex64, torch.complex128))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.breaks:
                torch._dynamo.graph_break()
            x = block(self.mix(x))
        return x


def sharded(model: Filters, shard_by: Callable[..., nn.Module], **options) -> nn.Module:
    """A unit a block, since the trainable parameters of one have one dtype."""
    for block in model.blocks:
        shard_by(block, **options)
    return shard_by(model, **options)


def without_tables(model: Filters, **options) -> nn.Module:
    """FSDP2's, which leaves the tables that gloo refuses whole on each rank."""
    tables = {table for block in model.blocks for table in block.tables.values()}
    return sharded(model, torch_fully_shard, ignored_params=tables, **options)


def step(model: nn.Module, index: int, *, rank: int | None = None) -> torch.Tensor:
    rank = torch.distributed.get_rank() if rank is None else rank
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * index + rank))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def accumulated(model: nn.Module, index: int, **options) -> torch.Tensor:
    """Two microbatches, of which the first waits."""
    root = getattr(model, "_orig_mod", model)
    root.set_requires_gradient_sync(False)
    step(model, index, **options)
    root.set_requires_gradient_sync(True)
    return step(model, index + 1, **options)


def tables_of(model: nn.Module) -> list[torch.Tensor]:
    """The tables in full, as a forward reads them."""
    for block in model.blocks:
        block.unshard()
    read = [table.detach().view(torch.uint8).clone() for block in model.blocks for table in block.tables.values()]
    for block in model.blocks:
        block.reshard()
    return read


def compiled_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    return model


def record_of(call: nn.Module, model: nn.Module, each_step: Callable[..., torch.Tensor] = step) -> Record:
    """Two steps of AdamW, of what trains: DTensor itself cannot gather the tables on gloo."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, record = torch.optim.AdamW(params.values(), lr=0.01), Record()
    for index in range(2):
        optimizer.zero_grad()
        record.losses.append(each_step(call, index))
        record.gradients.append({name: p.grad.full_tensor() for name, p in params.items()})
        optimizer.step()
        record.parameters.append({name: full(p) for name, p in params.items()})
    return record


RUNS = {**WAYS, "blocks": compiled_blocks, "by parameter": partial(compiled, bucket="parameter")}


CASES = [("eager", False), ("compiled_fsdp", False), ("by parameter", True), ("blocks", False), ("compiled_fsdp", True)]


@pytest.mark.parametrize(
    ("run", "breaks", "each_step"),
    variants(
        [(*case, each_step) for case in CASES for each_step in (step, accumulated)],
        ("eager", False, step),
        ("eager", False, accumulated),
        ("compiled_fsdp", False, step),
    ),
)
@distributed(world_size=2)
def test_equal_to_fsdp2(rank, world_size, run, breaks, each_step):
    """Steps with and without accumulation; the planner counts the bytes that are sent."""
    build = partial(seeded, partial(Filters, tables=True, breaks=breaks))
    model, reference = sharded(build(), fully_shard), without_tables(build())
    tables = [table.view(torch.uint8) for block in reference.blocks for table in block.tables.values()]
    for mine, plain in zip(tables_of(model), tables, strict=True):
        assert torch.equal(mine, plain)
    call = RUNS[run](model)
    assert_same(record_of(call, model, each_step), record_of(reference, reference, each_step))
    if run == "compiled_fsdp" and not breaks:
        reads = explain(model).graphs[0].reads
        itemsize = {getattr(torch, read.dtype): read.bytes // read.elements for read in reads}
        of_trained = {torch.complex64, torch.complex128, torch.float32}
        assert set(itemsize) == of_trained | {getattr(torch, name) for name in REFUSED_BY_GLOO}
        assert all(size == each.itemsize for each, size in itemsize.items()), itemsize


@pytest.mark.parametrize("breaks", [pytest.param(False, marks=pytest.mark.more), True], ids=["whole", "broken"])
@distributed(world_size=2)
def test_compiled_autograd(rank, world_size, breaks):
    """A backward as one graph."""
    build = partial(seeded, partial(Filters, tables=True, breaks=breaks))
    model, reference = sharded(build(), fully_shard), without_tables(build())
    call = compiled(model)

    def as_one_graph(call, index):
        with compiled_autograd(codegen="aot_eager"):
            return step(call, index)

    assert_same(record_of(call, model, as_one_graph), record_of(reference, reference), rtol=1e-6)


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=4)
def test_replicas_and_parts_of_the_ranks(rank, world_size, run):
    """Complex gradients are averaged over shards and then over replicas, or wait for the replicas; backward gathers
    over two ranks of four."""
    mesh = mesh_2d("replicas", "shards")
    build = partial(seeded, partial(Filters, tables=True))
    model, reference = sharded(build(), fully_shard, mesh=mesh), without_tables(build(), mesh=mesh)
    call = WAYS[run](model)

    def in_two_parts(call, index):
        root = getattr(call, "_orig_mod", call)
        root.set_requires_all_reduce(False)
        step(call, index)
        root.set_requires_all_reduce(True)
        return step(call, index + 1)

    for each_step in (step, accumulated, in_two_parts):
        records = record_of(call, model, each_step), record_of(reference, reference, each_step)
        assert_same(*records, rtol=1e-6, rtol_of_parameters=1e-4)
    model, reference = sharded(build(), fully_shard, reshard_after_forward=2), without_tables(build())
    records = record_of(WAYS[run](model), model), record_of(reference, reference)
    assert_same(*records, rtol=1e-6, rtol_of_parameters=1e-4)


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=1)
def test_one_rank(rank, world_size, run):
    """Nothing is sent."""
    build = partial(seeded, partial(Filters, tables=True))
    model, reference = sharded(build(), fully_shard), build()
    params = [p for p in model.parameters() if p.requires_grad]
    step(WAYS[run](model), 0)
    step(reference, 0)
    expected = [p.grad for p in reference.parameters() if p.requires_grad]
    for param, grad in zip(params, expected, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_policies_leave_them_as_they_are(rank, world_size, run):
    """`param_dtype` does with FSDP2 as well; `reduce_dtype` takes the imaginary part away there, or is a TypeError."""
    model, reference = seeded(Filters), seeded(Filters)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    without_tables(reference)
    assert_same(record_of(WAYS[run](model), model), record_of(reference, reference))


@distributed(world_size=2)
def test_states_of_the_first_rank(rank, world_size):
    """`sync_module_states` broadcasts parameters and buffers of all dtypes, the ones that are not contiguous too."""
    model = seeded(partial(Filter, tables=True), seed=rank)
    if rank == 1:
        for table in model.tables.values():
            table.data = (table.data.to(torch.float32) + 1).to(table.dtype)
    model.register_buffer("turned", torch.full((3, 2), 1.0 + rank).to(torch.float8_e5m2).t())
    model.register_buffer("count", torch.tensor(3 + rank, dtype=torch.int16))
    fully_shard(model, sync_module_states=True)
    assert model.turned.float().eq(1).all()
    assert model.count == 3
    model.unshard()
    first = seeded(partial(Filter, tables=True))
    assert torch.equal(model.weight, first.weight)
    for mine, other in zip(model.tables.values(), first.tables.values(), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), other.dtype


class Odd(Split):
    """float32 that is gathered as two numbers of 16 bits: one as int16, and pairs of the other as complex numbers."""

    def fsdp_pre_all_gather(self, mesh):
        upper, lower = self.data_.view(torch.int16).view(*self.data_.shape, 2).unbind(-1)
        pairs = torch.view_as_complex(lower.float().view(*lower.shape[:-1], -1, 2))
        return (upper.contiguous(), pairs), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        upper, pairs = outputs
        lower = torch.view_as_real(pairs).view(upper.shape).to(torch.int16)
        full = torch.stack((upper, lower), -1).view(torch.float32).squeeze(-1)
        return full, (full,)


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_all_gather_extensions(rank, world_size, run):
    """Pieces of such dtypes are sent, too."""
    found = []
    for kind in (Odd, torch.clone):
        model = fully_shard(wrap(small(), kind, "up.weight", "down.weight"))
        found.append(train_locally(model, WAYS[run](model), steps=2))
    assert_all_equal(*found)
