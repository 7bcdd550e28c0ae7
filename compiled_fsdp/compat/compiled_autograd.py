"""Compiled autograd: run backwards with it and a given compiler, and ask whether it runs."""

# Why: docs/design/graph-breaks.md, "Compiled autograd's graph is a region"

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.dynamo import skip_as_frame
from compiled_fsdp.compat.graphs import fake_mode_is_active


@contextlib.contextmanager
def compiled_autograd_of(compiler: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which each backward is captured as one graph and compiled by ``compiler``.

    It does nothing if it is entered under a ``FakeTensorMode``.

    Raises:
        RuntimeError: a backward runs under a ``FakeTensorMode`` that was entered inside of this context.
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
    with _hooks_of_unused_gradients(), torch._dynamo.compiled_autograd._enable(compile_real, dynamic=False):
        yield


@contextlib.contextmanager
def _hooks_of_unused_gradients() -> Iterator[None]:
    """Let torch place pre-hooks of nodes even if nothing uses the hook's first result.

    Torch 2.11 to 2.15 put a node's pre-hook in front of the first node that uses the hook's first result, and end in
    StopIteration if there is none. For example, nothing uses the gradient of a graph's output that needs no gradient.
    """

    def replacement(place: Callable[..., Any]) -> Callable[..., Any]:
        def place_used(self: Any) -> None:
            graph = self.fx_tracer.graph
            for hook in [node for node in graph.nodes if node.kwargs.get("hook_type") == "pre_hook"]:
                unused = [result for result in hook.users if not result.users]
                for result in unused if len(unused) < len(hook.users) else ():
                    graph.erase_node(result)
            place(self)

        return place_used

    with patches.installed(patches.PRE_HOOKS, replacement):
        yield


def compiled_autograd_runs() -> bool:
    """Whether compiled autograd is compiling or running a captured graph; no autograd node runs then."""
    return bool(_compiled_autograd().in_compiled_autograd_region)


@functools.cache
@skip_as_frame
def _compiled_autograd() -> Any:
    import torch._dynamo.compiled_autograd

    return torch._dynamo.compiled_autograd


def in_compiled_autograd() -> bool:
    """Whether hooks and backwards of autograd nodes run as a part of compiled autograd's graph.

    Dynamo traces that graph, or the graph runs uncompiled, for example because a user's backward has raised an error.
    Functions that are queued for the end of such a backward are never called. A backward inside of it, for example a
    reentrant checkpoint's, is an ordinary one, and is not meant here.
    """
    if torch.compiler.is_compiling():
        return True
    return compiled_autograd_runs() and torch._C._current_autograd_node() is None
