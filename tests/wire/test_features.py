"""All-gather extensions beside everything else: accumulation, HSDP, breaks, checkpointing, states, meta tensors."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import compiled_fsdp
from compiled_fsdp import explain, fully_shard
from tests.harness import WAYS, compiled, distributed, loss_of, shard, variants, ways
from tests.harness.extensions import Padded, Split, assert_all_equal, plain, train_locally, two, wrap
from tests.harness.meshes import mesh_2d
from tests.harness.models import Checkpointed, broken, small

SPLIT = "up.weight", "down.weight"


def two_blocks():
    return small(blocks=2)


def build(make=two_blocks, **options):
    return wrap(make(), Split, *SPLIT, **options)


def accumulate(run, index):
    """Three microbatches a step, of which the last alone reduces."""
    model = getattr(run, "_orig_mod", run)
    total = 0
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        loss = loss_of(run, dist.get_rank(), 3 * index + number)
        if number < 2:
            loss.backward()
        total = total + loss.detach()
    return loss


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_accumulation(rank, world_size, way):
    model = shard(build(), fully_shard)
    theirs = train_locally(shard(build(), torch_fully_shard), step=accumulate)
    assert_all_equal(train_locally(model, WAYS[way](model), step=accumulate), theirs)


@ways
@distributed(world_size=2)
def test_kept_over_microbatches(rank, world_size, way):
    def both(shard_by, run=lambda model: model):
        model = shard(build(), shard_by)
        model.set_reshard_after_backward(False)

        # one step: FSDP2 would go on with the values before the optimizer's
        return train_locally(model, run(model), steps=1, step=accumulate)

    assert_all_equal(both(fully_shard, WAYS[way]), both(torch_fully_shard))


@ways
@distributed(world_size=2)
def test_broken_forward(rank, world_size, way):
    model = shard(build(broken), fully_shard)
    theirs = train_locally(shard(build(broken), torch_fully_shard))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_equal_blocks_share_their_code(rank, world_size):
    """But for a policy that differs: the last block reduces its gradients in bfloat16."""

    def make(shard_by):
        model = build(partial(small, blocks=6))
        for number, block in enumerate(model.blocks):
            reduce_dtype = torch.bfloat16 if number == 5 else None
            shard_by(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        return shard_by(model)

    counters.clear()
    model = make(fully_shard)
    for block in model.blocks:
        block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    assert_all_equal(train_locally(model), train_locally(make(torch_fully_shard)))
    assert counters["stats"]["unique_graphs"] <= 3  # the first one's input comes from the embedding


class Scaled(Split):
    """What is gathered is ``times`` what it is, a number that may be set."""

    times = 1.0

    def fsdp_pre_all_gather(self, mesh):
        pieces, metadata = super().fsdp_pre_all_gather(mesh)
        return tuple((piece.float() * self.times).to(piece.dtype) for piece in pieces), metadata


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_equal_ones_that_are_changed_afterwards(rank, world_size):
    """A constant that is set on one of them, after ``fully_shard`` and before the first compile."""
    outs = []
    for shard_by in (fully_shard, torch_fully_shard):
        model = shard(wrap(small(blocks=3), Scaled, *SPLIT), shard_by)
        model.blocks[1].up.weight._local_tensor.times = 2.0
        if shard_by is fully_shard:
            for block in model.blocks:
                block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        outs.append([loss_of(model, rank, 0).detach() for _ in range(3)])
    assert all(map(torch.equal, *outs)), outs


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_an_equal_one_that_is_gone(rank, world_size):
    """The first of two equal models was deleted, and the other one's batches have another size."""
    outs = []
    for shard_by in (fully_shard, torch_fully_shard):
        models = [shard(wrap(small(blocks=2), Split, *SPLIT), shard_by) for _ in range(2)]
        runs = [compiled(model) if shard_by is fully_shard else model for model in models]
        first = [loss_of(run, rank, 0).detach() for run in runs]
        del models[0], runs[0]
        gc.collect()
        x = torch.arange(6).view(3, 2) + rank
        outs.append([*first, runs[0](x).detach()])
    assert all(map(torch.equal, *outs)), outs


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_activation_checkpointing(rank, world_size, way):
    make = partial(small, blocks=2, cls=Checkpointed)
    model = shard(build(make), fully_shard)
    theirs = train_locally(shard(build(make), torch_fully_shard))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_frozen(rank, world_size, way):
    """As the base weights under LoRA are."""
    model = shard(build(trains=False), fully_shard)
    theirs = train_locally(shard(build(trains=False), torch_fully_shard))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)
    assert all(param.grad is None for name, param in model.named_parameters() if name.endswith(SPLIT))


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_offloaded(rank, world_size, way):
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model = shard(build(), fully_shard, **policy)
    theirs = train_locally(shard(build(), torch_fully_shard, **policy))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=4)
