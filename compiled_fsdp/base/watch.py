"""Who watches collectives while they are launched and waited for: a profile, or nobody.

Nobody is the usual case, and costs a look at ``current()``. What is launched outside of graphs is announced here, by
the parameters that are in it; what a graph launches, the watcher knows from the graph's report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from compiled_fsdp.compat.graphs import fake_mode_is_active


class Parameter(Protocol):
    """What a watcher needs to know of a parameter."""

    name: str
    param_id: int
    world: int


class Watcher(Protocol):
    """What is told of collectives; see ``tools/profile_recorder.py``."""

    def graph(self, report: Any) -> contextlib.AbstractContextManager[None]:
        """To be entered around a call of a compiled graph."""

    def call_for(self, param_id: int) -> None:
        """A compiled region is called; this is its first parameter, which need not be that of its first call."""

    def reads(self, parameters: Sequence[Parameter]) -> None:
        """The running graph has these parameters."""

    def expect(self, kind: str, calls: Sequence[Sequence[Parameter]], sizes: Sequence[int]) -> None:
        """The next launches: their kind, their parameters, and the bytes of their full tensors."""

    def blocking(self, name: str) -> contextlib.AbstractContextManager[None]:
        """To be entered around a collective of our own that the host waits for at once."""


_watcher: Watcher | None = None


def current() -> Watcher | None:
    """Who watches; mostly nobody, and nobody where tensors are fake: nothing is launched."""
    return None if _watcher is not None and fake_mode_is_active() else _watcher


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Any:
    """Let ``watcher`` watch this process.

    Raises:
        RuntimeError: somebody does already.
    """
    global _watcher
    if _watcher is not None:
        raise RuntimeError("profile: another compiled_fsdp.profile is active; leave it first, they do not nest.")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
