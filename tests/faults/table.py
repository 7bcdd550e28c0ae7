"""The cases: what happens, where, on which rank, and how the model runs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

ENDING = ("killed", "raising", "out of memory", "interrupted")
"""What ends a rank."""
DIFFERING = ("option", "model", "dtype", "torch build", "wire policy", "pieces", "traceable")
"""In what a rank differs from the others, from the start; the last two are of a parameter's all-gather extensions."""
UNCOMPILED_TOO = ("model", "dtype", "wire policy", "pieces")
PLACES = ("forward", "backward", "compiling", "planning", "saving")
WHAT_TRAVELS = ("hook", "encoding")
"""Further places: in an all-gather extension, and while a gather is encoded."""
WAYS = ("whole", "broken", "uncompiled")
EVERY_RANK = -1


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        fault: of ENDING; "slow"; "caught": an exception on all ranks; or "other " and one of DIFFERING.
        place: of PLACES or WHAT_TRAVELS, or "start".
        victim: the rank; EVERY_RANK where it is caught.
        way: of WAYS.
        world: how many ranks there are.
        store: who serves the key-value store: "agent", a process that outlives them, or "rank 0".
    """

    fault: str
    place: str
    victim: int
    way: str
    world: int = 2
    store: str = "agent"

    def __str__(self) -> str:
        who = "every rank" if self.victim == EVERY_RANK else f"rank {self.victim} of {self.world}"
        return f"{self.fault}, {self.place}, {who}, {self.way}, store of {self.store}"


def _is_there(place: str, way: str) -> bool:
    return way != "uncompiled" or place not in ("compiling", "planning")


def every_case() -> Iterator[Case]:
    """The whole table."""
    number = itertools.count()
    places = [(place, way) for place in PLACES for way in WAYS if _is_there(place, way)]
    for fault, (place, way), is_last in itertools.product((*ENDING, "slow"), places, (False, True)):
        world = 2 + next(number) % 3  # 2, 3 and 4 ranks in turn
        yield Case(fault, place, world - 1 if is_last else 0, way, world)
    for fault, way in itertools.product(("killed", "raising"), WAYS):
        yield Case(fault, "forward", 0, way, 3, "rank 0")
        yield Case(fault, "backward", 1, way, 3, "rank 0")
    for place in ("compiling", "planning"):
        yield Case("killed", place, 0, "whole", 3, "rank 0")
    for place, way in places:
        yield Case("caught", place, EVERY_RANK, way)
    for what, way, is_last in itertools.product(DIFFERING, WAYS, (False, True)):
        if way != "uncompiled" or what in UNCOMPILED_TOO:  # without a compile nothing else has to agree
            world = 2 + next(number) % 3
            yield Case(f"other {what}", "start", world - 1 if is_last else 0, way, world)
    for fault, place, way in itertools.product(("killed", "raising"), WHAT_TRAVELS, WAYS):
        world = 2 + next(number) % 3
        yield Case(fault, place, world - 1, way, world)


CORE = (
    Case("killed", "forward", 1, "whole", 3),
    Case("raising", "backward", 0, "broken"),
    Case("out of memory", "planning", 1, "whole"),
    Case("killed", "compiling", 0, "whole", 2, "rank 0"),
    Case("interrupted", "forward", 0, "uncompiled"),
    Case("killed", "saving", 1, "uncompiled"),
    Case("slow", "planning", 0, "broken"),
    Case("caught", "backward", EVERY_RANK, "whole"),
    Case("other torch build", "start", 1, "whole"),
    Case("other wire policy", "start", 1, "uncompiled"),
    Case("other pieces", "start", 0, "broken"),
    Case("raising", "hook", 1, "uncompiled", 3),
    Case("raising", "encoding", 1, "whole"),
)
"""What `make test` runs, except for the slow rank."""


def more_cases() -> list[Case]:
    """Of the whole table every third, in which every fault meets every place and way."""
    return [case for number, case in enumerate(every_case()) if number % 3 == 0]
