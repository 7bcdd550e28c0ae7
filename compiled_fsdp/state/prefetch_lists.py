"""Prefetch lists: the units whose gathers are to be launched where another unit's forward or backward begins.

FSDP2 launches them when it gets there. Here they are a wish about a graph's plan: a unit keeps its lists, ``region.py`` writes
them down with the unit's reads, and ``passes/plan/order.py`` makes a schedule of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_fsdp.state.unit import Unit

FORWARD, BACKWARD = 0, 1


class PrefetchLists:
    """The lists of one unit.

    Attributes:
        key: says which lists there are, alike for equal layers and equal models; Dynamo guards on it. Empty without lists.
    """

    def __init__(self) -> None:
        self._lists: list[list[weakref.ref[Unit]]] = [[], []]
        self.key = ""

    def set(self, direction: int, own: Unit, units: Sequence[Unit]) -> None:
        """Replace a list of ``own``, whose lists these are. Units without parameters have nothing to gather."""
        self._lists[direction] = [weakref.ref(unit) for unit in units if unit.parameters]
        self.key = ""
        if own.parameters and any(self._lists):
            start = own.parameters[0].slot_number
            self.key = str([[unit.parameters[0].slot_number - start for unit in self._alive(d)] for d in range(2)])

    def buckets(self, numbers: Mapping[tuple[int, int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lists in numbers of buckets, forward's and backward's; ``numbers`` has those of a region, by unit and block."""
        of_unit: dict[int, list[int]] = {}
        for (unit, _), number in numbers.items():
            of_unit.setdefault(unit, []).append(number)
        forward, backward = (
            tuple(number for unit in self._alive(direction) for number in of_unit.get(id(unit), ()))
            for direction in (FORWARD, BACKWARD)
        )
        return forward, backward

    def _alive(self, direction: int) -> list[Unit]:
        return [unit for reference in self._lists[direction] if (unit := reference()) is not None]
