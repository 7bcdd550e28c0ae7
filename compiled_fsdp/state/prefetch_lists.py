"""Prefetch lists: the units whose gathers are to be launched where another unit's forward or backward begins.

FSDP2 launches them when it gets there. Here they are a wish about a graph's plan: a unit keeps its lists,
``compiler/region.py`` writes them down with the unit's reads, and ``passes/plan/order.py`` makes a schedule of them.
"""

# Why: docs/design.md, note N21

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD, BACKWARD = 0, 1


class PrefetchLists:
    """The lists of one unit, forward's and backward's.

    A unit stands in them as its first parameter's ``param_id``.

    Attributes:
        key: says which lists there are, alike for equal layers and equal models; Dynamo guards on it. Empty without
            lists.
    """

    def __init__(self) -> None:
        self._lists: list[tuple[int, ...]] = [(), ()]
        self.key = ""

    def set(self, direction: int, own: int | None, listed: Sequence[int | None]) -> None:
        """Replace a list of the unit ``own``; a unit without parameters is None, since it has nothing to gather."""
        self._lists[direction] = tuple(unit for unit in listed if unit is not None)
        self.key = ""
        if own is not None and any(self._lists):
            self.key = str([[unit - own for unit in units] for units in self._lists])

    def buckets(self, numbers: Mapping[tuple[int, int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lists in numbers of buckets, forward's and backward's.

        ``numbers`` has the buckets of a region, by unit (as in the lists) and block.
        """
        of_unit: dict[int, list[int]] = {}
        for (unit, _), number in numbers.items():
            of_unit.setdefault(unit, []).append(number)
        forward, backward = (
            tuple(number for unit in self._lists[direction] for number in of_unit.get(unit, ()))
            for direction in (FORWARD, BACKWARD)
        )
        return forward, backward
