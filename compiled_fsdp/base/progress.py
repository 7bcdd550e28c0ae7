"""Long work says which stage it is in: a compile, a meeting of ranks, a measurement.

    compiled_fsdp: compiling a graph of 291 parameters for 42 s: planning the backward graph for 11 s

Rank 0 says it once the outermost stage has taken ``FIRST`` seconds. In a terminal the line changes every second, and is
removed in the end. Elsewhere the logger ``compiled_fsdp.base.progress`` gets a line every ``BETWEEN`` seconds. It is
silenced by ``logging.getLogger("compiled_fsdp.base.progress").setLevel(logging.ERROR)``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from compiled_fsdp.base.logs import rank

log = logging.getLogger(__name__)

FIRST = 20.0
"""Seconds after which work counts as long."""
BETWEEN = 30.0
"""Seconds between two lines of a log."""
_IN_A_TERMINAL = 1.0  # seconds between two states of the line there
_CLEAR_LINE = "\r\x1b[K"


@dataclass
class Stage:
    """A stage of some work. ``text`` says what is done; it may change meanwhile."""

    text: str
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.began

    @property
    def is_long(self) -> bool:
        """Whether the stage has taken so long that its text may be shown."""
        return self.seconds >= FIRST

    def goes_on(self, text: str) -> None:
        """Begin the next part of the same work."""
        self.text, self.began = text, time.monotonic()

    def __str__(self) -> str:
        return f"{self.text} for {self.seconds:.0f} s"


# The stages that run now, the outermost first, of all threads; and what ends the thread that shows them.
_stages: list[Stage] = []
_lock = threading.Lock()
_over: threading.Event | None = None


@contextlib.contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Run the body as a stage of what runs already, or as the first one.

    For example::

        with stage("compiling a graph"), stage("planning it"):
            ...

    Args:
        text: what is done, without an end: "measuring the hardware".
    """
    global _over
    own = Stage(text)
    with _lock:
        _stages.append(own)
        if _over is None and rank() == 0:
            _over = threading.Event()
            threading.Thread(target=_show, args=(_over,), name="compiled_fsdp progress", daemon=True).start()
    try:
        yield own
    finally:
        with _lock:
            _stages.remove(own)
            if not _stages and _over is not None:
                _over.set()
                _over = None


def _show(over: threading.Event) -> None:
    """Show the stages, from ``FIRST`` seconds on until ``over`` is set."""
    if over.wait(FIRST):
        return
    in_terminal, has_shown = sys.stderr.isatty(), False
    while True:
        if log.isEnabledFor(logging.WARNING) and (text := line()):
            if in_terminal:
                print(_CLEAR_LINE + text, end="", file=sys.stderr, flush=True)
            else:
                log.warning("%s", text)
            has_shown = True
        if over.wait(_IN_A_TERMINAL if in_terminal else BETWEEN):
            break
    if in_terminal and has_shown:
        print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def line() -> str:
    """The stages that run now, in one line; "" if none does."""
    with _lock:
        return "compiled_fsdp: " + ": ".join(map(str, _stages)) if _stages else ""
