"""The systems that ``real_link`` compares: ways to train one model, and floors that none of them can beat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from bench import functional_fsdp, wire
from bench.link_models import MLP, Llama
from compiled_fsdp import TrainStep, WirePolicy, compiled_autograd, explain, fully_shard, replicate
from compiled_fsdp.errors import OverBudget
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.runtime.context import RUNTIME

Shard = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """A link of ``gbit`` Gb/s, a model, this rank's batch, and the mesh that the model is sharded on.

    Attributes:
        options: further arguments of ``fully_shard``.
    """

    gbit: float
    model: type[MLP] | type[Llama]
    x: Tensor
    mesh: DeviceMesh
    options: Mapping[str, Any] = field(default_factory=dict)

    def shard(self, shard: Shard, model: MLP | Llama, **more: Any) -> None:
        """Call ``shard`` on each unit of ``model``, then on the model itself."""
        for modules, of_unit in model.units():
            shard(modules if len(modules) > 1 else modules[0], mesh=self.mesh, **{**self.options, **of_unit, **more})
        shard(model, mesh=self.mesh, **self.options, **more)

    def sharded(self, shard: Shard, broken: str = "", **more: Any) -> MLP | Llama:
        """Return a new model, sharded by ``shard``."""
        model = self.model(broken)
        self.shard(shard, model, **more)
        return model

    def training(self, model: nn.Module, call: Callable[[Tensor], Tensor], **more: Any) -> Training:
        """Return a ``Training`` of ``model`` with this setting's batch and loss."""
        return Training(model, call, self.x, self.model.loss, **more)


class Running(Protocol):
    """A system that is set up."""

    def step(self) -> tuple[float, float]:
        """Run forward and backward; return the seconds of each."""

    def finish(self) -> None:
        """Do the rest of the step, which is not timed."""


