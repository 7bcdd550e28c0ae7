"""The watcher that is told of collectives while they are launched and waited for: a profile, or usually none.

Without a watcher the cost is one call of ``current()``. Code that launches a collective outside of graphs announces it
here, with its parameters. For the collectives of a graph, the watcher reads the graph's report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from compiled_fsdp.compat.graphs import fake_mode_is_active


class Parameter(Protocol):
    """The attributes of a parameter that a watcher reads."""

    name: str
    param_id: int
    world: int


class Watcher(Protocol):
    """The methods that compiled_fsdp calls on a watcher; ``tools/profile_recorder.py`` implements them."""

    def graph(self, report: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context to enter around a call of a compiled graph with this ``GraphReport``."""

    def call_for(self, param_id: int) -> None:
        """Note that a compiled region is called for the layer with this first parameter.

        Equal layers share the region's code, so each call may be for another layer.
        """

    def reads(self, parameters: Sequence[Parameter]) -> None:
        """Note that the running graph reads these parameters."""

    def expect(self, kind: str, calls: Sequence[Sequence[Parameter]], sizes: Sequence[int]) -> None:
        """Note the collectives that are launched next.

        Args:
            kind: "gather", "reduce" or "all_reduce".
            calls: the parameters of each collective.
            sizes: the bytes of each collective's full tensors.
        """

    def blocking(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return the context to enter around a collective of compiled_fsdp that the host waits for at once."""


_watcher: Watcher | None = None


def current() -> Watcher | None:
    """The active watcher; None if there is none, or if tensors are fake, because nothing is launched then."""
    return None if _watcher is not None and fake_mode_is_active() else _watcher


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Any:
    """Let ``watcher`` watch this process while the context lasts.

    Raises:
        RuntimeError: another watcher is active.
    """
    global _watcher
    if _watcher is not None:
        raise RuntimeError("profile: another compiled_fsdp.profile is active; leave it first, they do not nest.")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
