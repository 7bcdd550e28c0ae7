"""Mixed precision by policy, autocast and loss scaling, and the table of dtypes (torch 2.15's, on every torch)."""

import dataclasses

import pytest
import torch
import torch.nn as nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    WAYS,
    assert_same,
    batch,
    compiled,
    distributed,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
    ways_and,
)
from tests.harness.models import small

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

# policy, and the one with which FSDP2 does the same on every torch
TABLE = {
    "none none": ((None, None), (None, None)),
    "bf16 none": ((bf16, None), (bf16, fp32)),
    "bf16 fp32": ((bf16, fp32), (bf16, fp32)),
    "bf16 bf16": ((bf16, bf16), (bf16, bf16)),
    "fp16 none": ((fp16, None), (fp16, fp32)),
    "fp16 fp16": ((fp16, fp16), (fp16, fp16)),
    "none bf16": ((None, bf16), (None, bf16)),
}


def policy(param: torch.dtype | None, reduce: torch.dtype | None, **options) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, **options)


def dtypes_in_graphs(model: nn.Module) -> tuple[set[str], set[str]]:
    """In which dtypes the compiled graphs of `model` gather and reduce."""
    gathered, reduced = set(), set()
    for graph in explain(model).graphs:
        for read in graph.reads:
            gathered.add(read.dtype)
            reduced.add(read.reduce_text)
    return gathered, reduced


@ways_and("dtypes", TABLE, compiled=["bf16 fp32", "fp16 fp16"])
@distributed(world_size=2)
def test_the_dtype_table(rank, world_size, way, dtypes):
    """Equal to FSDP2; shards, gradients and optimizer state stay fp32."""
    ours, theirs = TABLE[dtypes]
    model = shard(small(), fully_shard, mp_policy=policy(*ours))
    record = train(WAYS[way](model))
    assert_same(record, fsdp2_record(small(), mp_policy=policy(*theirs)))
    assert all(p.dtype == p.grad.dtype == fp32 for p in model.parameters())
    if way != "eager":
        param, reduce = (str(dtype or fp32).removeprefix("torch.") for dtype in ours)
        how = f"{reduce} sum/2/1" if ours[1] == fp16 else f"{reduce} avg"
        assert dtypes_in_graphs(model) == ({param}, {how})
        assert len(explain(model).graphs) == 2, "the casts of a policy are in the graphs"


