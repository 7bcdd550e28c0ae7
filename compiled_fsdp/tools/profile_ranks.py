"""Find out who is late: at the end of a profile, ranks tell each other how long each collective was in flight.

All ranks finish a collective at about the same time, so clocks need not agree: it was in flight for the shortest time
on the rank that launched it last. If compute on another rank waited longer than that, it waited for the late rank. For
example, a gather is in flight for 1 ms on rank 1 and exposed for 3 ms on rank 0: rank 0 lost 2 ms to rank 1.

The ranks meet in the process group's key-value store. Rank 0 reads the summaries of all ranks and posts the result, so
the traffic grows with the number of ranks and not with its square. If a rank does not come, or left by an exception,
all other ranks raise an error.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

from compiled_fsdp.base.plain_data import Unfit, from_json
from compiled_fsdp.ranks.liveness import Liveness
from compiled_fsdp.tools.profile_recorder import ProfileError
from compiled_fsdp.tools.words import rank_list

# By group, the number of the newest profile that this rank was in. It is global, because a group's store outlives the
# group's models.
_newest: Counter[str] = Counter()

_PAUSE = 0.02  # seconds between two looks into the store
_FOR_RANK_0 = 10.0  # seconds that other ranks wait longer than rank 0, because it waits for them
_MOST_NAMED = 4

Entry = tuple[int, float, float]
"""One collective: its step, its seconds in flight, its exposed seconds."""

Summary = Mapping[str, Sequence[Entry]]
"""A rank's collectives in order, by the ranks of their group ("0,1")."""


@dataclass(frozen=True)
class Together:
    """The result of all ranks' summaries.

    Attributes:
        left_out: steps in which any rank compiled.
        fastest: by group: the seconds that each collective was in flight on the rank that launched it last.
        lost: ``lost[late][waiting]``: seconds that rank ``waiting`` waited for rank ``late`` to launch, over all steps
            that count. Ranks are places in the group that profiles together.
        costs: the costs that rank 0 has measured: a ``Hardware`` as JSON.
    """

    left_out: tuple[int, ...]
    fastest: Mapping[str, Sequence[float]]
    lost: Mapping[int, Mapping[int, float]]
    costs: str = ""


