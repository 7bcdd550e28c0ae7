"""What collectives of one group cost, and the model's own, which a plan cannot move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommChannel:
    """What collectives of one kind, process group and dtype cost.

    A collective takes ``latency + (tensors - 1) * each + bytes / bytes_per_second`` seconds.
    """

    # Seconds of every collective.
    latency: float
    # Seconds of every further tensor in a coalesced collective.
    each: float
    # Of the full tensors' bytes.
    bytes_per_second: float
    # Ranks of the group.
    world: int
    # The collectives of one stream run one after the other; see ``extract.stream_of``.
    stream: int = 0
    # Bytes that a reduction allocates, as a share of the full gradient's: 1 / world, or 1 for an all-to-all, whose
    # pieces are added up by this rank.
    received_share: float = 0.0
    # How they are sent: a key of ``transport.TRANSPORTS``; "" as usual.
    transport: str = ""

    @property
    def reduced_locally(self) -> bool:
        """Whether reductions are all-to-alls, whose pieces this rank adds up after the wait."""
        return self.received_share * self.world > 1.5


@dataclass(frozen=True)
class ModelCollective:
    """A collective of the model's own: tensor, expert or context parallelism's. It stays where the graph has it."""

    # The op: "all_reduce".
    kind: str
    # A key of ``Tasks.channels``.
    channel: str
    # Bytes of the full tensors.
    bytes: int
    # How many tensors it takes at once.
    tensors: int
    # The segment that begins with its launch, and the one that begins with its wait. In a segment launches come before
    # waits, and both after our own launches and waits of that segment.
    at: int
    wait: int
    # The streams that it occupies: every one over its link.
    streams: tuple[int, ...]
