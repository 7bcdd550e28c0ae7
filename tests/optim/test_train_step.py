"""``TrainStep``: the parameters, states, losses and norms of a loop with FSDP2 in eager code."""

import copy
import io
import itertools
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook

from compiled_fsdp import Muon, TrainStep, fully_shard, replicate
from compiled_fsdp.optim.local import BY_ELEMENT, local, on_shards
from compiled_fsdp.optim.norm import norm_of_gradients
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import distributed, shard
from tests.harness.checkpoints import state_of
from tests.harness.models import BUILD, batch, small
from tests.harness.reference import assert_equal, full

AOT = {"codegen": "aot_eager", "bucket": "module"}
"""With a bucket for each unit, a part of the parameters is updated before the next gather, and a part behind it."""
Optimizer = torch.optim.Optimizer


def cross_entropy(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def two_groups(kind: type[Optimizer], model: nn.Module, **options) -> Optimizer:
    """An optimizer without weight decay for vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return kind(groups, lr=0.01, **options)


def eager(
    model: nn.Module,
    optimizer: Optimizer,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    *,
    microbatches: int = 1,
    max_norm: float | None = 0.5,
    each: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A step of the usual loop; the loss and the norm."""
    losses = []
    for number, part in enumerate(zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True)):
        model.set_requires_gradient_sync(each or number == microbatches - 1)
        loss = cross_entropy(model, *part)
        (loss / microbatches if microbatches > 1 else loss).backward()
        losses.append(loss.detach())
    norm = None if max_norm is None else full(clip_grad_norm_(model.parameters(), max_norm))
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean() if microbatches > 1 else losses[0], norm


def assert_same_steps(
    ours: nn.Module,
    theirs: nn.Module,
    optimizer_of: Callable[[nn.Module], Optimizer],
    *,
    steps: int = 3,
    each: bool = False,
    loop: Callable = eager,
    **how,
) -> tuple[TrainStep, Optimizer]:
    """Train both; compare losses, norms, parameters and optimizer states bit for bit."""
    mine, other = optimizer_of(ours), optimizer_of(theirs)
    step = TrainStep(ours, mine, cross_entropy, options=AOT, reduce="each" if each else "last", **how)
    schedulers = [torch.optim.lr_scheduler.LinearLR(each_of, 0.5, 1.0, 10) for each_of in (mine, other)]
    for number in range(steps):
        data = batch(dist.get_rank(), number)
        expected, norm = loop(theirs, other, *data, each=each, **how)
        assert torch.equal(step(*data), expected), number
        assert norm is None or torch.equal(step.norm, norm), number
        assert all(p.grad is None for p in ours.parameters())
        for scheduler in schedulers:
            scheduler.step()
        assert_equal(state_of(ours, mine), state_of(theirs, other))
    return step, mine


