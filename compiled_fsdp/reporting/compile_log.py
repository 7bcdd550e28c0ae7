"""The log of all graphs compiled in this process: the backend writes it, and ``explain`` reads it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from compiled_fsdp.compat.dynamo import compiled_frames
from compiled_fsdp.reporting.report import GraphReport


@dataclass(frozen=True)
class FailedFrame:
    """A function that Dynamo gave up on as a whole, for example because of a graph break inside a loop.

    It runs uncompiled; Dynamo compiles the functions that it calls one by one.

    Attributes:
        filename: the function's file.
        line: the number of its first line.
        reason: why Dynamo gave up.
        where: the code line at fault.
    """

    filename: str
    line: int
    reason: str
    where: str


@dataclass(frozen=True)
class UpdateReport:
    """A graph of an optimizer's compiled update (``TrainStep(compile_update=True)``).

    Attributes:
        optimizer: the name of its class.
        param_ids: the parameters that the graph updates.
        moved: the bytes that it reads and writes.
    """

    optimizer: str
    param_ids: frozenset[int]
    moved: int


class CompileLog:
    """The graphs that were compiled, and the functions that failed to compile, since Dynamo was last reset.

    Attributes:
        graphs: reports in the order of compilation. Only the newest ones are kept, so that a job that recompiles
            for ever does not fill memory.
        failed_frames: functions that Dynamo gave up on and has not compiled since, by file and first line.
        updates: compiled updates, which a reset of Dynamo leaves as they are. The newest ones are kept.
    """

    def __init__(self) -> None:
        self.graphs: deque[GraphReport] = deque(maxlen=4096)
        self.failed_frames: dict[tuple[str, int], FailedFrame] = {}
        self.updates: deque[UpdateReport] = deque(maxlen=4096)

    def collect_failed_frames(self) -> None:
        """Record the frames that failed since the last call, because Dynamo keeps only the newest ones."""
        for filename, line, reason, where in compiled_frames():
            if reason:
                self.failed_frames[filename, line] = FailedFrame(filename, line, reason, where)
            else:  # compiled in the meantime, for example after a failed attempt with fullgraph=True
                self.failed_frames.pop((filename, line), None)

    def clear(self) -> None:
        """Forget what Dynamo forgets; ``torch._dynamo.reset()`` calls this."""
        self.graphs.clear()
        self.failed_frames.clear()


# One log for the process, because one backend compiles all models, and several models may run the same graph.
COMPILE_LOG = CompileLog()
