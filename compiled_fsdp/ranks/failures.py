"""The errors that name another rank, and how the error of a collective, which names an address, becomes one.

gloo says that a connection was lost. Whether a process of this machine has ended is known (``liveness.py``), so the
error that users see names the rank.
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
"""Seconds that a process may still take to end after its connections are closed: Python's own shutdown."""
_PAUSE = 0.05  # seconds between two looks
_OF_COLLECTIVES = ("gloo", "nccl", "ucc", "connection closed", "connection reset", "broken pipe")  # in errors' texts


class RanksDiffer(CompiledFsdpError, RuntimeError):
    """The ranks of a process group run different models or compile different regions, or one failed to compile."""


class RankEnded(CompiledFsdpError, dist.DistError):
    """A collective failed because the process of another rank has ended."""


class NamingEndedRanks:
    """To be entered around collectives: their error becomes one that names a rank which has ended, if one has.

    There is one object for all, without state: graphs are called often.
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
    """``transport.wait`` outside of graphs.

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
    """An error of this rank alone is there for the others to read, should its process end because of it."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not liveness.alone and not isinstance(error, dist.DistError):
            with suppress(dist.DistError):  # the store is gone, too: the error itself is raised
                liveness.store.set(_error_key(liveness, liveness.rank), str(error))
        raise


def _error_key(liveness: Liveness, rank: int) -> str:
    return f"{liveness.prefix}/error/{rank}"


def problem_key(liveness: Liveness) -> str:
    """Where a rank says of what, known to it alone, others will see no more than a lost connection."""
    return f"{liveness.prefix}/problem"


def _cause(error: RuntimeError) -> RuntimeError | None:
    """The error that names what ``error`` comes of; None if that is not known."""
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
                with suppress(dist.DistError):  # the store may end by now: the rank is known
                    told = liveness.value(_error_key(liveness, rank))
                last = f" The last error that it told of: {told}" if told else ""
                return RankEnded(
                    f"{why} rank {rank} of the group has ended (process {pid}): its own output says why.{last} {error}"
                )
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE)


def lost_store(liveness: Liveness) -> str:
    """What is known where the key-value store cannot be reached: whose process served it, and which ranks have ended.

    Which of them was the first only the store knew.
    """
    deadline = time.monotonic() + _ENDING
    while not (ended := liveness.seen_to_end()) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    each = [f"rank {rank} of the group has ended (process {pid})" for rank, pid in ended.items()]
    return "; ".join(["the process that serves the process group's store, mostly rank 0's, has ended", *each])


@contextmanager
def naming_a_lost_store(doing: str, liveness: Liveness) -> Iterator[None]:
    """To be entered where ranks talk through the store. ``doing``: what this rank does, for the error."""
    try:
        yield
    except dist.DistError as error:
        raise RanksDiffer(
            f"compiled_fsdp: while this rank {doing}, the process group's store could not be reached: "
            f"{lost_store(liveness)}. {error}"
        ) from error
