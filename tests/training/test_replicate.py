"""Whole parameters on every rank: the numbers of DistributedDataParallel and of torch's ``replicate``."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Replicate
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import RanksDiffer, WirePolicy, compiled_autograd, explain, fully_shard, install, replicate
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.ranks.outline import difference_of_outlines, outline_of
from tests.harness import WAYS, assert_same, compiled, ddp, distributed, forward_backward, planned_ops, shard, train
from tests.harness.models import BUILD, Transformer, loss_of, small
from tests.harness.ours import counted, new_group
from tests.harness.reference import assert_equal, assert_same_gradients, full_gradients


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def run_sgd(model: nn.Module, step=forward_backward, *, of: nn.Module | None = None):
    """Three steps with SGD, of ``model`` (or of the module ``of``, which ``model`` has compiled)."""
    return train(model, step, optimizer=sgd(of if of is not None else model))


def captured(model: nn.Module, step: int) -> torch.Tensor:
    with compiled_autograd(codegen="aot_eager"):
        return forward_backward(model, step)


RUNS = {
    "eager": ("whole", lambda model: model, forward_backward),
    "whole graph": ("whole", partial(compiled, fullgraph=True), forward_backward),
    "a graph for each layer": ("broken", compiled, forward_backward),
    "compiled autograd": ("broken", compiled, captured),
}


@distributed(world_size=2)
def test_bits_are_those_of_ddp(rank, world_size):
    """Three steps of SGD: DDP, torch's `replicate`, `replicate` in four ways, and a mesh (replicas, 1 shard)."""
    expected = run_sgd(ddp(BUILD["whole"]()))
    assert_same(run_sgd(shard(BUILD["whole"](), torch_replicate)), expected)
    one_shard = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for (name, (build, way, step)), function in itertools.product(
        RUNS.items(), (replicate, partial(fully_shard, mesh=one_shard))
    ):
        model = shard(BUILD[build](), function)
        call = way(model)
        assert_same(run_sgd(call, step, of=model), expected)
        assert counted(lambda call=call, step=step: step(call, 1)).keys() == {"AR"}, name


@distributed(world_size=2)
def test_parameters_and_collectives(rank, world_size):
    """Whole DTensors under the plain model's names; a planned all-reduce for each bucket, and no gather."""
    plain, model = BUILD["whole"](), shard(BUILD["whole"](), replicate)
    theirs = shard(BUILD["whole"](), torch_replicate)
    assert list(model.state_dict()) == list(plain.state_dict()) == list(theirs.state_dict())
    for (name, mine), other, whole in zip(
        model.named_parameters(), theirs.parameters(), plain.parameters(), strict=True
    ):
        assert mine.placements == other.placements == (Replicate(),), name
        assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names == ("replicate",)
        assert torch.equal(mine.to_local(), whole)
    run = compiled(model, bucket="module", verify="full")
    loss_of(run, rank, 0).backward()
    said = str(explain(model))
    assert "with 13 replicated parameters" in said
    assert "a training step, [0] + [1]" in said  # with the time of a forward that gathers nothing
    forward, backward = explain(model).graphs
    assert planned_ops(forward)["gather"] == 0
    assert (planned_ops(backward)["gather"], planned_ops(backward)["all_reduce"]) == (0, 3)
    assert {bucket.transport for bucket in backward.plan.launches} == {"all_reduce"}
    assert counted(lambda: loss_of(run, rank, 1).backward()) == {"AR": 3}
    # one bucket is launched before the gradients of the next one are computed
    assert backward.collectives[0].compute_between > 0
    # evaluation communicates nothing, so that one rank may do it alone
    if rank == 0:
        with torch.no_grad():
            run(torch.zeros(1, 16, dtype=torch.int64))
            model(torch.zeros(1, 16, dtype=torch.int64))


@distributed(world_size=4)
def test_four_ranks(rank, world_size):
    """The sums of four ranks have other orders than DDP's, because buckets differ: equal up to rounding."""
    expected = run_sgd(ddp(small()))
    for way in WAYS.values():
        model = shard(small(), replicate)
        assert_same(run_sgd(way(model), of=model), expected, rtol=1e-6)


