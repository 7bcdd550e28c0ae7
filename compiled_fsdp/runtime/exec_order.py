"""Which set of parameters follows which: what ran is remembered, and what ran before is expected to run again.

Sets are told apart by their parameters, never by the graph that reads them: one rank may have compiled again. All ranks
see the same sets in the same order, so they expect the same.
"""

# Why: docs/design.md, note N26

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 1 << 16
"""Sets that are remembered: steps of thousands of sets, several times over."""


@dataclass(frozen=True)
class GatherKey:
    """A set of parameters, by their ids in order, whether it is gathered for backward, and in which form."""

    backward: bool
    param_ids: tuple[int, ...]
    # A tensor for each parameter, not one flat bucket.
    coalesced: bool = False


@dataclass
class ExecOrder:
    """What was gathered, in order, and where the present run stands in the last one that began alike.

    ``None`` in ``history`` ends a run: a forward that no backward follows, or a backward. What comes after it may come
    much later, with other parameters.
    """

    history: list[GatherKey | None] = field(default_factory=list)
    # Each key once: callers make new ones, which every step would leave in ``history``.
    _keys: dict[GatherKey, GatherKey] = field(default_factory=dict)
    # The last place in ``history`` of each key, and the last one where it began a run.
    _last: dict[GatherKey, int] = field(default_factory=dict)
    _first: dict[GatherKey, int] = field(default_factory=dict)
    # The place in ``history`` of what is expected now.
    _expected: int | None = None

    def add(self, key: GatherKey | None) -> None:
        """``key`` is being gathered, or a run has ended."""
        key = None if key is None else self._keys.setdefault(key, key)
        begins = not self.history or self.history[-1] is None
        at = self._expected
        if at is None or at >= len(self.history) or self.history[at] != key:
            known = self._first if begins else self._last
            at = None if key is None else known.get(key)
        if key is not None:
            self._last[key] = len(self.history)
            if begins:
                self._first[key] = len(self.history)
        self.history.append(key)
        self._expected = None if at is None else at + 1
        if len(self.history) > LIMIT:
            self._forget(LIMIT // 2)

    def end_run(self) -> None:
        """The run has ended, if there was one."""
        if self.history and self.history[-1] is not None:
            self.add(None)

    @property
    def next(self) -> GatherKey | None:
        """The set that is expected next; None at the end of a run, and where nothing is known."""
        return None if self._expected is None or self._expected >= len(self.history) else self.history[self._expected]

    def _forget(self, count: int) -> None:
        del self.history[:count]
        for places in (self._last, self._first):
            kept = {key: place - count for key, place in places.items() if place >= count}
            places.clear()
            places.update(kept)
        self._keys = {key: key for key in self._last}
        if self._expected is not None:
            self._expected = self._expected - count if self._expected >= count else None
