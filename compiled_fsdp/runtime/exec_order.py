"""The order in which sets of parameters are gathered: remembered from earlier runs, and expected to repeat.

A set is known by its parameters, never by the graph that reads them, because one rank may have compiled again. All
ranks see the same sets in the same order, so they expect the same next set.
"""

# Why: docs/design/graph-breaks.md, "The next gather is predicted from parameter sets"

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_fsdp.buckets.spec import Kind

LIMIT = 1 << 16
"""How many sets are remembered: enough for several steps of thousands of sets each."""


@dataclass(frozen=True)
class GatherKey:
    """A set of parameters: their ids in order, whether backward gathers it, and how."""

    backward: bool
    param_ids: tuple[int, ...]
    # Whether each parameter is gathered into its own tensor, and not all into one flat bucket.
    coalesced: bool = False
    # A key of ``transport.TRANSPORTS``.
    transport: str = Kind.GATHER.usual_transport


@dataclass
class ExecOrder:
    """The sets that were gathered, in order, and the position in the last run that began like the present one.

    ``None`` in ``history`` marks the end of a run: of a backward, or of a forward that no backward follows. The next
    run may come much later, with other parameters. For example, after A, B, None, A the set B is expected.
    """

    history: list[GatherKey | None] = field(default_factory=list)
    # One object for each key, because ``history`` would otherwise keep the new keys that callers make at every step.
    _keys: dict[GatherKey, GatherKey] = field(default_factory=dict)
    # For each key its last index in ``history``, and its last index at the beginning of a run.
    _last: dict[GatherKey, int] = field(default_factory=dict)
    _first: dict[GatherKey, int] = field(default_factory=dict)
    # The index in ``history`` of the set that is expected next.
    _expected: int | None = None

    def add(self, key: GatherKey | None) -> None:
        """Note that ``key`` is being gathered, or (None) that a run has ended."""
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
        """Note that the run has ended, if there is one."""
        if self.history and self.history[-1] is not None:
            self.add(None)

    @property
    def next(self) -> GatherKey | None:
        """The set that is expected next; None at the end of a run, or if no earlier run began like this one."""
        return None if self._expected is None or self._expected >= len(self.history) else self.history[self._expected]

    @property
    def latest_beginning(self) -> GatherKey | None:
        """The set that the latest run began with."""
        return max(self._first, key=self._first.__getitem__, default=None)

    def _forget(self, count: int) -> None:
        del self.history[:count]
        for places in (self._last, self._first):
            kept = {key: place - count for key, place in places.items() if place >= count}
            places.clear()
            places.update(kept)
        self._keys = {key: key for key in self._last}
        if self._expected is not None:
            self._expected = self._expected - count if self._expected >= count else None
