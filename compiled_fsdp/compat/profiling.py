"""Calls of ops that go through a function for a while, and the events that torch's profiler has recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

Call = Callable[..., Any]


class _Through:
    """Calls an op through a function.

    It has the op's own hash, because torch looks ops up by their hash.
    """

    def __init__(self, function: Call, op: Call) -> None:
        self._function, self._op = function, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._op, *args, **kwargs)

    def __hash__(self) -> int:
        return hash(self._op)

    def __eq__(self, other: object) -> bool:
        return self is other


@contextlib.contextmanager
def called_through(functions: Mapping[torch._ops.OpOverload, Call]) -> Iterator[None]:
    """In this context, every call of these ops from Python is ``function(op, *args, **kwargs)``, with the original op.

    This includes calls from compiled code, except with Inductor's ``cpp_wrapper`` and in replays of CUDA graphs.
    """
    before = {op: op._op for op in functions}
    for op, function in functions.items():
        op._op = _Through(function, op._op)
    try:
        yield
    finally:
        for op, call in before.items():
            op._op = call


def functional_collectives() -> list[torch._ops.OpOverload]:
    """Return all ops of ``_c10d_functional``, waits included."""
    namespace = "_c10d_functional::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(namespace)]
    return [
        getattr(getattr(torch.ops._c10d_functional, name.removeprefix(namespace).partition(".")[0]), overload)
        for name in sorted(names)
        for overload in [name.partition(".")[2] or "default"]
    ]


def is_traced(tensors: Sequence[Tensor]) -> bool:
    """Whether a compiler makes a call with these tensors: such a call computes nothing."""
    from torch._subclasses.fake_tensor import is_fake

    return any(is_fake(tensor) for tensor in tensors) or torch.compiler.is_compiling()


def profiler_runs() -> bool:
    """Whether a profiler of torch is recording in this process."""
    return torch._C._autograd._profiler_enabled()


@dataclass(frozen=True)
class ProfiledEvent:
    """The profiler's record of an op, a named range, or an activity of a device.

    Attributes:
        name: the name of the op, range or kernel.
        start_ns: the start in nanoseconds, on one clock for host and device.
        end_ns: the end on the same clock.
        thread: the profiler's number of the host thread.
        is_range: whether it is a ``record_function``.
        on_host: whether it ran on the host.
        device_stream: for a device's activity: (device, stream).
        id: connects an op with its kernels, whose ``launched_by`` has the same number.
        launched_by: for a device's activity: the ``id`` of the innermost op that launched it; 0 for none.
        numel: the number of elements of an op's first tensor; -1 if it is not known.
        shapes: of an op's arguments in order; () for an argument that is no tensor, or has no dimension.
        dtype: torch's name of the dtype of an op's first tensor, "bfloat16"; "" if it is not known.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int
    is_range: bool
    on_host: bool
    device_stream: tuple[int, int]
    id: int
    launched_by: int
    numel: int
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""


def profiled_events(profiled: profile) -> list[ProfiledEvent]:
    """Return the records of a profiler that has stopped, ordered by start."""
    results: Any = profiled.profiler
    found = [_event(event) for event in results.kineto_results.events()]
    return sorted(found, key=lambda event: event.start_ns)


def _event(event: Any) -> ProfiledEvent:
    on_host = event.device_type() == torch._C._autograd.DeviceType.CPU
    shapes, dtypes = (event.shapes(), event.dtypes()) if on_host else ([], [])
    first = torch.Size(shapes[0]).numel() if shapes and _is_shape(shapes[0]) else -1
    return ProfiledEvent(
        event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.start_thread_id(),
        bool(event.is_user_annotation()), on_host, (event.device_index(), event.device_resource_id()),
        event.correlation_id(), event.linked_correlation_id(), first,
        tuple(tuple(shape) if _is_shape(shape) else () for shape in shapes),
        next((_DTYPES[name] for name in dtypes if name in _DTYPES), ""),
    )  # fmt: skip


_DTYPES = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128", "long int": "int64", "int": "int32", "signed char": "int8",
    "unsigned char": "uint8", "short int": "int16", "bool": "bool",
}  # fmt: skip
"""The profiler's names of dtypes, each with torch's."""


def _is_shape(found: Any) -> bool:
    """Whether it is the shape of one tensor; a list of tensors has a list of shapes."""
    return isinstance(found, list) and all(isinstance(size, int) for size in found)