@distributed(world_size=2, reset=True)
def test_an_output_that_has_its_dtype(rank, world_size):
    """The cast is made after the compiled forward, and is no compiled code of its own."""
    torch._dynamo.utils.counters.clear()
    model = fully_shard(small(), mp_policy=policy(None, None, output_dtype=fp32))
    record = train(compiled(model), steps=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_same(record, fsdp2_record(small(), steps=1))


@distributed(world_size=2)
def test_output_dtype_of_the_root_alone(rank, world_size):
    half = policy(bf16, fp32)

    def build(shard_by):
        model = small()
        for block in model.blocks:
            shard_by(block, mp_policy=half)
        return shard_by(model, mp_policy=policy(bf16, fp32, output_dtype=fp32))

    model, seen = build(fully_shard), []
    reference = build(torch.distributed.fsdp.fully_shard)
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run = compiled(model)
    tokens = batch(rank, 0)[0]
    assert run(tokens).dtype == fp32
    assert set(seen) == {bf16}
    assert_same(train(run), train(reference))


# how a model gets fp32 parameters after sharding, by way of the policy's dtype
MOVES = {
    "built in it": (lambda: small().to(bf16), lambda model: model.to(fp32)),
    "there and back": (small, lambda model: model.to(bf16).to(fp32)),
}


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@pytest.mark.parametrize("move", [pytest.param("built in it", marks=pytest.mark.more), "there and back"])
@distributed(world_size=2)
def test_a_policy_outlives_a_dtype_that_equals_it(rank, world_size, run, move):
    """Whether a dtype is the policy's or the parameter's own is not told by their being equal."""
    build, cast = MOVES[move]
    for name in ("bf16 none", "bf16 bf16", "none bf16"):
        ours, theirs = (policy(*dtypes) for dtypes in TABLE[name])
        model = cast(shard(build(), fully_shard, mp_policy=ours))
        assert_same(train(WAYS[run](model), steps=2), train(cast(fsdp2(build(), mp_policy=theirs)), steps=2))
        if run != "eager":
            param, reduce = (str(dtype or fp32).removeprefix("torch.") for dtype in TABLE[name][0])
            assert dtypes_in_graphs(model) == ({param}, {f"{reduce} avg"}), name


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, list[torch.Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair: Pair, *, scale: torch.Tensor, count: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        assert count.dtype == torch.int64
        left = self.a(pair.left) * scale
        return {"out": (left, self.b(pair.right["x"][0]), count)}


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_casts_of_inputs(rank, world_size, run):
    """Nested containers and keywords are cast, integers not; without `cast_forward_inputs` what the user casts
    counts."""
    for casts in (True, False):
        mp = policy(bf16, fp32, cast_forward_inputs=casts, output_dtype=fp32)
        model, reference = (
            fully_shard(Nested(), mp_policy=mp),
            torch.distributed.fsdp.fully_shard(Nested(), mp_policy=mp),
        )
        given = torch.Generator().manual_seed(rank)
        dtype = fp32 if casts else bf16
        x, y, s = (torch.randn(4, 8, generator=given).to(dtype) for _ in range(3))
        outs = [m(Pair(x, {"x": [y]}), scale=s, count=torch.tensor(3)) for m in (WAYS[run](model), reference)]
        for mine, theirs in zip(outs[0]["out"], outs[1]["out"], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        if not casts:
            with pytest.raises(RuntimeError, match="dtype"):
                WAYS[run](model)(Pair(x.float(), {"x": [y]}), scale=s, count=torch.tensor(3))


@distributed(world_size=2)
def test_large_gradients_in_fp16(rank, world_size):
    """A sum of 3e4 from each of two ranks is above fp16's 65504 before it is divided; equal to FSDP2."""
    grads = []
    for shard_by in (torch.distributed.fsdp.fully_shard, fully_shard):
        torch.manual_seed(0)
        model = shard_by(nn.Linear(16, 16, bias=False), mp_policy=policy(fp16, fp16))
        run = compiled(model) if shard_by is fully_shard else model
        (run(torch.full((1, 16), 6e4 - 4e3 * rank)).sum()).backward()
        grads.append(model.weight.grad.full_tensor())
    assert grads[1].isfinite().all()
    assert grads[1].max() > 5e4
    assert torch.equal(*grads)


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_autocast(rank, world_size, run):
    """Alone, and around a policy."""
    for mp in (policy(None, None), policy(bf16, fp32)):
        model, reference = shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)

        def step(m, index):
            with torch.autocast("cpu", dtype=bf16):
                loss = loss_of(m, rank, index)
            loss.backward()
            return loss.detach()

        assert_same(train(WAYS[run](model), step), train(reference, step), rtol=0 if run == "eager" else 2e-2)
        assert all(p.grad.dtype == fp32 for p in model.parameters())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_autocast_does_not_reach_collectives(rank, world_size, run):
    """Torch's on the CPU refuses to put tensors of float16 side by side. The backward runs in it, too."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def step(m, index):
        with torch.autocast("cpu", dtype=bf16):
            loss = m(x).float().square().mean()
            loss.backward()
        return loss.detach()

    mp = policy(fp16, fp32)
    model, reference = shard(Layers(), fully_shard, mp_policy=mp), fsdp2(Layers(), mp_policy=mp)
    assert_same(train(WAYS[run](model), step), train(reference, step), rtol=0 if run == "eager" else 2e-2)


@distributed(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank, world_size):
    model = shard(small(), fully_shard, mp_policy=policy(fp16, fp32))
    run, optimizer, scaler = compiled(model), None, GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor().clone() for p in model.parameters()]
    for overflow in (True, False):
        loss = loss_of(run, rank, 0)
        scaler.scale(loss * (float("inf") if overflow and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(changed) != overflow
        assert scaler.get_scale() == 512.0


@distributed(world_size=2)
def test_unsharding_gathers_in_the_policys_dtype(rank, world_size):
    model = fully_shard(nn.Linear(8, 6), mp_policy=policy(bf16, fp32))
    assert isinstance(model.weight, DTensor)
    model.unshard()
    assert model.weight.dtype == bf16
    assert model.weight.shape == (6, 8)
    model.reshard()
    assert model.weight.dtype == fp32


@distributed(world_size=2)
def test_a_dtype_of_its_own(rank, world_size):
    """torch 2.15's `param_dtype_override_fn`, given on any torch by a policy that has it."""

    @dataclasses.dataclass(frozen=True)
    class Policy:
        param_dtype: torch.dtype | None = bf16
        reduce_dtype: torch.dtype | None = None
        output_dtype: torch.dtype | None = None
        cast_forward_inputs: bool = True
        wrong: bool = False

        def param_dtype_override_fn(self, param: nn.Parameter) -> torch.dtype | None:
            return fp16 if self.wrong else fp32 if param.dim() == 1 else None

    with pytest.raises(ValueError, match=r"param_dtype_override_fn must return None.*'weight' of Linear"):
        fully_shard(nn.Linear(4, 4), mp_policy=Policy(wrong=True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).float() * self.scale

    model = fully_shard(Model(), mp_policy=Policy())
    run = compiled(model)
    run(torch.randn(4, 8)).sum().backward()
    assert dtypes_in_graphs(model) == ({"bfloat16", "float32"}, {"float32 avg"})
    assert all(p.grad.dtype == fp32 for p in model.parameters())


@pytest.mark.parametrize(
    ("mp", "message"),
    [
        ("bf16", "mp_policy must be a MixedPrecisionPolicy"),
        (policy(torch.int32, None), "mp_policy: param_dtype must be a floating-point"),
        (policy(None, "float32"), "mp_policy: reduce_dtype must be a floating-point"),
    ],
)
@distributed(world_size=2)
def test_policies_that_cannot_be(rank, world_size, mp, message):
    with pytest.raises(ValueError, match=message):
        fully_shard(nn.Linear(4, 4), mp_policy=mp)


@pytest.mark.more
@distributed(world_size=2)
def test_inductor(rank, world_size):
    """With generated code: no further from FSDP2 than bf16's own precision."""
    mp = policy(bf16, fp32)
    records = []
    for model in (shard(small(), fully_shard, mp_policy=mp), fsdp2(small(), mp_policy=mp)):
        run = model if records else compiled(model, codegen="inductor")
        records.append(train(run, steps=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)))
    assert_same(*records, rtol=3e-2)