OPTIMIZERS = {
    "SGD": partial(two_groups, torch.optim.SGD, momentum=0.9),
    "AdamW": partial(two_groups, torch.optim.AdamW),
    "AdamW, foreach": partial(two_groups, torch.optim.AdamW, foreach=True, amsgrad=True),
    "AdamW, fused": partial(two_groups, torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_bits_are_those_of_fsdp2(rank, world_size, name):
    """Twenty steps with clipping, two parameter groups and a scheduler: the whole model, and one with graph breaks."""
    for build in BUILD.values():
        ours, theirs = shard(build(), fully_shard), shard(build(), torch_fully_shard)
        before = RUNTIME.prefetcher.counts.copy()
        assert_same_steps(ours, theirs, OPTIMIZERS[name], steps=20, max_norm=0.5)
        counts = RUNTIME.prefetcher.counts - before
        if build is BUILD["whole"]:
            assert counts["taken"] >= 17, counts  # of the first gathers of 20 steps, once their order is known


@distributed(world_size=2)
def test_every_optimizer(rank, world_size):
    """Those of torch: on shards where each element is by itself, as DTensors otherwise."""
    for kind in sorted(BY_ELEMENT - {torch.optim.Rprop}, key=lambda kind: kind.__name__):  # it refuses DTensors
        ours, theirs = shard(small(), fully_shard), shard(small(), torch_fully_shard)
        _, optimizer = assert_same_steps(ours, theirs, lambda m, kind=kind: kind(m.parameters(), lr=0.01), max_norm=0.5)
        for param in ours.parameters():
            for name, value in optimizer.state[param].items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    assert value.placements == param.placements, (kind, name)


@distributed(world_size=2)
def test_gradients_of_another_dtype(rank, world_size):
    """As `param.grad_dtype` allows."""
    models = [shard(small(), torch_fully_shard) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for _ in range(2):
        for model in models:
            for param in model.parameters():
                param.grad_dtype = torch.bfloat16
                param.grad = param.detach().bfloat16()
        with on_shards(optimizers[0]):
            optimizers[0].step()
        optimizers[1].step()
    assert_equal(state_of(models[0], optimizers[0]), state_of(models[1], optimizers[1]))


@distributed(world_size=2)
def test_accumulation(rank, world_size):
    for (name, build), each in itertools.product(BUILD.items(), (False, True)):
        ours, theirs = shard(build(), fully_shard), shard(build(), torch_fully_shard)
        how = {"microbatches": 2, "max_norm": 0.5, "each": each}
        assert_same_steps(ours, theirs, OPTIMIZERS["AdamW"], **how), name


@distributed(world_size=2)
def test_replicas(rank, world_size):
    """Whole parameters on each rank, and HSDP with a single shard."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for function in (replicate, partial(fully_shard, mesh=mesh)):
        ours, theirs = shard(small(), function), shard(small(), torch_replicate)
        assert_same_steps(ours, theirs, OPTIMIZERS["AdamW"], max_norm=0.5)


@distributed(world_size=4)
def test_hybrid_sharding(rank, world_size):
    """Four gradients have several orders, so the sums are equal but for rounding."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs = (shard(small(), function, mesh=mesh) for function in (fully_shard, torch_fully_shard))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    step = TrainStep(ours, optimizers[0], cross_entropy, max_norm=0.5, microbatches=2, options=AOT)
    for number in range(3):
        data = batch(rank, number)
        _, norm = eager(theirs, optimizers[1], *data, microbatches=2)
        step(*data)
        torch.testing.assert_close(step.norm, norm)
    torch.testing.assert_close(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))


@distributed(world_size=2)
def test_norms(rank, world_size):
    """Of another order, of infinite order, and without clipping."""
    for norm_type in (1.0, 3.0, float("inf")):
        ours, theirs = shard(small(), fully_shard), shard(small(), torch_fully_shard)

        def loop(model, optimizer, tokens, targets, *, max_norm, norm_type=norm_type, **_):
            loss = cross_entropy(model, tokens, targets)
            loss.backward()
            norm = full(clip_grad_norm_(model.parameters(), max_norm, norm_type))
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm

        assert_same_steps(ours, theirs, OPTIMIZERS["SGD"], loop=loop, max_norm=0.1, norm_type=norm_type)
    step, _ = assert_same_steps(
        shard(small(), fully_shard), shard(small(), torch_fully_shard), OPTIMIZERS["SGD"], max_norm=None
    )
    assert step.norm is None


@distributed(world_size=2)
def test_checkpoints_of_the_loop_and_of_the_step(rank, world_size):
    """A step goes on with the state of a loop, and a loop with the state of a step."""
    sharded = [shard(small(), fully_shard) for _ in range(2)]
    optimizers = [OPTIMIZERS["AdamW"](model) for model in sharded]
    steps = [TrainStep(sharded[0], optimizers[0], cross_entropy, options=AOT), None]
    for number in range(6):
        data = batch(rank, number)
        turn = number // 2 % 2  # two steps each
        if (turn and number % 2 == 0) or (number and number % 4 == 0):
            sharded[turn].load_state_dict(sharded[1 - turn].state_dict())
            optimizers[turn].load_state_dict(copy.deepcopy(optimizers[1 - turn].state_dict()))
        if turn:
            eager(sharded[1], optimizers[1], *data, max_norm=None)
        else:
            steps[0](*data)
    expected = shard(small(), torch_fully_shard)
    optimizer = OPTIMIZERS["AdamW"](expected)
    for number in range(6):
        eager(expected, optimizer, *batch(rank, number), max_norm=None)
    assert_equal(state_of(sharded[0], optimizers[0]), state_of(expected, optimizer))


@distributed(world_size=2)
def test_parameters_written_between_steps(rank, world_size):
    """The next step's first gather is in flight then. One rank's write is enough for all to gather again."""
    ours, theirs = shard(small(), fully_shard), shard(small(), torch_fully_shard)
    optimizers = [OPTIMIZERS["SGD"](model) for model in (ours, theirs)]
    step = TrainStep(ours, optimizers[0], cross_entropy, max_norm=0.5, options=AOT)
    for number in range(5):
        data = batch(rank, number)
        assert torch.equal(step(*data), eager(theirs, optimizers[1], *data)[0]), number
        for model in (ours, theirs):
            if rank == 1:
                for param in model.parameters():
                    param.data.to_local().mul_(0.5)
            with torch.no_grad():
                cross_entropy(model, *data)  # evaluation
    assert_equal(state_of(ours), state_of(theirs))


@distributed(world_size=2)
def test_two_models_in_turn(rank, world_size):
    """Each step launches the first gather of the model that comes next."""
    pairs = [(shard(small(seed=seed), fully_shard), shard(small(seed=seed), torch_fully_shard)) for seed in (1, 2)]
    optimizers = [[OPTIMIZERS["SGD"](model) for model in pair] for pair in pairs]
    steps = [TrainStep(pair[0], of[0], cross_entropy, options=AOT) for pair, of in zip(pairs, optimizers, strict=True)]
    for number in range(6):
        before = RUNTIME.prefetcher.counts.copy()
        data = batch(rank, number)
        for step, (_, theirs), (_, optimizer) in zip(steps, pairs, optimizers, strict=True):
            assert torch.equal(step(*data), eager(theirs, optimizer, *data, max_norm=None)[0])
        counts = RUNTIME.prefetcher.counts - before
        assert number < 3 or counts == {"launched": 2, "taken": 2}, (number, counts)
    for (ours, theirs), (mine, other) in zip(pairs, optimizers, strict=True):
        assert_equal(state_of(ours, mine), state_of(theirs, other))


@distributed(world_size=2)
def test_a_step_that_the_scaler_leaves_out(rank, world_size):
    """float16 gradients overflow in the first steps, on one rank alone in the fourth."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    ours, theirs = (shard(small(), fully_shard, mp_policy=policy) for _ in range(2))
    optimizers = [OPTIMIZERS["AdamW"](model) for model in (ours, theirs)]
    loss_fn = torch.compile(partial(scaled_loss, theirs), backend="compiled_fsdp", options=AOT)  # float16 rounds
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2) for _ in range(2)]
    step = TrainStep(ours, optimizers[0], scaled_loss, max_norm=0.5, scaler=scalers[0], options=AOT)
    for number in range(8):
        tokens, targets = batch(rank, number)
        factor = torch.tensor(float("inf") if (rank, number) == (1, 4) else 1.0)
        loss = loss_fn(tokens, targets, factor)
        scalers[1].scale(loss).backward()
        scalers[1].unscale_(optimizers[1])
        clip_grad_norm_(theirs.parameters(), 0.5)
        scalers[1].step(optimizers[1])
        scalers[1].update()
        optimizers[1].zero_grad()
        step(tokens, targets, factor)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_equal(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))
    assert scalers[0].get_scale() < 2.0**20


def scaled_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, tokens, targets) * factor


@distributed(world_size=2)
def test_optimizers_that_need_whole_tensors(rank, world_size):
    """They step as ever, and the log says so."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("compiled_fsdp.training.train_step")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def muon(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return Muon(matrices, lr=0.01, adamw=[{"params": [p for p in model.parameters() if p.ndim != 2], "lr": 0.01}])

    assert_same_steps(shard(small(), fully_shard), shard(small(), fully_shard), muon, max_norm=0.5)
    logger.removeHandler(handler)
    assert "Muon works on DTensors, because it may not treat elements alone" in said.getvalue()


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("compile_update", [False, True])
@distributed(world_size=2)
def test_hooks_run_once_and_after_the_whole_update(rank, world_size, of_all, compile_update):
    """Those of the optimizer, and those of all optimizers."""
    model = shard(small(), fully_shard)
    optimizer = OPTIMIZERS["AdamW"](model)
    seen: list[list[torch.Tensor]] = []

    def note(optimizer, *_):
        seen.append([local(p).clone() for group in optimizer.param_groups for p in group["params"]])

    hooks = [register_optimizer_step_post_hook(note) if of_all else optimizer.register_step_post_hook(note)]
    if not of_all:
        hooks.append(optimizer.register_step_pre_hook(note))
    step = TrainStep(model, optimizer, cross_entropy, max_norm=0.5, compile_update=compile_update, options=AOT)
    params = [p.detach().to_local() for group in optimizer.param_groups for p in group["params"]]
    for number in range(4):
        before = [p.clone() for p in params]
        step(*batch(rank, number))
        assert_equal(seen, [params] if of_all else [before, params])
        seen.clear()
    for hook in hooks:
        hook.remove()


@distributed(world_size=4)
def test_norm_of_gradients_on_several_meshes(rank, world_size):
    """torch's own refuses them. Here they are compared with whole tensors, uneven ones and empty shards included."""
    flat = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in ((5, 4), (2, 3), (6, 4), (3, 3), (4,))]
    layouts = [(flat, [Shard(0)])] * 2 + [(mesh, [Shard(0), Shard(1)]), (mesh, [Replicate(), Shard(0)])]
    grads = [distribute_tensor(t, *layout) for t, layout in zip(whole[:4], layouts, strict=True)] + whole[4:]
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in whole]), norm_type)
        torch.testing.assert_close(norm_of_gradients(grads, norm_type), expected)
    assert norm_of_gradients([]) == 0


