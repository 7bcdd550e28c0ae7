"""Waiting for what other ranks post in the key-value store, as long as it can still come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.ranks.failures import RanksDiffer, problem_key
from compiled_fsdp.ranks.heartbeat import Gone, Watch
from compiled_fsdp.ranks.liveness import Liveness

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2  # seconds between two looks into the store
_PAUSE = 1 / 16  # of the time waited so far: what a wait may be longer than it has to be
_SECONDS_BETWEEN_LIVENESS_CHECKS = 1.0
_SECONDS_BEFORE_CALLING = 0.5  # until the ranks that do not come by themselves are asked for
_MOST_RANKS_NAMED = 4  # in an error about ranks that did not come


def wait_for(
    liveness: Liveness,
    key: str,
    waiting_for: str,
    missing: Callable[[], Sequence[int]],
    *,
    told_at: Sequence[str] = (),
    on_gone: Callable[[Gone, str], object] = lambda *_: None,
    on_late: Callable[[], object] = int,
) -> str:
    """What is posted under a key.

    Meanwhile once a second it is asked whether the other ranks' processes still run, and ``on_late`` is called.

    Args:
        waiting_for: what is missing in time, in words.
        missing: which ranks that means.
        told_at: keys under which a rank that is gone may have posted why, beside the group's.
        on_gone: told of such a rank, and of the error.

    Raises:
        RanksDiffer: nothing is posted within the group's timeout, or a rank is gone.
    """
    began = checked = time.monotonic()
    watch, seconds = Watch(liveness), liveness.timeout.total_seconds()
    # Not the store's own wait: a TCPStore writes two warnings for each one that ends without an answer.
    while (value := liveness.value(key)) is None:
        now = time.monotonic()
        if now >= began + seconds:
            raise RanksDiffer(
                f"compiled_fsdp: {waiting_for} within {liveness.timeout}; another rank failed, runs another model, or "
                "compiles for longer than the process group's timeout (init_process_group(timeout=...)). "
                f"{_last_seen(liveness, missing())}"
            )
        if now - checked >= (_SECONDS_BETWEEN_LIVENESS_CHECKS if checked != began else _SECONDS_BEFORE_CALLING):
            checked = now
            on_late()
            if (gone := watch.gone()) is not None and liveness.value(key) is None:
                problem = next(filter(None, map(liveness.value, (*told_at, problem_key(liveness)))), None) or (
                    f"compiled_fsdp: rank {gone.rank} of the group {gone.how} while others waited for it: it was "
                    f"killed, or an error ended it, which it has shown. {_last_seen(liveness, [gone.rank])}"
                )
                on_gone(gone, problem)
                raise RanksDiffer(problem)
        pause = min(max(_PAUSE * (now - began), _SHORTEST_PAUSE), _LONGEST_PAUSE)
        time.sleep(min(pause, max(began + seconds - now, 0.0)))
    return value


# ---- where ranks are -------------------------------------------------------------------------------------------------
def post_progress(liveness: Liveness, number: int, doing: str) -> None:
    """Which round this rank has come to, and what it does there, for the others' errors."""
    liveness.store.set(f"{liveness.prefix}/at/{liveness.rank}", json.dumps([number, doing]))


def not_come_to(liveness: Liveness, number: int) -> list[int]:
    """The ranks that have not come to a round."""
    return [rank for rank in range(liveness.size) if _progress(liveness, rank)[0] < number]


def _progress(liveness: Liveness, rank: int) -> tuple[int, str]:
    posted = liveness.value(f"{liveness.prefix}/at/{rank}")
    if posted is None:
        return -1, "has compiled nothing with this group so far"
    return from_json(tuple[int, str], posted)


def _last_seen(liveness: Liveness, ranks: Sequence[int]) -> str:
    seen = {rank: _progress(liveness, rank) for rank in ranks[:_MOST_RANKS_NAMED]}
    named = [f"Rank {rank} {'last ' if number >= 0 else ''}{doing}." for rank, (number, doing) in seen.items()]
    more = len(ranks) - _MOST_RANKS_NAMED
    return " ".join(named) + (f" So did {more} more ranks not come." if more > 0 else "")
