"""The setting of a planned step, and its model on the meta device."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.tools.cli.parallel import split_over
from compiled_fsdp.tools.cli.shapes import SHAPES, Decoder, Shape


@dataclass(frozen=True)
class Setting:
    """The setting of a planned step.

    Attributes:
        model: a shape or its name in ``SHAPES``, or "package.module:function", which returns a module. With
            ``tensor_parallel`` the function takes the mesh of that dimension.
        inputs: "package.module:function", which takes batch and sequence and returns the tuple of the model's
            arguments; "" for a named model.
        world_size: how many ranks there are.
        replicate: how many groups of ranks hold the same shards (HSDP).
        tensor_parallel: how many ranks split each layer between them; they are neighbours.
        hardware: the hardware to plan for.
        batch: sequences of a microbatch on each rank; with tensor parallelism, those of ``tensor_parallel`` ranks
            together.
        sequence: tokens of a sequence.
        precision: a key of ``PRECISIONS``.
        reshard_after_forward: as ``fully_shard`` takes it, or "auto".
        checkpointing: for a named model: one of ``CHECKPOINTING``.
        budget: bytes on each rank; None for no limit.
        wire: the codecs of gathers and reductions, as ``wire_policy`` reads them.
        transport: the option ``transport``.
        options: further options of the backend, for example ``(("bucket", "module"),)``.
        microbatches: how many microbatches a step has.
        working_copy: how many neighbouring ranks hold a working copy of the parameters over the microbatches (HFSDP); 0
            for none.
    """

    model: str | Shape
    inputs: str
    world_size: int
    replicate: int
    tensor_parallel: int
    hardware: Hardware
    batch: int
    sequence: int
    precision: str
    reshard_after_forward: bool | int | str
    checkpointing: str
    budget: float | None
    wire: str = "none"
    transport: str = "backend"
    options: tuple[tuple[str, Any], ...] = ()
    microbatches: int = 1
    working_copy: int = 0


class NotPlannable(ValueError):
    """The model cannot be planned as asked; the message says why and what to do."""


def shape_of(setting: Setting) -> Shape | None:
    """Return the shape of a named model; None for a model of the user's."""
    return setting.model if isinstance(setting.model, Shape) else SHAPES.get(setting.model)


def name_of(setting: Setting) -> str:
    """Return the model's name, for people."""
    return setting.model.name if isinstance(setting.model, Shape) else setting.model


def model_of(setting: Setting, tensor: DeviceMesh) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model and its arguments, on the meta device.

    If ``tensor`` has more than one rank, a named model is split over it, and a factory gets it as its argument.
    """
    with torch.device("meta"):
        if (shape := shape_of(setting)) is not None:
            tokens = torch.zeros(setting.batch, setting.sequence, dtype=torch.int64)
            model = Decoder(shape, setting.checkpointing)
            if tensor.size() > 1:
                try:
                    split_over(model, tensor)
                except ValueError as error:
                    raise NotPlannable(str(error)) from error
            return model, (tokens, tokens.clone())
        if setting.checkpointing != "none":
            raise NotPlannable("--checkpointing is for named models; of your own model, checkpoint it in its factory.")
        path = setting.model
        assert isinstance(path, str)
        make = _imported("--model", path)
        if not setting.inputs:
            raise NotPlannable(f"--model {path} needs --inputs package.module:function, its arguments.")
        model = _called("--model", path, make, *([tensor] if tensor.size() > 1 else []))
        if not isinstance(model, nn.Module):
            raise NotPlannable(f"--model {path} must return a module, but returned {type(model).__name__}.")
        inputs = _imported("--inputs", setting.inputs)
        args = _called("--inputs", setting.inputs, inputs, setting.batch, setting.sequence)
        if not isinstance(args, (tuple, list)):
            raise NotPlannable(
                f"--inputs {setting.inputs} must return a tuple of the model's arguments, but returned "
                f"{type(args).__name__}."
            )
        return model, tuple(args)


def _called(option: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the user's, and return its result.

    Raises:
        NotPlannable: the function raised something. The message has the line that did.
    """
    try:
        return function(*args)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise NotPlannable(
            f"{option} {path} raised {type(error).__name__}: {one_line(error)} (at {where.filename}:{where.lineno})"
        ) from error


def one_line(error: Exception) -> str:
    """Return the first line of an error that has text, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _imported(option: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not name:
        known = ", ".join(SHAPES)
        raise NotPlannable(f"{option} must be one of {known}, or package.module:function, but is {path}.")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
        raise NotPlannable(
            f"{option} {path}: {one_line(error)}; the current folder and PYTHONPATH are searched."
        ) from error
