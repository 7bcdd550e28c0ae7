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

from tests.fuzz.source import COMPILED, IMPORTS

Notes = dict[str, "torch.Tensor | None"]

_number = iter(range(1 << 60))

OBJECTS = 100_000
"""How many new ones Python's collector waits for. After each 700 it took a sixth of the time."""


def run(rank: int, world_size: int, text: str, way: str) -> Notes:
    """What `train(way, note)` of the text notes, in full: losses, gradients, parameters, states."""
    if way in COMPILED:
        torch.compiler.reset()
    gc.set_threshold(OBJECTS)
    module = sys.modules["tests.fuzz.text"] = types.ModuleType("tests.fuzz.text")  # Dynamo looks for globals there
    namespace = vars(module)
    exec(IMPORTS, namespace)
    namespace["init_device_mesh"] = _mesh
    name = f"<program {next(_number)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
    noted: dict[str, Any] = {}

    def note(name: str, tensor: Any) -> None:
        """Full tensors are made at the end: a collective here would change what is tried."""
        noted[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor

    try:
        exec(compile(text, name, "exec"), namespace)
        logging.disable(logging.WARNING)  # Dynamo tells of each graph break
        with warnings.catch_warnings(), _without_diagnoses():
            warnings.simplefilter("ignore")
            namespace["train"](way, note)
        return {name: _full(value) for name, value in sorted(noted.items())}
    finally:
        linecache.cache.pop(name, None)


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
    return value.full_tensor() if isinstance(value, DTensor) else value
