"""Which set of parameters follows which: what ran is remembered, and what ran before is expected to run again.

Sets are told apart by their parameters, never by the graph that reads them: one rank may have compiled again. All ranks see
the same sets in the same order, so they expect the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 1 << 16
"""Sets that are remembered: steps of thousands of sets, several times over."""


@dataclass(frozen=True)
class Key:
    """A set of parameters, by their slots in order, and whether it is gathered for forward or for backward."""

    backward: bool
    slots: tuple[int, ...]


@dataclass
class Sequence:
    """What was gathered, in order, and where the present run stands in the last one that began alike.

    ``None`` in ``history`` ends a run: a forward that no backward follows, or a backward. What comes behind it may come much
    later, with other parameters.
    """

    history: list[Key | None] = field(default_factory=list)
    # each once: callers make new ones, which every step would leave in ``history``
    _keys: dict[Key, Key] = field(default_factory=dict)
    _last: dict[Key, int] = field(default_factory=dict)
    _first: dict[Key, int] = field(default_factory=dict)  # as the first of a run
    _follows: int | None = None  # the place in ``history`` of what is expected now

    def add(self, key: Key | None) -> None:
        """``key`` is being gathered, or a run has ended."""
        key = None if key is None else self._keys.setdefault(key, key)
        begins = not self.history or self.history[-1] is None
        at = self._follows
        if at is None or at >= len(self.history) or self.history[at] != key:
            known = self._first if begins else self._last
            at = None if key is None else known.get(key)
        if key is not None:
            self._last[key] = len(self.history)
            if begins:
                self._first[key] = len(self.history)
        self.history.append(key)
        self._follows = None if at is None else at + 1
        if len(self.history) > LIMIT:
            self._forget(LIMIT // 2)

    @property
    def next(self) -> Key | None:
        """The set that is expected next; None at the end of a run, and where nothing is known."""
        return None if self._follows is None or self._follows >= len(self.history) else self.history[self._follows]

    def _forget(self, count: int) -> None:
        del self.history[:count]
        for places in (self._last, self._first):
            kept = {key: place - count for key, place in places.items() if place >= count}
            places.clear()
            places.update(kept)
        self._keys = {key: key for key in self._last}
        if self._follows is not None:
            self._follows = self._follows - count if self._follows >= count else None
