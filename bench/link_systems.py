"""What ``real_link`` compares: one model trained by several systems, and floors below which none of them can get."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from bench import functional_fsdp, wire
from compiled_fsdp import compiled_autograd, fully_shard
from compiled_fsdp.reporting.compile_log import COMPILE_LOG

WIDTH, LAYERS = 1024, 8


class Block(nn.Module):
    """[batch, width] to [batch, width], through 4 * width; perhaps with a graph break in the middle."""

    def __init__(self, width: int, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(self.norm(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(middle))


class MLP(nn.Module):
    """[batch, width] to [batch, 10]; the same parameters whenever it is made.

    Args:
        width: of every layer.
        layers: how many.
        broken: where graph breaks are: "after" every layer, or "inside" of it.
    """

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, *, broken: str = "") -> None:
        super().__init__()
        self.broken = broken == "after"
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width, broken=broken == "inside") for _ in range(layers))
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.broken:
                torch._dynamo.graph_break()
        return self.out(x)


@dataclass(frozen=True)
class Setting:
    """A link of ``gbit`` Gb/s and this rank's batch, [batch, width]."""

    gbit: float
    x: Tensor


class Running(Protocol):
    """A system that is set up."""

    def step(self) -> tuple[float, float]:
        """Forward and backward; seconds of each."""

    def finish(self) -> None:
        """What comes after backward, untimed."""


class Training:
    """A model, its optimizer and its batch.

    Args:
        model: what is trained.
        call: the model as it is called, perhaps compiled.
        x: the batch.
        around: entered for the first step, in which the model is compiled.
        backward_in: entered for every backward.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Tensor], Tensor],
        x: Tensor,
        around: contextlib.AbstractContextManager[None] | None = None,
        backward_in: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.backward_in = backward_in
        self.model, self.call, self.x, self.around = model, call, x, around
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        self.loss = float("nan")

    def step(self) -> tuple[float, float]:
        """Forward and backward of the mean square of the outputs; seconds of each."""
        with self.around or contextlib.nullcontext():
            start = time.perf_counter()
            loss = self.call(self.x).square().mean()
            between = time.perf_counter()
            with self.backward_in():
                loss.backward()
            end = time.perf_counter()
        self.around = None
        self.loss = loss.item()
        return between - start, end - between

    def finish(self) -> None:
        """Update and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class System:
    """How a system is made, and what it does.

    Attributes:
        make: sets it up.
        sharded: whether it shards parameters.
        reshard: whether parameters are freed after forward.
        trains: whether it trains; all systems that do compute the same losses.
        compiles: whether it compiles anything.
    """

    make: Callable[[Setting], Running]
    sharded: bool = True
    reshard: bool = True
    trains: bool = True
    compiles: bool = True


def _compiled_fsdp(setting: Setting) -> Training:
    model = MLP()
    for module in (*model.layers, model):
        fully_shard(module)
    return Training(model, torch.compile(model, backend="compiled_fsdp"), setting.x)


def _broken(
    where: str, backward_in: Callable[[], contextlib.AbstractContextManager[None]], setting: Setting
) -> Training:
    model = MLP(broken=where)
    for module in (*model.layers, model):
        fully_shard(module)
    return Training(model, torch.compile(model, backend="compiled_fsdp"), setting.x, backward_in=backward_in)


def _blocks(setting: Setting) -> Training:
    model = MLP()
    for module in (*model.layers, model):
        fully_shard(module)
    for layer in model.layers:
        layer.compile(backend="compiled_fsdp")
    return Training(model, model, setting.x)


def _fsdp2(setting: Setting) -> Training:
    model = MLP()
    for module in (*model.layers, model):
        fsdp2(module)
    return Training(model, model, setting.x)


def _fsdp2_compiled(setting: Setting) -> Training:
    model = MLP()
    for i, layer in enumerate(model.layers):
        model.layers[i] = cast(nn.Module, torch.compile(layer))  # around the hooks of FSDP2, not within
    for module in (*model.layers, model):
        fsdp2(module)
    return Training(model, model, setting.x)


