"""A rank's part in a program: run the text one way, and return the values that the text noted."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat import region_calls
from compiled_fsdp.compiler import equal_layers
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from tests.fuzz.source import COMPILED, IMPORTS, TRAIN
from tests.harness.budgets import GIVEN

Notes = dict[str, "torch.Tensor | None"]

_number = iter(range(1 << 60))

PROGRAM = "<program"
"""The beginning of the file names that programs have in tracebacks."""
OBJECTS = 100_000
"""New objects between two garbage collections. With Python's default of 700, collections take a sixth of the time."""


traced_once: list[int] = []
"""For each graph of this process whose equal layers were traced once, how many layers these were."""

_compiled: dict[str, types.ModuleType] = {}
"""The module of the last program that compiled_fsdp compiled, by the text of its model."""


def run(rank: int, world_size: int, text: str, way: str, shares: bool = False) -> Notes:
    """Run `train(way, note)` of the text; return the noted values in full: losses, gradients, parameters, states.

    Args:
        rank, world_size: this rank, and the number of ranks.
        text: the text that `source_of` returned.
        way: one of WAYS.
        shares: whether the code compiled for the previous program is used again if the text of its model is the same.
    """
    model, _, train = text.partition(TRAIN)
    module = _compiled.get(model) if shares and way == "ours" else None
    if way in COMPILED:
        _compiled.clear()
        if module is None:
            torch.compiler.reset()
            for name in [name for name in linecache.cache if name.startswith(PROGRAM)]:
                del linecache.cache[name]
    gc.set_threshold(OBJECTS)
    if module is None:
        # a name of its own, so that Dynamo does not look for an earlier program's globals in this one's
        module = types.ModuleType(f"tests.fuzz.text{next(_number)}")
        exec(IMPORTS, vars(module))
        vars(module)["init_device_mesh"] = _mesh
        _execute(model, module)
    sys.modules[module.__name__] = module  # Dynamo looks for globals there
    noted: dict[str, Any] = {}
    GIVEN.clear()

    def note(name: str, tensor: Any) -> None:
        """Keep a value. Full tensors are made at the end, because a collective here would change the program."""
        noted[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor

    _execute(TRAIN + train, module)
    logging.disable(logging.WARNING)  # Dynamo warns of each graph break
    with (
        warnings.catch_warnings(),
        _without_diagnoses(),
        _layers_counted(),
        torch._dynamo.config.patch(recompile_limit=64),
        # with donated buffers torch's backends refuse a second backward, and then there are no values to compare
        torch._functorch.config.patch(donated_buffer=way not in ("torch", "partitioned")),
        torch._inductor.config.patch(fallback_random=True),  # the same dropouts as in eager code
    ):
        warnings.simplefilter("ignore")
        vars(module)["train"](way, note)
    if way == "ours":
        _check_budget()
    notes = {name: _full(value) for name, value in sorted(noted.items())}
    if way == "ours":
        _compiled[model] = module
    return notes


def _check_budget() -> None:
    """Raise AssertionError if a plan holds more than the last memory budget that `tight_for` gave."""
    peaks = [graph.numbers.peak for graph in COMPILE_LOG.graphs if graph.numbers is not None]
    if GIVEN and max(peaks, default=0) > GIVEN[-1]:
        raise AssertionError(f"a plan holds {max(peaks):,} bytes, but the memory budget is {GIVEN[-1]:,}")


def _execute(text: str, module: types.ModuleType) -> None:
    """Run text in the module. The text stays in linecache, for tracebacks, until compiled code is dropped."""
    name = f"{PROGRAM} {next(_number)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(module))


@contextlib.contextmanager
def _without_diagnoses() -> Iterator[None]:
    """Leave out work that Dynamo does in each compile only for its logs: it measures how long guards take with cold
    caches, and finds out where side effects come from.
    """
    with (
        mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0),
        torch._dynamo.config.patch(side_effect_replay_policy="silent"),
    ):
        yield


@contextlib.contextmanager
def _layers_counted() -> Iterator[None]:
    """Count layers that are traced once. Take back what the program sets (`tests/harness/short_layers.py`)."""
    inline = region_calls._inline

    def counted(gm: Any, layers: Any) -> None:
        inline(gm, layers)
        traced_once.append(len(layers))

    with (
        mock.patch.object(region_calls, "_inline", counted),
        mock.patch.object(equal_layers, "LEAST_CALLS", equal_layers.LEAST_CALLS),
    ):
        yield


def take_traced_once(rank: int, world_size: int) -> list[int]:
    """Return `traced_once`, and begin to count anew."""
    taken = list(traced_once)
    traced_once.clear()
    return taken


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return a mesh. Programs of one process share it, because process groups' threads live as long as the process."""
    return init_device_mesh(device, shape, mesh_dim_names=mesh_dim_names)


def _full(value: Any) -> torch.Tensor | None:
    """Return the full value, for the comparison; float8 as float32, because gloo sends no float8."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 1:
        value = value.float()
    return value.full_tensor() if isinstance(value, DTensor) else value
