"""Prefetch lists: the units whose gathers are launched when another unit's forward or backward begins.

FSDP2 launches them when it gets there. In compiled_fsdp the lists are a wish about a graph's plan: a unit stores them,
``compiler/region.py`` records them with the unit's reads, and ``passes/plan/order.py`` makes a schedule from them.
"""

# Why: docs/design/planner.md, "Prefetch lists"

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD, BACKWARD = 0, 1


class PrefetchLists:
    """The forward list and the backward list of one unit. They contain ``Unit.key`` of each listed unit.

    Attributes:
        key: the lists as text, on which Dynamo guards; "" if both are empty. It has distances between units, so it is
            the same for equal layers and equal models.
    """

    def __init__(self) -> None:
        self._lists: list[tuple[int, ...]] = [(), ()]
        self.key = ""

    def set(self, direction: int, own: int | None, listed: Sequence[int | None]) -> None:
        """Replace one list.

        Args:
            direction: FORWARD or BACKWARD.
            own: the ``key`` of the unit that the list belongs to; None for a unit without parameters.
            listed: the ``key`` of each listed unit. None is left out, because such a unit has nothing to gather.
        """
        self._lists[direction] = tuple(unit for unit in listed if unit is not None)
        self.key = ""
        if own is not None and any(self._lists):
            self.key = str([[unit - own for unit in units] for units in self._lists])

    def buckets(self, numbers: Mapping[tuple[int, int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The forward and the backward list as numbers of buckets.

        Args:
            numbers: the numbers of a region's buckets, by ``Unit.key`` and block.
        """
        of_unit: dict[int, list[int]] = {}
        for (unit, _), number in numbers.items():
            of_unit.setdefault(unit, []).append(number)
        forward, backward = (
            tuple(number for unit in self._lists[direction] for number in of_unit.get(unit, ()))
            for direction in (FORWARD, BACKWARD)
        )
        return forward, backward
