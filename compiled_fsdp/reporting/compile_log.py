"""What was compiled in this process: the backend writes it down, ``explain`` reads it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from compiled_fsdp.compat.dynamo import compiled_frames
from compiled_fsdp.reporting.report import GraphReport


@dataclass(frozen=True)
class FailedFrame:
    """A function that Dynamo gave up on as a whole, as it does at a graph break inside a loop.

    It runs uncompiled; what it calls is compiled alone.

    Attributes:
        filename: where the function is.
        line: the number of its first line.
        reason: why Dynamo gave up.
        where: the code line at fault.
    """

    filename: str
    line: int
    reason: str
    where: str


class CompileLog:
    """What was compiled since Dynamo was last reset.

    Attributes:
        graphs: in the order of compilation. Only the newest ones: a job that recompiles for ever must not fill memory.
        failed_frames: what Dynamo gave up on and has not compiled since, by file and first line.
    """

    def __init__(self) -> None:
        self.graphs: deque[GraphReport] = deque(maxlen=4096)
        self.failed_frames: dict[tuple[str, int], FailedFrame] = {}

    def collect_failed_frames(self) -> None:
        """Remember the frames that failed since the last call; Dynamo keeps the newest ones only."""
        for filename, line, reason, where in compiled_frames():
            if reason:
                self.failed_frames[filename, line] = FailedFrame(filename, line, reason, where)
            else:  # for example after an attempt with fullgraph=True
                self.failed_frames.pop((filename, line), None)

    def clear(self) -> None:
        """Forget everything, as ``torch._dynamo.reset()`` asks for."""
        self.graphs.clear()
        self.failed_frames.clear()


# The process's: one backend compiles all models, and any of its graphs may run for any of them.
COMPILE_LOG = CompileLog()
