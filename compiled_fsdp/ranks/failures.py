"""Errors that name another rank, also for a failed collective, whose own error names only an address.

gloo only says that a connection was lost. ``liveness.py`` knows whether a process of this machine has ended, so the
error that users see can name the rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.buckets import transport
from compiled_fsdp.ranks.liveness import Liveness, all_signed_in

_ENDING = 3.0
"""Seconds that a process may still need to end after it has closed its connections (Python's own shutdown)."""
_PAUSE = 0.05  # seconds between two looks
# Words in the error messages of collectives.
_OF_COLLECTIVES = ("gloo", "nccl", "ucc", "connection closed", "connection reset", "broken pipe")


class RanksDiffer(CompiledFsdpError, RuntimeError):
    """The ranks of a process group run different models or compile different regions, or one failed to compile.

    The message names the ranks and the first difference. For example, rank 0 shards ``Linear(8, 8)`` and rank 1 shards
    ``Linear(8, 4)``: the message says how the weight differs.
    """


class RankEnded(CompiledFsdpError, dist.DistError):
    """A collective failed because the process of another rank has ended.

    The message names the rank if it ran on the same machine. For example, the process of rank 1 is killed in its
    forward: rank 0 gets this error from the collective that waits for rank 1.
    """


class NamingEndedRanks:
    """A context for code that runs collectives: if one fails because a rank has ended, the error names that rank.

    All code shares one object without state, because graphs are called often.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and _is_of_a_collective(error) and (cause := _cause(error)) is not None:
            raise cause from error


naming_ended_ranks = NamingEndedRanks()


def wait(bucket: Tensor) -> Tensor:
    """Wait for a launched bucket outside of graphs, as ``transport.wait`` does.

    Raises:
        RankEnded: the collective failed, and a rank has ended.
    """
    with naming_ended_ranks:
        return transport.wait(bucket)


def _is_of_a_collective(error: RuntimeError) -> bool:
    if isinstance(error, (RankEnded, RanksDiffer)):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _OF_COLLECTIVES)


@contextmanager
def telling(liveness: Liveness) -> Iterator[None]:
    """A context that stores this rank's error, so that other ranks can report it if this process ends because of it."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not liveness.alone and not isinstance(error, dist.DistError):
            with suppress(dist.DistError):  # the store is gone, too; the error itself is raised below
                liveness.store.set(_error_key(liveness, liveness.rank), str(error))
        raise


def _error_key(liveness: Liveness, rank: int) -> str:
    return f"{liveness.prefix}/error/{rank}"


def problem_key(liveness: Liveness) -> str:
    """The key of a problem that one rank has found, and that other ranks would see only as a lost connection."""
    return f"{liveness.prefix}/problem"


def _cause(error: RuntimeError) -> RuntimeError | None:
    """The error that names the cause of ``error``; None if the cause is not known."""
    why = "compiled_fsdp: a collective failed, because"
    deadline = time.monotonic() + _ENDING
    while True:
        for liveness in all_signed_in():
            if liveness.alone:
                continue
            try:
                ended, problem = liveness.ended(), liveness.value(problem_key(liveness))
            except dist.DistError:
                return RankEnded(f"{why} {lost_store(liveness)}. {error}")
            if problem is not None:
                return RanksDiffer(problem)
            if ended is not None:
                rank, pid = ended
                told = None
                with suppress(dist.DistError):  # the store may be gone, but the rank is known
                    told = liveness.value(_error_key(liveness, rank))
                last = f" The last error that it told of: {told}" if told else ""
                return RankEnded(
                    f"{why} rank {rank} of the group has ended (process {pid}): its own output says why.{last} {error}"
                )
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE)


def lost_store(liveness: Liveness) -> str:
    """A text for errors if the key-value store cannot be reached: whose process served it, and which ranks have ended.

    It does not say which rank ended first, because only the store knows that.
    """
    deadline = time.monotonic() + _ENDING
    while not (ended := liveness.seen_to_end()) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    each = [f"rank {rank} of the group has ended (process {pid})" for rank, pid in ended.items()]
    return "; ".join(["the process that serves the process group's store, mostly rank 0's, has ended", *each])


@contextmanager
def naming_a_lost_store(doing: str, liveness: Liveness) -> Iterator[None]:
    """A context for code that uses the store: raises RanksDiffer if the store cannot be reached.

    ``doing`` says in the error what this rank did, for example "agreed with the others on the plan".
    """
    try:
        yield
    except dist.DistError as error:
        raise RanksDiffer(
            f"compiled_fsdp: while this rank {doing}, the process group's store could not be reached: "
            f"{lost_store(liveness)}. {error}"
        ) from error
