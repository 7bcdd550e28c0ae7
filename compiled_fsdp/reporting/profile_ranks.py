"""Who is late: ranks tell each other how long each collective was in flight, at the end of a profile.

All ranks of a collective are done with it at about the same time, so clocks need not agree: it was in flight for the
shortest time on the rank that launched it last. What the others waited longer than that, they waited for that rank.

They meet in the process group's key-value store. Rank 0 reads everybody's summary and posts what comes of them, so the
traffic grows with the number of ranks and not with its square. A rank that does not come, or left by an exception, is an
error on all that came.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from compiled_fsdp.reporting.profile_times import ProfileError
from compiled_fsdp.sharding.liveness import Liveness

# Profiles by group: a store outlives them.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

_PAUSE = 0.02  # seconds between two looks into the store
_FOR_RANK_0 = 10.0  # seconds that the others wait longer than rank 0, which waits for them
_MOST_NAMED = 4

Entry = tuple[int, float, float]
"""Of a collective: the step, seconds in flight, seconds exposed."""

Summary = Mapping[str, Sequence[Entry]]
"""A rank's collectives in order, by the ranks of their group ("0,1")."""


@dataclass(frozen=True)
class Together:
    """What comes of all ranks' summaries.

    Attributes:
        left_out: steps in which a rank compiled.
        fastest: seconds that each collective was in flight on the rank that launched it last, by group.
        lost: ``lost[late][waiting]``: seconds that a rank waited for another one to launch, over all steps that count.
            Ranks are places in the group that agrees.
    """

    left_out: tuple[int, ...]
    fastest: Mapping[str, Sequence[float]]
    lost: Mapping[int, Mapping[int, float]]


def merged(summaries: Sequence[Summary], left_out: Sequence[int] = ()) -> Together:
    """``Together`` from the summaries of ranks 0, 1, ...

    Raises:
        ProfileError: ranks of one group ran different numbers of collectives.
    """
    fastest: dict[str, list[float]] = {}
    lost: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for group in dict.fromkeys(group for summary in summaries for group in summary):
        members = {rank: summary[group] for rank, summary in enumerate(summaries) if group in summary}
        counts = {rank: len(entries) for rank, entries in members.items()}
        few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        if counts[few] != counts[many]:
            raise ProfileError(
                f"profile: rank {few} ran {counts[few]} collectives of ranks {group}, and rank {many} {counts[many]}; "
                "enter and leave the profile at the same place on every rank."
            )
        fastest[group] = []
        for entries in zip(*members.values(), strict=True):
            at = dict(zip(members, entries, strict=True))
            late = min(at, key=lambda rank: at[rank][1])
            shortest = at[late][1]
            fastest[group].append(shortest)
            for rank, (step, _, exposed) in at.items():
                if rank != late and step not in left_out and exposed > shortest:
                    lost[late][rank] += exposed - shortest
    return Together(tuple(left_out), fastest, {late: dict(of) for late, of in lost.items()})


def exchange(liveness: Liveness, summary: Summary, left_out: Sequence[int], timeout: timedelta) -> Together:
    """Everybody's summaries, on all ranks: to be called on each of the group.

    Raises:
        ProfileError: a rank did not come within ``timeout``, ended, or left its profile by an exception.
    """
    if liveness.alone:
        return merged([summary], left_out)
    return _Meeting(liveness, timeout).held(summary, left_out)


def abandon(liveness: Liveness, error: BaseException) -> None:
    """Tell the other ranks that this one left its profile by an exception: they need not wait."""
    if not liveness.alone:
        _Meeting(liveness, timedelta()).post_failure(f"left its profile by an exception: {error!r}")


class _Meeting:
    def __init__(self, liveness: Liveness, timeout: timedelta) -> None:
        self._liveness, self._store = liveness, liveness.store
        self._timeout = timeout.total_seconds()
        self._name = f"{liveness.prefix}/profile/{next(_numbers[liveness.name])}"

    def held(self, summary: Summary, left_out: Sequence[int]) -> Together:
        liveness = self._liveness
        mine = json.dumps({"summary": summary, "left_out": list(left_out)})
        if liveness.rank != 0:
            self._store.set(self._key(liveness.rank), mine)
            return self._result()
        try:
            found = [json.loads(mine), *(json.loads(text) for text in self._gathered())]
            failed = next(((rank, f["failed"]) for rank, f in enumerate(found) if "failed" in f), None)
            if failed is not None:
                raise ProfileError(f"profile: rank {failed[0]} {failed[1]}")
            dropped = sorted({step for one in found for step in one["left_out"]})
            together = merged([one["summary"] for one in found], dropped)
        except ProfileError as error:
            self._store.set(self._key("result"), json.dumps({"error": str(error)}))
            raise
        data = {"left_out": together.left_out, "fastest": together.fastest, "lost": together.lost}
        self._store.set(self._key("result"), json.dumps(data))
        return together

    def post_failure(self, what: str) -> None:
        rank = self._liveness.rank
        if rank == 0:
            self._store.set(self._key("result"), json.dumps({"error": f"profile: rank 0 {what}"}))
        else:
            self._store.set(self._key(rank), json.dumps({"failed": what}))

    def _key(self, what: object) -> str:
        return f"{self._name}/{what}"

    def _gathered(self) -> list[str]:
        """The others' summaries, in the order of ranks."""
        ranks = range(1, self._liveness.size)
        self._wait([self._key(rank) for rank in ranks], self._timeout, "rank")
        texts = [self._store.get(self._key(rank)).decode() for rank in ranks]
        for rank in ranks:
            self._store.delete_key(self._key(rank))
        return texts

    def _result(self) -> Together:
        key = self._key("result")
        self._wait([key], self._timeout + _FOR_RANK_0, "rank 0")
        data: dict[str, Any] = json.loads(self._store.get(key).decode())
        if "error" in data:
            raise ProfileError(data["error"])
        lost = {int(late): {int(rank): s for rank, s in of.items()} for late, of in data["lost"].items()}
        return Together(tuple(data["left_out"]), data["fastest"], lost)

    def _wait(self, keys: Sequence[str], seconds: float, who: str) -> None:
        """Until all keys are there.

        Raises:
            ProfileError: they do not come, with the ranks that are missing.
        """
        deadline, look_again = time.monotonic() + seconds, 0.0
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now >= look_again:
                look_again = now + 1.0
                if (ended := self._liveness.ended()) is not None and not self._store.check(list(keys)):
                    raise ProfileError(f"profile: rank {ended[0]} of the group (process {ended[1]}) has ended.")
            if now > deadline:
                missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
                names = "rank 0" if who == "rank 0" else _ranks(missing)
                raise ProfileError(
                    f"profile: {names} of the group did not leave this profile within {seconds:.0f} s. Every rank that "
                    "shares the sharded model must enter and leave it; profile(timeout=...) is how long they wait."
                )
            time.sleep(_PAUSE)


def _ranks(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    listed = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"rank {listed}" if len(names) == 1 else f"ranks {listed}"
