"""Measure the host time of a step: the cost of Python, guards and autograd when there is almost no compute.

The model has 32 Llama layers of width 8 with 291 parameters. Collectives of a fake process group return at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.gpu.model import TINY, Stack, by_layer, stack, tokens_of
from bench.gpu.record import Record
from compiled_fsdp import TrainStep, fully_shard

EAGER = "FSDP2, eager"
WORLD = 2


def measure(device: torch.device, *, quick: bool, codegen: str = "inductor") -> Iterator[Record]:
    """Yield records of forward and backward, and of whole steps: medians of interleaved steps.

    Args:
        device: the models' device.
        quick: whether to measure fewer layers and steps.
        codegen: "inductor" or "aot_eager", for all compiled systems.
    """
    shape = replace(TINY, layers=2) if quick else TINY
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        models = {name: stack(shape, device, torch.float32) for name in _systems(codegen)}
        runs = {name: make(models[name]) for name, make in _systems(codegen).items()}
        tokens = tokens_of(shape, device)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(3 + (5 if quick else 40)):
            for name, run in runs.items():
                begin = time.perf_counter()
                run(tokens)
                taken = time.perf_counter() - begin  # host time only: the device may still be busy
                if device.type == "cuda":
                    torch.cuda.synchronize()
                models[name].zero_grad()
                if repeat >= 3:
                    times[name].append(taken)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        torch.compiler.reset()
    eager = statistics.median(times[EAGER])
    for name, taken in times.items():
        low, median, high = statistics.quantiles(taken, n=4)
        more = {"quartiles": (low, high), "ratio_to_fsdp2_eager": median / eager}
        yield Record("host time of a step", name, tensors=9 * shape.layers + 3, seconds=median, more=more)


def _systems(codegen: str) -> dict[str, Callable[[Stack], Callable[[Tensor], object]]]:
    """Return what makes each system: a function of the batch that runs a step."""
    options = {"codegen": codegen}

    def per_layer(model: Stack) -> Stack:
        by_layer(model, fsdp2)
        for layer in model.layers:
            layer.compile(backend=codegen)
        return model

    def ours(model: Stack) -> Callable[[Tensor], Tensor]:
        return torch.compile(by_layer(model, fully_shard), backend="compiled_fsdp", options=options)

    def loop(model: Stack, foreach: bool | None) -> Callable[[Tensor], object]:
        run, optimizer = ours(model), torch.optim.AdamW(model.parameters(), foreach=foreach)

        def step(tokens: Tensor) -> None:
            run(tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    def train_step(model: Stack, foreach: bool | None, *, compiled: bool = False) -> Callable[[Tensor], object]:
        by_layer(model, fully_shard)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        how: Any = {"max_norm": 1.0, "compile_update": compiled, "options": options}
        return TrainStep(model, optimizer, lambda model, tokens: model(tokens), **how)

    def backward_of(
        make: Callable[[Stack], Callable[[Tensor], Tensor]],
    ) -> Callable[[Stack], Callable[[Tensor], object]]:
        def made(model: Stack) -> Callable[[Tensor], object]:
            run = make(model)
            return lambda tokens: run(tokens).backward()

        return made

    return {
        f"torch.compile, unsharded, {codegen}": backward_of(lambda model: torch.compile(model, backend=codegen)),
        f"compiled_fsdp, {codegen}": backward_of(ours),
        EAGER: backward_of(lambda model: by_layer(model, fsdp2)),
        f"FSDP2, {codegen} per layer": backward_of(per_layer),
        f"compiled_fsdp, {codegen}, clipping, AdamW": partial(loop, foreach=None),
        f"TrainStep, {codegen}, clipping, AdamW": partial(train_step, foreach=None),
        f"compiled_fsdp, {codegen}, clipping, foreach AdamW": partial(loop, foreach=True),
        f"TrainStep, {codegen}, clipping, foreach AdamW": partial(train_step, foreach=True),
        f"TrainStep, {codegen}, clipping, compiled AdamW": partial(train_step, foreach=None, compiled=True),
    }