def accumulated(flag: str, model: nn.Module, call: nn.Module, step: int) -> torch.Tensor:
    """Three microbatches, of which the last one reduces."""
    for number in range(3):
        getattr(model, flag)(number == 2)
        loss = loss_of(call, dist.get_rank(), step * 3 + number)
        loss.backward()
        assert (next(model.parameters()).grad is None) == (number < 2)
    return loss.detach()


@pytest.mark.parametrize("dtype", [None, torch.float16])
@distributed(world_size=2)
def test_accumulation(rank, world_size, dtype):
    """Neither flag sends anything before the last microbatch. `.grad` comes with it: that of torch's `replicate` under
    `set_requires_gradient_sync`, which in float32 is its result under `set_requires_all_reduce`, too."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    flags = ("set_requires_gradient_sync", "set_requires_all_reduce")
    theirs = [shard(small(), torch_replicate, mp_policy=policy) for _ in flags]
    expected = [
        run_sgd(model, lambda model, step, flag=flag: accumulated(flag, model, model, step))
        for model, flag in zip(theirs, flags, strict=True)
    ]
    for (number, flag), way in itertools.product(enumerate(flags), WAYS.values()):
        model = shard(small(), replicate, mp_policy=policy)
        step, call = partial(accumulated, flag, model), way(model)
        # float16 rounds the pending gradients of some versions of torch
        assert_same(run_sgd(call, step, of=model), expected[0 if dtype else number], rtol=2e-3 if dtype else 0)
        model.zero_grad()
        assert counted(lambda call=call, step=step: step(call, 0)).keys() == {"AR"}
    if dtype is not None:
        return
    # one flag after the other, uncompiled
    for each in (mine := shard(small(), replicate), shard(small(), torch_replicate)):
        each.set_requires_gradient_sync(False)
        loss_of(each, rank, 0).backward()
        each.set_requires_gradient_sync(True)
        each.set_requires_all_reduce(False)
        loss_of(each, rank, 1).backward()
        each.set_requires_all_reduce(True)
        loss_of(each, rank, 2).backward()
    assert_equal(full_gradients(mine), full_gradients(each))


@pytest.mark.parametrize("flag", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize("way", RUNS)
@distributed(world_size=2, reset=True)
def test_ranks_have_different_numbers_of_microbatches(rank, world_size, way, flag):
    """Microbatches that reduce nothing need no other rank, as DDP's in `no_sync`; also when their code is compiled."""
    build, wrap, step = RUNS[way]
    expected = BUILD[build]()
    for number in (0, 1, 2):
        loss_of(expected, 0, number).backward()
    loss_of(expected, 1, 2).backward()
    for param in expected.parameters():
        param.grad.div_(2)
    for model in (BUILD[build](), BUILD[build]()):  # the second one shares plans, and some code, with the first
        call = wrap(shard(model, replicate))
        getattr(model, flag)(False)
        for number in (0, 1) if rank == 0 else ():
            step(call, number)
        getattr(model, flag)(True)
        step(call, 2)
        assert_same_gradients(model, expected, rtol=1e-5, atol=1e-7)


def clipped(model: nn.Module, step: int) -> torch.Tensor:
    loss = forward_backward(model, step)
    clip_grad_norm_(model.parameters(), 0.1)
    return loss


def frozen(**given) -> nn.Module:
    model = small(**given)
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


