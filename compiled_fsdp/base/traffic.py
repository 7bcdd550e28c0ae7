"""Count the collectives of a step while it runs: those that the called graphs plan, and those that eager code launches.

with count_communication() as volume:
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
    """The collectives of one kind.

    Attributes:
        launches: the number of collectives.
        tensors: the number of parameters or gradients in them.
        bytes: the bytes of the full tensors as they are sent (encoded, with a ``WirePolicy``); for an all-reduce and an
            exchange, the bytes of the shards.
        sent: the bytes that this rank sends if each collective is a ring: ``(n - 1) / n`` of ``bytes`` in a group of n
            ranks, and twice that for an all-reduce. gloo's reduce-scatter is an all-reduce inside, so it sends twice
            the bytes counted here. If an all-to-all is quicker, compiled_fsdp uses it instead; it sends as many bytes
            as a ring.
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
    """The collectives that were counted inside a ``count_communication()`` context, by kind.

    Kinds are "gather", "reduce" (over the shards), "all_reduce" (over the replicas), and "exchange" (of ``Muon`` and
    ``map_whole``). For example, ``volume["gather"].launches`` is the number of gathers.
    """

    by_kind: dict[str, Traffic] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Traffic:
        return self.by_kind.setdefault(kind, Traffic())

    @property
    def sent(self) -> int:
        """The bytes that this rank sends, over all kinds."""
        return sum(traffic.sent for traffic in self.by_kind.values())

    def __str__(self) -> str:
        lines = [
            f"{kind}: {t.launches} collectives, {t.tensors} tensors, {t.bytes / 1e6:.3f} MB, this rank sends "
            f"{t.sent / 1e6:.3f} MB"
            for kind, t in sorted(self.by_kind.items())
            if t.launches
        ]
        return "\n".join(lines) or "no communication"


_counting: list[Volume] = []


@contextlib.contextmanager
def count_communication() -> Iterator[Volume]:
    """Count compiled_fsdp's gathers and reductions while the context lasts; contexts may be nested.

    The model's own collectives are not counted. For example::

        with count_communication() as volume:
            train_step()
        print(volume["gather"].launches, volume.sent)
    """
    volume = Volume()
    _counting.append(volume)
    try:
        yield volume
    finally:
        _counting[:] = [other for other in _counting if other is not volume]


def counting() -> bool:
    """Whether a ``count_communication()`` context is active."""
    return bool(_counting)


def _asking() -> Sequence[Volume]:
    """The counters for a collective that is launched now; none if tensors are fake, because nothing is sent then."""
    return () if _counting and fake_mode_is_active() else _counting


def launched(kind: str, tensors: int, size: int, ranks: int) -> None:
    """Count a launched collective, unless its group has one rank.

    Args:
        kind: "gather", "reduce", "all_reduce" or "exchange".
        tensors: the number of parameters or gradients in it.
        size: the bytes of the full tensors; for an all-reduce, the bytes of the shards; for an exchange, those of this
            rank's parts.
        ranks: the number of ranks in its group.
    """
    if ranks > 1:
        for volume in _asking():
            volume[kind].add(tensors, size, ranks, times=2 if kind == "all_reduce" else 1)