def _ddp(setting: Setting) -> Training:
    model = DistributedDataParallel(MLP())
    return Training(model, model, setting.x)


def _functional(setting: Setting) -> Training:
    model = MLP()
    functional_fsdp.shard(model)
    return Training(model, functional_fsdp.compiled(model, overlap=False), setting.x)


def _functional_overlap(setting: Setting) -> Training:
    model = MLP()
    functional_fsdp.shard(model)
    around = functional_fsdp.this_machine_as_gpu(setting.gbit)
    return Training(model, functional_fsdp.compiled(model, overlap=True), setting.x, around)


MICROBATCHES = 4


class Accumulating(Training):
    """Steps of several microbatches, each of the whole batch.

    Args:
        model: what is trained.
        call: the model as it is called, perhaps compiled.
        x: a microbatch.
        waits: gradients are reduced with the last microbatch, and parameters stay full until then; else every
            microbatch gathers, reduces and reshards.
    """

    def __init__(self, model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, waits: bool) -> None:
        super().__init__(model, call, x)
        self.waits = waits

    def step(self) -> tuple[float, float]:
        """All microbatches; seconds of forward and backward."""
        model: Any = self.model
        seconds = [0.0, 0.0]
        for index in range(MICROBATCHES):
            if self.waits:
                last = index == MICROBATCHES - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
            for i, taken in enumerate(super().step()):
                seconds[i] += taken
        return seconds[0], seconds[1]


def _accumulate(waits: bool, shard: Callable[..., Any], setting: Setting) -> Training:
    model = MLP()
    options = {"reshard_after_forward": False} if waits else {}
    for module in (*model.layers, model):
        shard(module, **options)
    call = torch.compile(model, backend="compiled_fsdp") if shard is fully_shard else model
    return Accumulating(model, call, setting.x, waits)


def _floor_compute(setting: Setting) -> Training:
    model = MLP()
    return Training(model, torch.compile(model), setting.x)


def _floor_wire(setting: Setting) -> wire.Wire:
    return wire.of_reports(list(COMPILE_LOG.graphs))


def _floor_wire_fsdp2(setting: Setting) -> wire.Wire:
    with torch.device("meta"):
        model = MLP()
    units: list[nn.Module] = [*model.layers, model.out]  # FSDP2's root unit has what is left, and keeps it
    return wire.of_fsdp2(units, lambda unit: unit is model.out)


# in the order in which they are set up: `floor_wire` reads what was compiled for the first
SYSTEMS = {
    "compiled_fsdp": System(_compiled_fsdp),
    "fsdp2": System(_fsdp2, compiles=False),
    "fsdp2_compiled": System(_fsdp2_compiled),
    "ddp": System(_ddp, sharded=False, reshard=False, compiles=False),
    "functional": System(_functional),
    "functional_overlap": System(_functional_overlap),
    "floor_compute": System(_floor_compute, sharded=False, reshard=False, trains=False),
    "floor_wire": System(_floor_wire, trains=False, compiles=False),
    "floor_wire_fsdp2": System(_floor_wire_fsdp2, trains=False, compiles=False),
    "broken": System(partial(_broken, "after", contextlib.nullcontext)),
    "broken_inside": System(partial(_broken, "inside", contextlib.nullcontext)),
    "broken_autograd": System(partial(_broken, "after", compiled_autograd)),
    "blocks": System(_blocks),
    "accumulate_each": System(partial(_accumulate, False, fully_shard), trains=False),
    "accumulate_wait": System(partial(_accumulate, True, fully_shard), reshard=False, trains=False),
    "fsdp2_accumulate_each": System(partial(_accumulate, False, fsdp2), trains=False, compiles=False),
    "fsdp2_accumulate_wait": System(partial(_accumulate, True, fsdp2), reshard=False, trains=False, compiles=False),
}