class Skips(Transformer):
    """Does not use its positions."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divided(model: nn.Module) -> None:
    model.set_gradient_divide_factor(4.0)


def summed(model: nn.Module) -> None:
    model.set_force_sum_reduction_for_comms(True)


half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FEATURES = {
    "bf16": (small, {"mp_policy": half}, None, forward_backward),
    "fp16 on the wire": (small, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, None, clipped),
    "clipping": (small, {}, None, clipped),
    "tied": (partial(Transformer, dim=16, blocks=1, ties=True), {}, None, forward_backward),
    "frozen": (frozen, {}, None, forward_backward),
    "unused": (partial(small, cls=Skips), {}, None, forward_backward),
    "divisor": (small, {}, divided, forward_backward),
    "sum": (small, {}, summed, forward_backward),
    "in host memory": (small, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, forward_backward),
}


@distributed(world_size=2)
def test_features_are_those_of_torchs_replicate(rank, world_size):
    """Policies, tied, frozen and unused parameters, clipping, divisors: bit for bit, uncompiled and compiled."""
    for name, (build, options, change, step) in FEATURES.items():
        models = [shard(build(), function, **options) for function in (torch_replicate, replicate, replicate)]
        for model in models if change is not None else ():
            change(model)
        theirs, *mine = models
        expected = run_sgd(theirs, step)
        for model, way in zip(mine, WAYS.values(), strict=True):
            try:
                assert_same(run_sgd(way(model), step, of=model), expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, {way}: {error}") from error


@distributed(world_size=2)
def test_one_call_and_buffers(rank, world_size):
    """One call on the root, default buckets, broadcast states and a buffer: DDP's numbers."""
    model = small(rank)
    model.register_buffer("seen", torch.tensor([float(rank)]))
    replicate(model, sync_module_states=True)
    assert model.seen.item() == 0.0
    assert_same(run_sgd(compiled(model), of=model), run_sgd(ddp(small())))
    ignored = small()
    replicate(ignored, ignored_params={ignored.head.weight})
    assert type(ignored.head.weight) is nn.Parameter


@distributed(world_size=2)
def test_errors(rank, world_size):
    model = small()
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for error, message, options in (
        (ValueError, "replicate expects a 1D DeviceMesh but got .*use fully_shard", {"mesh": two}),
        (ValueError, "replicate: mesh must be a torch.distributed.DeviceMesh, but got int", {"mesh": 2}),
        (NotImplementedError, r"replicate: WirePolicy\(gather='int8'\)", {"wire_policy": WirePolicy(gather="int8")}),
        (NotImplementedError, r"replicate: WirePolicy\(reduce='int8'\)", {"wire_policy": WirePolicy(reduce="int8")}),
    ):
        with pytest.raises(error, match=message):
            replicate(model, **options)
    for chosen, error in (
        ({"mesh": two}, "replicate expects a 1D DeviceMesh"),
        ({"replicates": False}, "replicates"),
        ({"reshard_after_forward": True}, "reshard_after_forward"),
    ):
        policy = CustomPolicy(lambda module, chosen=chosen: chosen if module is model.head else False)
        with pytest.raises(ValueError, match=error):
            replicate(model, auto_wrap_policy=policy)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    fully_shard(model)
    with pytest.raises(ValueError, match="already applied"):
        replicate(model)
    with pytest.raises(ValueError, match="replicate"):
        replicate(shard(small(), torch_replicate))


@distributed(world_size=2)
def test_ranks_with_different_models(rank, world_size):
    """An error, not a hang."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + 2 * rank))
    replicate(model, mesh=new_group())
    with pytest.raises(RanksDiffer, match=r"float32\[6, 4\]"):
        compiled(model)(torch.ones(2, 4)).sum().backward()


@distributed(world_size=2)
def test_sharded_and_replicated_models_have_other_outlines(rank, world_size):
    """Ranks that do not compile compare outlines before their first collective."""
    outlines = []
    for model in (replicate(small()), fully_shard(small(), reshard_after_forward=None)):
        units = units_of(model)
        outlines.append(outline_of(units, units[0].parameters[0].group))
    mine, theirs = difference_of_outlines(*outlines)
    assert mine.replace("replicated", "dim 0") == theirs


@distributed(world_size=2)
def test_install(rank, world_size):
    """`install()` replaces torch's `replicate`, too."""
    from torch.distributed._composable import replicate_with_fsdp

    with install() as installation:
        assert "torch.distributed._composable.replicate_with_fsdp.replicate" in installation.replaced
        assert replicate_with_fsdp.replicate is replicate
    assert replicate_with_fsdp.replicate is torch_replicate