class Training:
    """A model, its optimizer and its batch.

    Args:
        model: the model that is trained.
        call: the callable that runs the model, perhaps compiled.
        x: the batch.
        loss_of: computes the loss from outputs and batch.
        around: a context that is entered for the first step, in which the model is compiled.
        backward_in: makes the context that is entered for every backward.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Tensor], Tensor],
        x: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        around: contextlib.AbstractContextManager[None] | None = None,
        backward_in: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.backward_in = backward_in
        self.model, self.call, self.x, self.loss_of, self.around = model, call, x, loss_of, around
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        self.loss = float("nan")

    def step(self) -> tuple[float, float]:
        """Run forward and backward of the loss; return the seconds of each."""
        with self.around or contextlib.nullcontext():
            start = time.perf_counter()
            loss = self.loss_of(self.call(self.x), self.x)
            between = time.perf_counter()
            with self.backward_in():
                loss.backward()
            end = time.perf_counter()
        self.around = None
        self.loss = loss.item()
        return between - start, end - between

    def finish(self) -> None:
        """Update the parameters, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class WholeStep:
    """A step with clipping and AdamW, all of which is timed.

    Args:
        model: the model that is trained.
        step: runs a step, and returns its loss.
    """

    def __init__(self, model: nn.Module, step: Callable[[], Tensor]) -> None:
        self.model, self._step, self.loss = model, step, float("nan")

    def step(self) -> tuple[float, float]:
        """Run the step, and wait for the gather that it has launched for the next one. Return its seconds, and 0."""
        start = time.perf_counter()
        self.loss = self._step().item()
        RUNTIME.prefetcher.wait()
        return time.perf_counter() - start, 0.0

    def finish(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class System:
    """How a system is made, and its properties.

    Attributes:
        make: sets up the system in a setting.
        sharded: whether it shards parameters.
        reshard: whether it reshards parameters after forward.
        trains: whether it trains in float32 with one batch a step. All systems that do have the same losses.
        compiles: whether it compiles anything.
    """

    make: Callable[[Setting], Running]
    sharded: bool = True
    reshard: bool = True
    trains: bool = True
    compiles: bool = True


def _compiled_fsdp(setting: Setting) -> Training:
    model = setting.sharded(fully_shard)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


def _budget(share: float, setting: Setting) -> Training:
    """Train within a share of the peak that is planned for "compiled_fsdp", which must be there.

    If that is too little, within the least budget that fits. Without optimizer state, because SGD has none. With
    AdamW's it would be half of what float32 parameters hold.
    """
    free = [graph for graph in COMPILE_LOG.graphs if graph.budget is None]
    peak = max(graph.numbers.peak - graph.tasks.persistent // 2 for graph in free if graph.numbers and graph.tasks)
    options = {"memory_budget": round(share * peak), "optimizer_bytes_per_element": 0, "offload_activations": True}
    model = setting.sharded(fully_shard)
    try:
        explain(model, setting.x, options=options)
    except OverBudget as error:
        options["memory_budget"] = error.least
    return setting.training(model, torch.compile(model, backend="compiled_fsdp", options=options))


def _wire(policy: WirePolicy, setting: Setting) -> Training:
    model = setting.sharded(fully_shard, wire_policy=policy)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


def _wire_broken(policy: WirePolicy, setting: Setting) -> Training:
    model = setting.sharded(fully_shard, "after", wire_policy=policy)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def _bf16(setting: Setting) -> Training:
    model = setting.sharded(fully_shard, mp_policy=BFLOAT16)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


def _fsdp2_bf16(setting: Setting) -> Training:
    model = setting.sharded(fsdp2, mp_policy=BFLOAT16)
    return setting.training(model, model)


def _float8(shard: Shard, setting: Setting) -> Training:
    """Train by torchao's float8 training, emulated, with weights that are gathered in float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = setting.model()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    setting.shard(shard, model)
    call = torch.compile(model, backend="compiled_fsdp") if shard is fully_shard else model
    return setting.training(model, call)


def _broken(
    where: str, backward_in: Callable[[], contextlib.AbstractContextManager[None]], setting: Setting
) -> Training:
    model = setting.sharded(fully_shard, where)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"), backward_in=backward_in)


def _blocks(setting: Setting) -> Training:
    model = setting.sharded(fully_shard)
    for layer in model.layers:
        layer.compile(backend="compiled_fsdp")
    return setting.training(model, model)


def _fsdp2(setting: Setting) -> Training:
    model = setting.sharded(fsdp2)
    return setting.training(model, model)


def _fsdp2_compiled(setting: Setting) -> Training:
    model = setting.model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = cast(nn.Module, torch.compile(layer))  # before sharding: FSDP2's hooks stay outside
    setting.shard(fsdp2, model)
    return setting.training(model, model)


def _ddp(setting: Setting) -> Training:
    model = DistributedDataParallel(setting.model())
    return setting.training(model, model)


def _replicated(setting: Setting) -> Training:
    def shard(modules: Any, *, reshard_after_forward: bool = True, **options: Any) -> Any:
        return replicate(modules, **options)  # nothing to reshard

    model = setting.sharded(shard)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


def _kept(setting: Setting) -> Training:
    model = setting.sharded(fully_shard, reshard_after_forward=False)
    return setting.training(model, torch.compile(model, backend="compiled_fsdp"))


def _loop(setting: Setting) -> WholeStep:
    model = setting.sharded(fully_shard)
    loss_fn = torch.compile(lambda: setting.model.loss(model(setting.x), setting.x), backend="compiled_fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> Tensor:
        loss = loss_fn()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return WholeStep(model, step)


def _train_step(compile_update: bool, setting: Setting) -> WholeStep:
    model = setting.sharded(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return setting.model.loss(model(x), x)

    step = TrainStep(model, optimizer, loss_fn, max_norm=1.0, compile_update=compile_update)
    return WholeStep(model, lambda: step(setting.x))


def _functional(setting: Setting) -> Training:
    model = setting.model()
    functional_fsdp.shard(model)
    return setting.training(model, functional_fsdp.compiled(model, overlap=False))


def _functional_overlap(setting: Setting) -> Training:
    model = setting.model()
    functional_fsdp.shard(model)
    around = functional_fsdp.this_machine_as_gpu(setting.gbit)
    return setting.training(model, functional_fsdp.compiled(model, overlap=True), around=around)


MICROBATCHES = 4


class Accumulating(Training):
    """Training with several microbatches per step, each of the whole batch size.

    Args:
        model: the model that is trained.
        call: the callable that runs the model, perhaps compiled.
        x: a microbatch.
        loss_of: computes the loss from outputs and microbatch.
        prepare: is called with the model, and whether the microbatch is the last one, before each microbatch.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Tensor], Tensor],
        x: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        prepare: Callable[[Any, bool], None],
    ) -> None:
        super().__init__(model, call, x, loss_of)
        self.prepare = prepare

    def step(self) -> tuple[float, float]:
        """Run all microbatches; return the seconds of their forwards and of their backwards."""
        seconds = [0.0, 0.0]
        for index in range(MICROBATCHES):
            self.prepare(self.model, index == MICROBATCHES - 1)
            for i, taken in enumerate(super().step()):
                seconds[i] += taken
        return seconds[0], seconds[1]


