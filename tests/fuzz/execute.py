"""What a rank does with a program: it runs the text one way, and returns what the text noted."""

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

from tests.fuzz.source import COMPILED, IMPORTS, TRAIN

Notes = dict[str, "torch.Tensor | None"]

_number = iter(range(1 << 60))

PROGRAM = "<program"
"""How the names of programs begin that stand for their files."""
OBJECTS = 100_000
"""How many new ones Python's collector waits for. After each 700 it took a sixth of the time."""


_compiled: dict[str, types.ModuleType] = {}
"""The module of the last program that ours compiled, by its text."""


def run(rank: int, world_size: int, text: str, way: str, shares: bool = False) -> Notes:
    """What `train(way, note)` of the text notes, in full: losses, gradients, parameters, states.

    Args:
        rank, world_size: whose this is.
        text: of `source_of`.
        way: which of WAYS.
        shares: whether what was compiled for the program before is there, if the text of its model is the same.
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
        # of its own name: what Dynamo still has of the program before is not looked for in this one's globals
        module = types.ModuleType(f"tests.fuzz.text{next(_number)}")
        exec(IMPORTS, vars(module))
        vars(module)["init_device_mesh"] = _mesh
        _execute(model, module)
    sys.modules[module.__name__] = module  # Dynamo looks for globals there
    noted: dict[str, Any] = {}

    def note(name: str, tensor: Any) -> None:
        """Full tensors are made at the end: a collective here would change what is tried."""
        noted[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor

    _execute(TRAIN + train, module)
    logging.disable(logging.WARNING)  # Dynamo tells of each graph break
    with (
        warnings.catch_warnings(),
        _without_diagnoses(),
        torch._dynamo.config.patch(recompile_limit=64),
        # or torch's backends refuse a second backward, and say nothing of values
        torch._functorch.config.patch(donated_buffer=way not in ("torch", "partitioned")),
    ):
        warnings.simplefilter("ignore")
        vars(module)["train"](way, note)
    notes = {name: _full(value) for name, value in sorted(noted.items())}
    if way == "ours":
        _compiled[model] = module
    return notes


def _execute(text: str, module: types.ModuleType) -> None:
    """Run text as the module's. It stays in linecache, for tracebacks, until compiled code is forgotten."""
    name = f"{PROGRAM} {next(_number)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(module))


@contextlib.contextmanager
def _without_diagnoses() -> Iterator[None]:
    """What Dynamo does in each compile for its logs alone: how long guards take with cold caches, and where side
    effects are from.
    """
    with (
        mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0),
        torch._dynamo.config.patch(side_effect_replay_policy="silent"),
    ):
        yield


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Programs of one process share their process groups, whose threads live as long as it does."""
    return init_device_mesh(device, shape, mesh_dim_names=mesh_dim_names)


def _full(value: Any) -> torch.Tensor | None:
    """What is compared: the whole value, float8 as float32, because gloo sends no float8."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 1:
        value = value.float()
    return value.full_tensor() if isinstance(value, DTensor) else value
