"""Count the most bytes that Inductor's wrapper holds at once, by reading the wrapper's text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from math import prod

import torch

_ALLOCATES = ("empty_strided_cuda", "empty_strided_cpu")


def wrapper_peak(text: str, inputs: Mapping[str, int]) -> int:
    """Bytes at the peak of the wrapper's function ``call``.

    A buffer lives while a name refers to it. A buffer that is not deleted is a result. Kernels whose results the
    wrapper does not allocate itself, such as attention, are refused.

    Args:
        text: the wrapper.
        inputs: bytes of the inputs by name. An input that the wrapper does not delete stays to the end.
    """
    function = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "call")
    size: dict[str, int] = {}  # by the name that a buffer had first
    behind: dict[str, str] = {}  # each name's buffer
    live = peak = 0
    for statement in _statements(function.body):
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                assert isinstance(target, ast.Name)
                buffer = behind.pop(target.id, None)
                if buffer is not None and buffer not in behind.values():
                    live -= size[buffer]
        elif isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            new = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
            if new:  # the inputs
                size |= {name: inputs.get(name, 0) for name in new}
            elif isinstance(target, ast.Name) and (source := _source(value)) in behind:
                behind[target.id] = behind[source]
            elif isinstance(target, ast.Name) and isinstance(value, ast.Call):
                called = ast.unparse(value.func)
                if called in _ALLOCATES:
                    shape, dtype = ast.literal_eval(value.args[0]), ast.unparse(value.args[2])
                    size[target.id] = prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
                    new = [target.id]
                else:
                    assert not target.id.startswith("buf"), f"of unknown size: {ast.unparse(statement)}"
            behind |= {name: name for name in new}
            live += sum(size[name] for name in new)
            peak = max(peak, live)
    return peak


def _source(value: ast.expr) -> str:
    """The name that another one is a new name for, as in ``buf3 = reinterpret_tensor(mm_21, ...)``; "" if none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement
