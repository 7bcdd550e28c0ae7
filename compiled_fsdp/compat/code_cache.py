"""AOTAutograd's cache of compiled code, with a callback that decides whether to take code from it."""

# Why: docs/design/ranks.md, "All ranks take cached code, or none"

from __future__ import annotations

import contextlib
import enum
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_fsdp.compat import patches


class LoadedCode(NamedTuple):
    """The code of one graph, as the cache has it.

    Attributes:
        is_backward: whether it is the code of a backward graph.
        key: Inductor's key of the graph that the code was generated from.
    """

    is_backward: bool
    key: str


OnRun = Callable[[], contextlib.AbstractContextManager[None]]
"""Called whenever code is about to run; returns a context to enter around the run."""


class Again(enum.Enum):
    """A reply to what was found: look into the cache once more."""

    AGAIN = enum.auto()


AGAIN = Again.AGAIN
Take = Callable[[tuple[LoadedCode, ...], str | None], Sequence[OnRun] | Again | None]


class CacheConsultant:
    """Asks, once for each compile, whether to take the code that AOTAutograd's cache has.

    Args:
        take: called before anything is compiled, with the code that the cache has for each graph (empty if it has
            none), and with the cache's key; None if the cache can hold no code for these graphs. Returns an ``OnRun``
            for each graph, or None to compile the graphs anyway, or AGAIN to look into the cache a second time and be
            called with the result. Newly compiled code goes into the cache.
        wrap: makes one function of a loaded graph's code and its ``OnRun``.
    """

    def __init__(self, take: Take, wrap: Callable[[Callable[..., Any], OnRun], Callable[..., Any]]) -> None:
        self._take, self._wrap = take, wrap
        self._was_asked = False

    def nothing_found(self) -> None:
        """Call ``take`` without code, if there was no lookup: the cache is off, or cannot keep such a graph."""
        if not self._was_asked:
            self._ask((), None)

    def _ask(self, found: tuple[LoadedCode, ...], key: str | None) -> Sequence[OnRun] | Again | None:
        self._was_asked = True
        return self._take(found, key)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which lookups in the cache ask ``take``."""
        return patches.installed(patches.CACHE_LOOKUP, self._lookup)

    def _lookup(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def try_load(*args: Any, **kwargs: Any) -> Any:
            while (found := try_once(*args, **kwargs)) is AGAIN:
                pass
            return found

        def try_once(*args: Any, **kwargs: Any) -> Any:
            graphs: list[tuple[LoadedCode, Any]] = []

            def replacement(finish: Callable[..., Any]) -> Callable[..., Any]:
                def post_compile(graph: Any, inputs: Any, constants: Any, graph_kwargs: Any) -> None:
                    finish(graph, inputs, constants, graph_kwargs)
                    is_backward = bool(graph_kwargs.get("is_backward"))
                    graphs.append((LoadedCode(is_backward, graph._fx_graph_cache_key or ""), graph))

                return post_compile

            with patches.installed(patches.CACHED_CODE, replacement):
                found = load(*args, **kwargs)
            code = found[0] if isinstance(found, tuple) else found  # torch before 2.13 returns the code alone
            call = inspect.signature(load).bind(*args, **kwargs)
            on_runs = self._ask(tuple(loaded for loaded, _ in graphs) if code is not None else (), _key(found, call))
            if on_runs is AGAIN:
                return AGAIN
            if code is None:
                return found
            if on_runs is None:
                call.arguments |= {"local": False, "remote": False}  # finds nothing, but notes where to save
                return load(*call.args, **call.kwargs)
            assert not isinstance(on_runs, Again)
            for (_, graph), on_run in zip(graphs, on_runs, strict=True):
                assert graph.current_callable is not None
                graph.current_callable = self._wrap(graph.current_callable, on_run)
            return found

        return try_load


def _key(found: Any, call: inspect.BoundArguments) -> str | None:
    """Return the key under which the cache would save what is compiled now; None if it would not save it."""
    config = found[1] if isinstance(found, tuple) else call.arguments["aot_config"]
    info = getattr(config, "cache_info", None)
    return None if info is None else str(info.cache_key)


def cache_directory() -> Path:
    """Return the folder of Inductor's caches, which may not exist yet."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def code_caches_are_on() -> bool:
    """Whether the user lets AOTAutograd and Inductor keep code on disk, and the cache's patches fit this torch."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    return bool(
        functorch_config.enable_autograd_cache
        and config.fx_graph_cache
        and not torch.compiler.config.force_disable_caches
        and all(map(patches.fits, (patches.CACHE_LOOKUP, patches.CACHED_CODE)))
    )