@dataclass(frozen=True)
class _Left:
    """The post of a rank that leaves its profile. ``failed``: the exception that it left by, or ""."""

    summary: Summary = field(default_factory=dict)
    left_out: tuple[int, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class _Result:
    """The post of rank 0: ``Together`` with its ranks as texts, or an error."""

    left_out: tuple[int, ...] = ()
    fastest: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lost: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    costs: str = ""
    error: str = ""


_Posted = TypeVar("_Posted", _Left, _Result)


def merged(summaries: Sequence[Summary], left_out: Sequence[int] = ()) -> Together:
    """Compute ``Together`` from the summaries of ranks 0, 1, ...

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
            ranks = rank_list([int(rank) for rank in group.split(",")])
            raise ProfileError(
                f"profile: rank {few} ran {counts[few]} collectives of {ranks}, and rank {many} {counts[many]}; "
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


class Meeting:
    """The exchange of all ranks of a group at the end of a profile. Each rank makes one on entering the profile.

    Rank 0 numbers the profiles. If a rank missed a profile, all ranks are together again in the next one.

    Args:
        liveness: the group's processes and key-value store.
        timeout: how long ranks wait for one another.
    """

    def __init__(self, liveness: Liveness, timeout: timedelta) -> None:
        self._liveness, self._store = liveness, liveness.store
        self._timeout = timeout.total_seconds()
        self._entered = f"{liveness.prefix}/profile/entered"
        self._number = 0 if liveness.alone else self._agreed_number()

    def exchange(self, summary: Summary, left_out: Sequence[int], costs: Callable[[Together], str]) -> Together:
        """Exchange the summaries of all ranks.

        Args:
            summary: this rank's.
            left_out: the steps in which this rank compiled.
            costs: called on rank 0 with the result, which then has what it returns.

        Raises:
            ProfileError: a rank did not come within ``timeout``, its process ended, it left its profile by an
                exception, or it ran another number of collectives.
        """
        if self._liveness.alone:
            together = merged([summary], left_out)
            return replace(together, costs=costs(together))
        try:
            return self._held(summary, left_out, costs)
        finally:
            self._end()

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this rank left its profile by an exception, so that they do not wait for it."""
        if self._liveness.alone:
            return
        what, rank = f"left its profile by an exception: {error!r}", self._liveness.rank
        if rank == 0:
            self._store.set(self._key("result"), json.dumps({"error": f"profile: rank 0 {what}"}))
        else:
            self._store.set(self._key(rank), json.dumps({"failed": what}))
        self._end()

    # ---- the profile's number, the same on all ranks -----------------------------------------------------------------
    def _agreed_number(self) -> int:
        """Return the number of this profile.

        Rank 0 counts. Another rank takes the number of rank 0's newest profile if that has no result yet and this rank
        was not in it; otherwise it takes the next number.
        """
        if self._liveness.rank == 0:
            return self._store.add(self._entered, 1)
        self._number = self._store.add(self._entered, 0)
        was_in_it = self._number <= _newest[self._liveness.name]
        return self._number + 1 if was_in_it or self._store.check([self._key("result")]) else self._number

    def _end(self) -> None:
        if self._store.add(self._entered, 0) >= self._number:
            _newest[self._liveness.name] = self._number
        else:  # rank 0 has not entered this profile, so its next profile has this number
            self._store.delete_key(self._key(self._liveness.rank))

    def _held(self, summary: Summary, left_out: Sequence[int], costs: Callable[[Together], str]) -> Together:
        liveness = self._liveness
        mine = json.dumps({"summary": summary, "left_out": list(left_out)})
        if liveness.rank != 0:
            self._store.set(self._key(liveness.rank), mine)
            return self._result()
        try:
            found = [_read(_Left, text, rank) for rank, text in enumerate([mine, *self._gathered()])]
            failed = next(((rank, one.failed) for rank, one in enumerate(found) if one.failed), None)
            if failed is not None:
                raise ProfileError(f"profile: rank {failed[0]} {failed[1]}")
            dropped = sorted({step for one in found for step in one.left_out})
            together = merged([one.summary for one in found], dropped)
            together = replace(together, costs=costs(together))
        except Exception as error:  # the other ranks wait for this rank's post
            self._store.set(self._key("result"), json.dumps({"error": str(error) or repr(error)}))
            raise
        self._store.set(self._key("result"), json.dumps(asdict(_Result(**vars(together)))))
        return together

    def _key(self, what: object) -> str:
        return f"{self._liveness.prefix}/profile/{self._number}/{what}"

    def _gathered(self) -> list[str]:
        """Wait for the summaries of the other ranks, and return them in the order of ranks."""
        keys = {rank: self._key(rank) for rank in range(1, self._liveness.size)}

        def missing() -> str:
            names = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
            return f"{_ranks(names)} of the group did not leave this profile"

        self._wait(lambda: self._store.check(list(keys.values())), self._timeout, missing)
        texts = [self._store.get(key).decode() for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return texts

    def _result(self) -> Together:
        key, limit = self._key("result"), self._timeout + _FOR_RANK_0
        self._wait(lambda: self._store.check([key]), limit, lambda: "rank 0 of the group did not leave this profile")
        result = _read(_Result, self._store.get(key).decode(), 0)
        if result.error:
            raise ProfileError(result.error)
        lost = {int(late): {int(rank): s for rank, s in of.items()} for late, of in result.lost.items()}
        return Together(result.left_out, result.fastest, lost, result.costs)

    def _wait(self, there: Callable[[], bool], seconds: float, otherwise: Callable[[], str]) -> None:
        """Wait until ``there()`` is true.

        Raises:
            ProfileError: a rank's process ended, or the time is over; ``otherwise()`` names the missing ranks.
        """
        deadline, look_again = time.monotonic() + seconds, 0.0
        while not there():
            now = time.monotonic()
            if now >= look_again:
                look_again = now + 1.0
                if (ended := self._liveness.ended()) is not None and not there():
                    raise ProfileError(f"profile: rank {ended[0]} of the group (process {ended[1]}) has ended.")
            if now > deadline:
                raise ProfileError(
                    f"profile: {otherwise()} within {seconds:.0f} s. Every rank that shares the sharded model must "
                    "enter and leave it at the same place; profile(timeout=...) is how long they wait."
                )
            time.sleep(_PAUSE)


def _read(kind: type[_Posted], text: str, rank: int) -> _Posted:
    """Parse the post of a rank.

    Raises:
        ProfileError: the text has another form.
    """
    try:
        found: _Posted = from_json(kind, text)
    except Unfit as error:
        raise ProfileError(
            f"profile: what rank {rank} has posted cannot be read ({error}); every rank must run the same version of "
            "compiled_fsdp."
        ) from error
    return found


def _ranks(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    listed = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"rank {listed}" if len(names) == 1 else f"ranks {listed}"