def test_replicas(rank, world_size, way):
    """The hooks are given the mesh of the shards alone."""
    mesh = mesh_2d("replicas", "shards")
    model = shard(build(), fully_shard, mesh=mesh)
    theirs = train_locally(shard(build(), torch_fully_shard, mesh=mesh))
    for ours, other in zip(train_locally(model, WAYS[way](model)), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@pytest.mark.more  # its code is Inductor's
@distributed(world_size=2)
def test_compiled_autograd(rank, world_size):
    model = shard(build(), fully_shard)
    run = compiled(model)

    def step(run, index):
        loss = loss_of(run, rank, index)
        with compiled_fsdp.compiled_autograd():
            loss.backward(retain_graph=False)
        return loss.detach().requires_grad_()

    theirs = train_locally(shard(build(), torch_fully_shard))
    for ours, other in zip(train_locally(model, run, step=step), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_unshard(rank, world_size, way):
    """`unshard()` ahead of a forward, in which a graph breaks at each such parameter."""

    def step(run, index):
        model = getattr(run, "_orig_mod", run)
        for module in (model, *model.blocks):
            module.unshard(async_op=True)
        return loss_of(run, rank, index)

    model = shard(build(), fully_shard)
    theirs = train_locally(shard(build(), torch_fully_shard), step=step)
    assert_all_equal(train_locally(model, WAYS[way](model), step=step), theirs)


def give_values(model):
    """Memory and values, to what has none."""
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local()
            values = torch.randn(local.shape) / 8
            local.copy_(type(local)(values, values.clone()) if isinstance(local, TwoTensor) else values)


@pytest.mark.parametrize("way", variants(WAYS, "eager"))
@distributed(world_size=2)
def test_meta_device_and_mixed_precision(rank, world_size, way):
    """Made without memory, sharded, given memory and values; computed in bfloat16."""

    def made(shard_by):
        with torch.device("meta"):
            model = wrap(small(blocks=2), two, *SPLIT)
        shard(model, shard_by, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        give_values(model)
        return model

    model = made(fully_shard)
    theirs = train_locally(made(torch_fully_shard))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)


class Looks(Split):
    def fsdp_pre_all_gather(self, mesh):
        assert self.data_.abs().max().item() < 100
        return super().fsdp_pre_all_gather(mesh)


class NotMadeAgain(Split):
    """As a tensor of FSDP2's own tests: its method has another signature, and no compiler has called it."""

    @staticmethod
    def __tensor_unflatten__(inner, size, stride):
        return inner["data_"]


@pytest.mark.parametrize("kind", [Looks, NotMadeAgain])
@distributed(world_size=2)
def test_hooks_that_cannot_be_traced(rank, world_size, kind):
    """They break the graph, with the reason, and run in eager code."""

    def made(shard_by):
        return shard(wrap(small(), kind, "up.weight"), shard_by)

    model = made(fully_shard)
    assert_all_equal(train_locally(model, compiled(model)), train_locally(made(torch_fully_shard)))
    assert "cannot be traced" in str(explain(model)), explain(model)


def narrow(self, mesh, outer_size, outer_stride, module, mp_policy):
    return (self.to(torch.bfloat16),), mesh.ndim


def widen(self, outputs, metadata, param_dtype, *, out=None):
    assert metadata == 1
    full = outputs[0].to(param_dtype)
    if out is None:
        return full, (full,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(full)
    return None


@ways
@distributed(world_size=2)
def test_hooks_put_on_local_tensors(rank, world_size, way):
    """After sharding and meta tensors; what they give to gather is made of two tensors, and is sent as a plain one."""

    def made(shard_by):
        with torch.device("meta"):
            model = wrap(small(blocks=2), lambda weight: TwoTensor(weight, weight.clone()), *SPLIT)
        give_values(shard(model, shard_by))
        for param in model.parameters():
            local = param._local_tensor
            if isinstance(local, TwoTensor):
                local.fsdp_pre_all_gather = narrow.__get__(local)
                local.fsdp_post_all_gather = widen.__get__(local)
        return model

    model = made(fully_shard)
    assert_all_equal(train_locally(model, WAYS[way](model)), train_locally(made(torch_fully_shard)))


@distributed(world_size=2)
def test_inference(rank, world_size):
    model, theirs = shard(build(), fully_shard), shard(build(), torch_fully_shard)
    run = compiled(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            expected = plain(loss_of(theirs, rank, 0))
            assert torch.equal(plain(loss_of(model, rank, 0)), expected)
            assert torch.equal(plain(loss_of(run, rank, 0)), expected)


@distributed(world_size=2)
def test_one_rank_hears_of_a_hook_that_changes(rank, world_size):
    class Changes(Padded):
        more = False

        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            pieces, metadata = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
            return [*pieces, *([pieces[0]] if Changes.more else [])], metadata

    model = shard(wrap(small(), Changes, "up.weight"), fully_shard)
    loss_of(model, rank, 0).backward()
    Changes.more = True
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' returned .* must not change"):
        loss_of(model, rank, 1)
    assert isinstance(model.blocks[0].up, nn.Linear)
