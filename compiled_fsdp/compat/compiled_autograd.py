"""Compiled autograd: whether it runs, and what compiles its graphs."""

# Why: docs/design.md, note N30

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_fsdp.compat.graphs import fake_mode_is_active


@contextlib.contextmanager
def compiled_autograd_of(compiler: Callable[..., Any]) -> Iterator[None]:
    """Backwards in this context are captured as one graph and compiled by ``compiler``.

    Entered under a ``FakeTensorMode`` it does nothing.

    Raises:
        RuntimeError: a backward under a ``FakeTensorMode`` that was entered later.
    """
    import torch._dynamo.compiled_autograd

    def compile_real(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        code = compiler(gm)

        def run(*args: Any) -> Any:
            if fake_mode_is_active():
                raise RuntimeError(
                    "compiled_fsdp: a backward of fake tensors runs in a compiled_autograd() that was entered before "
                    "FakeTensorMode. Enter compiled_autograd() inside of FakeTensorMode, where it does nothing."
                )
            return code(*args)

        return run

    if fake_mode_is_active():
        yield
        return
    with torch._dynamo.compiled_autograd._enable(compile_real, dynamic=False):
        yield


def compiled_autograd_runs() -> bool:
    """Whether compiled autograd runs what it has captured, or compiles that; no autograd node runs then."""
    import torch._dynamo.compiled_autograd

    return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)
