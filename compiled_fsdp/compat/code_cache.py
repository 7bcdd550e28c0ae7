"""AOTAutograd's cache of compiled code, with a say in what is taken from it."""

# Why: docs/design.md, note N56

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_fsdp.compat import patches


class LoadedCode(NamedTuple):
    """Code of one graph, as it was found.

    Attributes:
        is_backward: whether it is a backward's.
        key: Inductor's for the graph that it was generated from.
    """

    is_backward: bool
    key: str


OnRun = Callable[[], contextlib.AbstractContextManager[None]]
"""To be called whenever code is about to run. It returns what is to be entered around that."""

Take = Callable[[tuple[LoadedCode, ...]], Sequence[OnRun] | None]


class CacheConsultant:
    """Asks, once a compile, whether the code that AOTAutograd's cache has is to be taken.

    Args:
        take: called with what was found, which may be nothing, before anything is compiled; returns what is to be
            called whenever each of the graphs runs, or None if they are to be compiled nevertheless. What is compiled
            goes into the cache.
        wrap: the code of a loaded graph, and what is to be called whenever it runs, as one function.
    """

    def __init__(self, take: Take, wrap: Callable[[Callable[..., Any], OnRun], Callable[..., Any]]) -> None:
        self._take, self._wrap = take, wrap
        self._was_asked = False

    def nothing_found(self) -> None:
        """Ask about nothing, if the cache was not looked into: it is off, or cannot keep such a graph."""
        if not self._was_asked:
            self._ask(())

    def _ask(self, found: tuple[LoadedCode, ...]) -> Sequence[OnRun] | None:
        self._was_asked = True
        return self._take(found)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, lookups in the cache ask ``take``."""
        return patches.installed(patches.CACHE_LOOKUP, self._lookup)

    def _lookup(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def try_load(*args: Any, **kwargs: Any) -> Any:
            graphs: list[tuple[LoadedCode, Any]] = []

            def replacement(finish: Callable[..., Any]) -> Callable[..., Any]:
                def post_compile(graph: Any, inputs: Any, constants: Any, graph_kwargs: Any) -> None:
                    finish(graph, inputs, constants, graph_kwargs)
                    is_backward = bool(graph_kwargs.get("is_backward"))
                    graphs.append((LoadedCode(is_backward, graph._fx_graph_cache_key or ""), graph))

                return post_compile

            with patches.installed(patches.CACHED_CODE, replacement):
                found = load(*args, **kwargs)
            code = found[0] if isinstance(found, tuple) else found  # the code alone before 2.13
            on_runs = self._ask(tuple(loaded for loaded, _ in graphs) if code is not None else ())
            if code is None:
                return found
            if on_runs is None:
                call = inspect.signature(load).bind(*args, **kwargs)
                call.arguments |= {"local": False, "remote": False}  # finds nothing, and notes where to save
                return load(*call.args, **call.kwargs)
            for (_, graph), on_run in zip(graphs, on_runs, strict=True):
                assert graph.current_callable is not None
                graph.current_callable = self._wrap(graph.current_callable, on_run)
            return found

        return try_load


def cache_directory() -> Path:
    """Where Inductor's caches are."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def code_caches_are_on() -> bool:
    """Whether the user lets AOTAutograd and Inductor keep code on disk, and this torch lets us ask about it."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    return bool(
        functorch_config.enable_autograd_cache
        and config.fx_graph_cache
        and not torch.compiler.config.force_disable_caches
        and all(map(patches.fits, (patches.CACHE_LOOKUP, patches.CACHED_CODE)))
    )
