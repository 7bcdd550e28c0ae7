"""What a rank does in a case: it trains for a few steps and saves, and at one place something happens to it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import WirePolicy, fully_shard
from compiled_fsdp.buckets import encode
from compiled_fsdp.passes import pipeline, plan_pass
from tests.faults.table import EVERY_RANK, Case
from tests.harness.checkpoints import state_of
from tests.harness.extensions import Split

STEPS = 3
FAULTY_STEP = 1  # the first one compiles
SLOW = 3.0  # seconds


class Told(ArithmeticError):
    """Raised because the case says so."""


# What happens now at each place; nothing mostly.
_happens: dict[str, Callable[[], None]] = {}


def strike(place: str) -> None:
    """Let happen what is to happen at a place."""
    if place in _happens:
        _happens.pop(place)()


@torch.library.custom_op("faults::in_forward", mutates_args=())
def in_forward(x: Tensor) -> Tensor:
    """The fault in the middle of a forward, in a graph too."""
    strike("forward")
    return x.clone()


@torch.library.custom_op("faults::in_backward", mutates_args=())
def in_backward(grad: Tensor) -> Tensor:
    """The fault in the middle of a backward."""
    strike("backward")
    return grad.clone()


for op in (in_forward, in_backward):
    op.register_fake(torch.empty_like)
in_forward.register_autograd(lambda ctx, grad: in_backward(grad))


class Layers(nn.Module):
    """Three layers with the fault between them, as one graph or as three."""

    def __init__(self, breaks: bool, rows: int = 8) -> None:
        super().__init__()
        self.breaks = breaks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, rows), nn.Linear(rows, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = torch.tanh(self.middle(in_forward(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


class Hooked(Split):
    """Gathered as it is, in float32; a rank that is odd gathers something else, or looks at values."""

    odd = ""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        strike("hook")
        if self.odd == "traceable":
            assert self.data_.sum().item() < 1000
        padded = self.data_.new_zeros(-(-8 // mesh.size()), 8)  # of the model's 8 rows
        padded[: len(self.data_)].copy_(self.data_)
        return (padded.bfloat16() if self.odd == "pieces" else padded,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0].to(param_dtype), outputs


class Writer(dcp.FileSystemWriter):
    """Meets the fault when it has written its file."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        written = super().write_data(*args, **kwargs)
        strike("saving")
        return written


def fault_of(case: Case, at: Path) -> Callable[[], None]:
    """What happens, after a note of when."""

    def happen() -> None:
        at.write_text(str(time.time()))
        if case.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.fault == "slow":
            time.sleep(SLOW)
        elif case.fault == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)  # the handler runs before the next line of Python
            time.sleep(60)
        elif case.fault == "out of memory":
            raise torch.OutOfMemoryError("told to")
        else:
            raise Told("told to")

    return happen


@contextlib.contextmanager
def watched_places(rank: int, case: Case) -> Iterator[None]:
    """Compiles come to the places "planning" and "compiling": rank 0 plans while the others wait, they before that."""

    def compiling(gm: Any, ctx: Any) -> Any:
        strike("compiling")
        return gm

    def planning(*args: Any, **kwargs: Any) -> Any:
        strike("planning")
        return step(*args, **kwargs)

    name = "choose" if rank == 0 and case.victim != EVERY_RANK else "extract"
    step = getattr(plan_pass, name)
    passes = (*pipeline.GRAPH_PASSES, compiling)

    def encoding(*args: Any) -> None:
        strike("encoding")
        encode_one(*args)

    encode_one = encode._encode
    with (
        mock.patch.object(encode, "_encode", encoding),
        mock.patch("compiled_fsdp.compiler.compilation.GRAPH_PASSES", passes),
        mock.patch.object(plan_pass, name, planning),
    ):
        yield


def build(case: Case, odd: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The sharded model, and what runs it; `odd`: with what makes this rank differ."""
    what = case.fault.removeprefix("other ") if odd else ""
    model = Layers(case.way == "broken", rows=10 if what == "model" else 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if what == "dtype" else None)
    if has_hooks(case):
        Hooked.odd = what
        model.middle.weight = nn.Parameter(Hooked(model.middle.weight.detach()))
    encodes = case.place == "encoding" or case.fault == "other wire policy"
    wire = WirePolicy(gather="bfloat16" if what == "wire policy" else "int8") if encodes else None
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer, mp_policy=policy, wire_policy=wire)
    fully_shard(model, mp_policy=policy, wire_policy=wire)
    if case.way == "uncompiled":
        return model, model
    options = {"codegen": "aot_eager", "bucket": "parameter" if what == "option" else "auto"}
    return model, torch.compile(model, backend="compiled_fsdp", options=options, fullgraph=case.way == "whole")


def has_hooks(case: Case) -> bool:
    """Whether a parameter has all-gather extensions."""
    return case.place == "hook" or case.fault in ("other pieces", "other traceable")


def batch(step: int, rank: int) -> Tensor:
    """(2, 8), another one for each step and rank."""
    return torch.full((2, 8), 1.0 + step + rank)


def train(case: Case, rank: int, folder: Path) -> dict[str, Tensor]:
    """All tensors after STEPS steps, each of which is saved."""
    happens = case.victim in (rank, EVERY_RANK)
    differs = happens and case.place == "start"
    if differs:
        (folder / "fault").write_text(str(time.time()))
    model, run = build(case, differs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Compiled hooks run while they are traced.
    first = case.place in ("compiling", "planning") or (case.place == "hook" and case.way != "uncompiled")
    for step in range(STEPS):
        if happens and not differs and step == (0 if first else FAULTY_STEP):
            _happens[case.place] = fault_of(case, folder / "fault")
        try:
            run(batch(step, rank)).square().mean().backward()
            optimizer.step()
            if not has_hooks(case):
                save(model, optimizer, folder / f"step-{step}")
        except (Exception, CheckpointException):
            if case.fault != "caught":
                raise
        optimizer.zero_grad()
    return state_of(model, optimizer)


def unsharded(case: Case) -> dict[str, Tensor]:
    """The same of a plain model with averaged gradients, which takes no step that the fault takes from the others."""
    model = Layers(breaks=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lost = 0 if case.place in ("compiling", "planning") else FAULTY_STEP
    steps = [step for step in range(STEPS) if case.fault == "slow" or case.place == "saving" or step != lost]
    for step in steps:
        for rank in range(case.world):
            (model(batch(step, rank)).square().mean() / case.world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """A folder for each step, as docs/faults.md says."""
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, storage_writer=Writer(path))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What `save` wrote, on any number of ranks."""
    states = get_state_dict(model, optimizer)
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
