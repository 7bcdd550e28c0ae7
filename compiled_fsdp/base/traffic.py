"""What a step communicates, counted while it runs: what the called graphs have planned, and what eager code launches.

with communication() as volume:
    train_step()
print(volume)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from compiled_fsdp.compat.graphs import fake_mode_is_active


@dataclass
class Traffic:
    """Collectives of one kind.

    Attributes:
        launches: how many collectives.
        tensors: how many parameters or gradients were in them.
        bytes: of the full tensors, as they are sent (encoded, with a ``WirePolicy``); of an all-reduce, of the shards.
        sent: bytes that this rank sends for them, in a ring: ``(n - 1) / n`` of ``bytes`` in a group of n, twice that
            for an all-reduce. (gloo's own reduce-scatter is an all-reduce; ours is an all-to-all where that is quicker,
            which sends what a ring does.)
    """

    launches: int = 0
    tensors: int = 0
    bytes: int = 0
    sent: int = 0

    def add(self, tensors: int, size: int, ranks: int, times: int = 1) -> None:
        self.launches += 1
        self.tensors += tensors
        self.bytes += size
        self.sent += times * size * (ranks - 1) // ranks


@dataclass
class Volume:
    """The collectives of what ran in a ``communication()``, by kind.

    Kinds are "gather", "reduce" (over the shards) and "all_reduce" (over the replicas).
    """

    by_kind: dict[str, Traffic] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Traffic:
        return self.by_kind.setdefault(kind, Traffic())

    @property
    def sent(self) -> int:
        """Bytes that this rank sends."""
        return sum(traffic.sent for traffic in self.by_kind.values())

    def __str__(self) -> str:
        lines = [
            f"{kind}: {t.launches} collectives, {t.tensors} tensors, {t.bytes / 1e6:.3f} MB, this rank sends "
            f"{t.sent / 1e6:.3f} MB"
            for kind, t in sorted(self.by_kind.items())
        ]
        return "\n".join(lines) or "no communication"


_counting: list[Volume] = []


@contextlib.contextmanager
def communication() -> Iterator[Volume]:
    """Count what compiled_fsdp communicates while the context lasts; it may be nested.

    Other collectives are not counted.
    """
    volume = Volume()
    _counting.append(volume)
    try:
        yield volume
    finally:
        _counting[:] = [other for other in _counting if other is not volume]


def counting() -> bool:
    """Whether anybody asks."""
    return bool(_counting)


def _asking() -> Sequence[Volume]:
    """Who counts what is launched now: nobody, if it is of fake tensors, of which nothing is sent."""
    return () if _counting and fake_mode_is_active() else _counting


def launched(kind: str, tensors: int, size: int, ranks: int) -> None:
    """A collective was launched, of ``tensors`` of ``size`` bytes: full ones, of an all-reduce shards."""
    if ranks > 1:
        for volume in _asking():
            volume[kind].add(tensors, size, ranks, times=2 if kind == "all_reduce" else 1)
