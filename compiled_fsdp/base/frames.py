"""Python's frames, which long loops deep in a stack of calls can make slow.

CPython keeps the frames of Python functions in pieces of 16 KB. A call that does not fit into the last piece maps a new
one, and its return unmaps that. So a loop that happens to run at the end of a piece maps memory in each call, which
makes a small call 300 times as slow (python/cpython#142183; 3.11 and 3.12 stay so, later versions were mended in 2026).
With 32 layers a third of a compile was spent on that.
"""

# Why: docs/design/torch.md, "Frames of a compile are in one piece of memory"

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS = 2**17  # values of 8 bytes; a page of them takes memory once it is used


def frames_in_one_piece(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that its calls, and theirs, have their frames in one piece of memory.

    For example::

        @frames_in_one_piece
        def compile(graph): ...

    A frame that is larger than a piece gets one that is up to twice as large as the frame. Frames of the calls inside
    use the rest of it, here 1 MiB, enough for about 4,000 calls inside each other.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    if sys.version_info >= (3, 11):  # before that each frame is an object of its own
        run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return run