@distributed(world_size=2)
def test_errors(rank, world_size):
    model = shard(small(), fully_shard)
    optimizer = OPTIMIZERS["AdamW"](model)
    with pytest.raises(ValueError, match=r"needs a sharded model. Call fully_shard\(model\) before"):
        TrainStep(small(), optimizer, cross_entropy)
    with pytest.raises(ValueError, match="'microbatches' must be at least 1, but got 0"):
        TrainStep(model, optimizer, cross_entropy, microbatches=0)
    with pytest.raises(ValueError, match="'reduce' takes 'last' or 'each', but got 'never'"):
        TrainStep(model, optimizer, cross_entropy, reduce="never")
    step = TrainStep(model, optimizer, cross_entropy, microbatches=3, options=AOT)
    with pytest.raises(ValueError, match=r"divides each tensor .* but one has the shape \(4, "):
        step(*batch(rank, 0))


@distributed(world_size=2)
def test_errors_in_the_middle(rank, world_size):
    """An error in a loss, in either microbatch, or in an optimizer: the next step is right."""
    ours, theirs = shard(small(), fully_shard), shard(small(), torch_fully_shard)
    optimizers = [OPTIMIZERS["AdamW"](model) for model in (ours, theirs)]
    calls, fails_at = 0, None

    def loss_fn(model, tokens, targets):
        loss = cross_entropy(model, tokens, targets)
        return count_call(loss)

    @torch.compiler.disable
    def count_call(loss):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("a bad batch")
        return loss

    step = TrainStep(ours, optimizers[0], loss_fn, microbatches=2, max_norm=0.5, options=AOT)
    for number in range(5):
        data = batch(rank, number)
        if number in (1, 2):
            fails_at = calls + number  # the first microbatch, or the second one
            with pytest.raises(RuntimeError, match="a bad batch"):
                step(*data)
            assert all(p.grad is None for p in ours.parameters())
        if number == 3:
            with on_shards(optimizers[0]), pytest.raises(KeyError):
                optimizers[0].param_groups[0].pop("lr") and optimizers[0].step()
            optimizers[0].param_groups[0]["lr"] = 0.01
        assert torch.equal(step(*data), eager(theirs, optimizers[1], *data, microbatches=2)[0])
        assert_equal(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))