def _each(model: Any, last: bool) -> None:
    """Let every microbatch gather, reduce and reshard."""


def _wait(model: Any, last: bool) -> None:
    """Reduce gradients with the last microbatch, and leave parameters unsharded up to it."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


def _accumulate(waits: bool, shard: Shard, setting: Setting) -> Training:
    model = setting.sharded(shard, **({"reshard_after_forward": False} if waits else {}))
    call = torch.compile(model, backend="compiled_fsdp") if shard is fully_shard else model
    return Accumulating(model, call, setting.x, setting.model.loss, _wait if waits else _each)


def _accumulate_hsdp(setting: Setting) -> Training:
    """Two replicas, one on each machine, whose gradients are all-reduced with the last microbatch."""
    mesh = init_device_mesh("cpu", (2, setting.mesh.size() // 2), mesh_dim_names=("replicas", "shards"))
    model = replace(setting, mesh=mesh, options={}).sharded(fully_shard)

    def prepare(model: Any, last: bool) -> None:
        model.set_requires_all_reduce(last)

    call = torch.compile(model, backend="compiled_fsdp")
    return Accumulating(model, call, setting.x, setting.model.loss, prepare)


def _accumulate_hfsdp(setting: Setting) -> Training:
    """All ranks shard, with a working copy on each machine; gradients leave it with the last microbatch."""
    model, ranks = setting.sharded(fully_shard), setting.mesh.size() // 2

    def prepare(model: Any, last: bool) -> None:
        model.set_reshard_after_backward(True if last else ranks)
        model.set_requires_all_reduce(last)

    call = torch.compile(model, backend="compiled_fsdp")
    return Accumulating(model, call, setting.x, setting.model.loss, prepare)


def _floor_compute(setting: Setting) -> Training:
    model = setting.model()
    return setting.training(model, torch.compile(model))


def _floor_wire(setting: Setting) -> wire.Wire:
    return wire.of_reports(list(COMPILE_LOG.graphs))


def _floor_wire_fsdp2(setting: Setting) -> wire.Wire:
    with torch.device("meta"):
        model = setting.model()
    units: list[tuple[nn.Module, bool]] = [
        (nn.ModuleList(modules), options.get("reshard_after_forward", True)) for modules, options in model.units()
    ]
    if left := model.left():  # FSDP2's root unit has these modules, and does not reshard them after forward
        units.append((nn.ModuleList(left), False))
    return wire.of_fsdp2(units)


# in the order of their setup, because `floor_wire` and `budget_100` read the graphs that were compiled for
# "compiled_fsdp"
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
    "fsdp2_bf16": System(_fsdp2_bf16, trains=False, compiles=False),
    "bf16": System(_bf16, trains=False),
    "wire_bf16": System(partial(_wire, WirePolicy("bfloat16", "bfloat16")), trains=False),
    "wire_fp8_bf16": System(partial(_wire, WirePolicy("float8_e4m3fn", "bfloat16")), trains=False),
    "wire_int8": System(partial(_wire, WirePolicy("int8", "int8")), trains=False),
    "wire_int8_feedback": System(partial(_wire, WirePolicy("int8", "int8", error_feedback=True)), trains=False),
    "wire_int8_broken": System(partial(_wire_broken, WirePolicy("int8", "int8")), trains=False),
    "float8": System(partial(_float8, fully_shard), trains=False),
    "fsdp2_float8": System(partial(_float8, fsdp2), trains=False, compiles=False),
    "accumulate_each": System(partial(_accumulate, False, fully_shard), trains=False),
    "accumulate_wait": System(partial(_accumulate, True, fully_shard), reshard=False, trains=False),
    "fsdp2_accumulate_each": System(partial(_accumulate, False, fsdp2), trains=False, compiles=False),
    "fsdp2_accumulate_wait": System(partial(_accumulate, True, fsdp2), reshard=False, trains=False, compiles=False),
    "accumulate_hsdp": System(_accumulate_hsdp, trains=False),
    "accumulate_hfsdp": System(_accumulate_hfsdp, trains=False),
    "budget_100": System(partial(_budget, 1.0)),
    "budget_80": System(partial(_budget, 0.8)),
    "budget_60": System(partial(_budget, 0.6)),
    "budget_45": System(partial(_budget, 0.45)),
    "replicated": System(_replicated, sharded=False, reshard=False),
    "kept": System(_kept, reshard=False),
    "loop": System(_loop, trains=False),
    "train_step": System(partial(_train_step, False), trains=False),
    "compiled_update": System(partial(_train_step, True), trains=False),
}
