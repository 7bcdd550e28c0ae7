"""The cost of the collectives of one group; collectives and copies that a plan cannot move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from compiled_fsdp.passes.cost.hardware import Curve

COPIES = ("offload", "reload")
"""The kinds of copies to host memory and back, as ``host_copies.KINDS`` names them."""


@dataclass(frozen=True)
class CommChannel:
    """The cost of collectives of one kind, process group and dtype.

    A collective takes ``latency + (tensors - 1) * each + bytes / bytes_per_second`` seconds, or less by ``quick``.
    """

    # Seconds that every collective takes.
    latency: float
    # Seconds for every further tensor of a coalesced collective.
    each: float
    # The rate at which bytes of the full tensors are gathered or reduced.
    bytes_per_second: float
    # The number of ranks of the group.
    world: int
    # The number of its stream (``channel.stream_of``). The collectives of one stream run one after the other.
    stream: int = 0
    # For an all-to-all 1: it receives as many bytes as the full gradients have, because this rank adds up the parts
    # from all ranks. For a reduce-scatter 0, which counts as 1 / world, since it receives its shards only.
    received_share: float = 0.0
    # How they are sent: a key of ``transport.TRANSPORTS``; "" for the usual one of their kind.
    transport: str = ""
    # Latency and rate of a protocol for small messages, as in ``Curve.quick``.
    quick: tuple[float, float] | None = None
    # Whether copy engines move all of its bytes.
    by_copies: bool = False
    # Bytes that this rank sends inside its node, and to other nodes, for each byte of full tensors.
    sent: tuple[float, float] = (0.0, 0.0)
    # Over how many parts of the ranks its reduced gradients are scattered again (``ReduceSpec.within``); 1: not again.
    parts: int = 1
    # The number of its process groups (``PassContext.groups``).
    group_id: int = 0

    def seconds(self, size: float, tensors: int = 1) -> float:
        """Seconds of a collective of ``size`` bytes of full tensors."""
        return self._curve.seconds(size, tensors)

    @cached_property
    def _curve(self) -> Curve:
        return Curve(self.latency, self.bytes_per_second, self.each, self.quick)

    def scaled(self, *, rate: float = 1.0, latency: float = 1.0) -> CommChannel:
        """Return the channel with all rates and all latencies multiplied."""
        quick = None if self.quick is None else (self.quick[0] * latency, self.quick[1] * rate)
        return replace(
            self, latency=self.latency * latency, each=self.each * latency,
            bytes_per_second=self.bytes_per_second * rate, quick=quick,
        )  # fmt: skip

    @property
    def least_latency(self) -> float:
        """No collective takes less, in addition to ``bytes / bytes_per_second``."""
        return self.latency if self.quick is None else min(self.latency, self.quick[0])

    @property
    def reduced_locally(self) -> bool:
        """Whether reductions are all-to-alls, after which this rank adds up the parts from all ranks."""
        return self.received_share * self.world > 1.5


@dataclass(frozen=True)
class ModelCollective:
    """One of the model's own collectives (tensor, expert or context parallelism), or a copy to host memory or back.

    It stays where the graph has it.
    """

    # The op, for example "all_reduce"; "offload" or "reload" for a copy.
    kind: str
    # A key of ``Tasks.channels``.
    channel: str
    # Bytes of the full tensors.
    bytes: int
    # The number of tensors that it sends at once.
    tensors: int
    # The segment that begins with its launch, and the one that begins with its wait. At the start of a segment come
    # first compiled_fsdp's launches and waits, then the launches of the model's own collectives, then their waits.
    at: int
    wait: int
    # The streams that it occupies: all streams over its link.
    streams: tuple[int, ...]

    @property
    def is_copy(self) -> bool:
        """Whether it copies to host memory or back. Compute beside it is not slower: it takes little bandwidth."""
        return self.kind in COPIES
