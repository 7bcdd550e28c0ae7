"""Waiting for the posts of other ranks in the key-value store, as long as they can still come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from compiled_fsdp.base.logs import rank
from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.base.progress import BETWEEN, stage
from compiled_fsdp.ranks.failures import RanksDiffer, problem_key
from compiled_fsdp.ranks.heartbeat import Gone, Watch, sign_of
from compiled_fsdp.ranks.liveness import Liveness

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2  # seconds between two looks into the store
_PAUSE = 1 / 16  # of the time waited so far: the pause, and so the share by which a wait may be too long
_SECONDS_BETWEEN_LIVENESS_CHECKS = 1.0
_SECONDS_BEFORE_CALLING = 0.5  # until the ranks that do not come by themselves are called
_MOST_RANKS_NAMED = 4  # in texts about ranks that did not come


def wait_for(
    liveness: Liveness,
    key: str,
    waiting_for: str,
    missing: Callable[[], Sequence[int]],
    *,
    told_at: Sequence[str] = (),
    on_gone: Callable[[Gone, str], object] = lambda *_: None,
    on_late: Callable[[], object] = int,
    compiling: int | None = None,
) -> str:
    """Wait for a post under a key, and return it.

    About once a second it checks whether the other ranks' processes still run, and calls ``on_late``.

    Args:
        waiting_for: the beginning of the error message if nothing is posted in time, for example "not all 2 ranks of
            the group came to the meeting".
        missing: returns the ranks that have not come, for that message.
        told_at: keys, besides the group's, under which the reason may be posted if a rank is gone.
        on_gone: called with a rank that is gone and the error message.
        on_late: called while the wait lasts, for the first time after half a second.
        compiling: a rank that compiles for this one. As long as it gives signs of life, the timeout begins anew.

    Raises:
        RanksDiffer: nothing is posted within the group's timeout, or a rank is gone.
    """
    with stage("waiting for other ranks") as own:
        began = checked = named = time.monotonic()
        watch, seconds, sign = Watch(liveness), liveness.timeout.total_seconds(), ""
        until = began + seconds
        # The store's own wait is not used: a TCPStore logs two warnings for each wait that ends without an answer.
        while (value := liveness.value(key)) is None:
            now = time.monotonic()
            if now >= until:
                raise RanksDiffer(
                    f"compiled_fsdp: {waiting_for} within {liveness.timeout}; another rank failed, runs another model, "
                    "or compiles for longer than the process group's timeout (init_process_group(timeout=...)). "
                    f"{_last_seen(liveness, missing())}"
                )
            if now - checked >= (_SECONDS_BETWEEN_LIVENESS_CHECKS if checked != began else _SECONDS_BEFORE_CALLING):
                checked = now
                on_late()
                if compiling is not None and (latest := sign_of(liveness, compiling)) not in ("", sign):
                    sign, until = latest, now + seconds
                if own.is_long and rank() == 0 and now - named >= BETWEEN / 2:
                    named = now
                    own.text = f"waiting for {_ranks(missing())}"
                if (gone := watch.gone()) is not None and liveness.value(key) is None:
                    problem = next(filter(None, map(liveness.value, (*told_at, problem_key(liveness)))), None) or (
                        f"compiled_fsdp: rank {gone.rank} of the group {gone.how} while others waited for it: it was "
                        f"killed, or an error ended it, which it has shown. {_last_seen(liveness, [gone.rank])}"
                    )
                    on_gone(gone, problem)
                    raise RanksDiffer(problem)
            pause = min(max(_PAUSE * (now - began), _SHORTEST_PAUSE), _LONGEST_PAUSE)
            time.sleep(min(pause, max(until - now, 0.0)))
        return value


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks, the first few of them if there are many."""
    named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = len(ranks) - _MOST_RANKS_NAMED
    return f"rank{'s' * (len(ranks) != 1)} {named}" + (f" and {more} more" if more > 0 else "")


# ---- where ranks are -------------------------------------------------------------------------------------------------
def post_progress(liveness: Liveness, number: int, doing: str) -> None:
    """Post which round this rank has reached, and what it does there, for the error messages of other ranks."""
    liveness.store.set(f"{liveness.prefix}/at/{liveness.rank}", json.dumps([number, doing]))


def not_come_to(liveness: Liveness, number: int) -> list[int]:
    """The ranks that have not reached the round with this number."""
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
    return " ".join(named) + (f" {more} more ranks did not come either." if more > 0 else "")
