"""What only a GPU can show, with one rank and NCCL: Inductor's kernels, CUDA graphs, no host that waits, memory."""

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import compiled_autograd, fully_shard, profile
from tests.harness import (
    Record,
    Transformer,
    assert_same,
    batch,
    compiled,
    forward_backward,
    fsdp2,
    loss_of,
    shard,
    train,
)
from tests.harness.fake import one_rank
from tests.harness.models import Broken, small
from tests.harness.reference import Step
from tests.training.test_one_rank import KEPT, SCENARIOS, half, on_cpu

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu() -> Iterator[None]:
    with one_rank("cuda"):
        yield


@pytest.mark.parametrize("options", [{}, KEPT], ids=["alone", "collectives kept"])
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_the_host_does_not_wait(gpu, codegen, options):
    """No step after the first waits for the device: torch tells of every wait."""
    model = compiled(shard(small(), fully_shard, mp_policy=half), codegen=codegen, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    tokens, targets = batch(0, 0)

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(w.message) for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("options", [{}, KEPT], ids=["alone", "collectives kept"])
def test_memory_is_given_back(gpu, options):
    """After forward, after backward and after the step no more is allocated than with FSDP2, give or take the tables
    of kernels."""

    def allocated(run: nn.Module) -> list[int]:
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.01, foreach=True)
        out = []
        for step in range(4):
            loss = loss_of(run, 0, step)
            torch.cuda.synchronize()
            out.append(torch.cuda.memory_allocated())
            loss.backward()
            out.append(torch.cuda.memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            del loss
            out.append(torch.cuda.memory_allocated())
        return out[-3:]

    def large() -> Transformer:
        return Transformer(dim=512, blocks=4)

    def beyond_what_was_there(build: Callable[[], nn.Module]) -> list[int]:
        torch.compiler.reset()
        gc.collect()
        before = torch.cuda.memory_allocated()
        return [n - before for n in allocated(build())]

    allocated(large())  # libraries take their workspaces
    theirs = beyond_what_was_there(lambda: fsdp2(large()))
    ours = beyond_what_was_there(lambda: compiled(shard(large(), fully_shard), **options))
    assert all(mine <= 1.02 * its + 2**20 for mine, its in zip(ours, theirs, strict=True)), (ours, theirs)


def trained(model: nn.Module, step: Step = forward_backward, *, steps: int = 3) -> Record:
    """By SGD, which makes no more of a difference in a gradient than there is."""
    return train(model, step, steps=steps, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("options", [{}, KEPT], ids=["alone", "collectives kept"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_inductors_kernels(gpu, scenario, options):
    """Compiled by Inductor: gradients are FSDP2's but for the rounding of what is fused."""
    build, how, step = SCENARIOS[scenario]
    ours = trained(compiled(shard(build(), fully_shard, **how), codegen="inductor", **options), step)
    rtol = 2e-2 if "mp_policy" in how else 1e-4
    assert_same(on_cpu(ours), on_cpu(trained(fsdp2(build(), **how), step)), rtol=rtol)


@pytest.mark.parametrize("options", [{}, KEPT], ids=["alone", "collectives kept"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(gpu, mode, options):
    """CUDA graphs, which capture collectives as well, and kernels that were chosen by their time."""
    model = shard(small(), fully_shard)
    inductor = {"triton.cudagraphs": True} if mode == "reduce-overhead" else {"max_autotune": True}
    run = compiled(model, codegen="inductor", inductor=inductor, **options)

    def step(model: nn.Module, index: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward_backward(model, index)

    ours = trained(run, step, steps=5)  # the first ones warm up and record, later ones replay
    assert_same(on_cpu(ours), on_cpu(trained(fsdp2(small()), steps=5)), rtol=1e-4)


@pytest.mark.parametrize("cls", [Transformer, Broken], ids=["whole", "broken"])
def test_compiled_autograd(gpu, cls):
    def step(model: nn.Module, index: int) -> torch.Tensor:
        loss = loss_of(model, 0, index)
        with compiled_autograd():
            loss.backward()
        return loss.detach()

    build = partial(small, blocks=2, cls=cls)
    ours = train(compiled(shard(build(), fully_shard), **KEPT), step)
    assert_same(on_cpu(ours), on_cpu(train(fsdp2(build()))), rtol=1e-5, rtol_of_parameters=1e-3)


def test_a_profile(gpu):
    """Every collective is found on NCCL's stream, and the verdict has the step's time."""
    model = compiled(shard(Transformer(dim=512, blocks=4), fully_shard), codegen="inductor", **KEPT)
    for index in range(3):
        forward_backward(model, index)
    with profile(model) as p:
        for index in range(3):
            forward_backward(model, index)
    assert "compute" in str(p)
    found = p.to_dict()
    assert len(found["steps"]) == 3, found
    assert all(collective["in_flight_s"] > 0 for collective in found["collectives"]), found
