"""The collectives of one region that all ranks have agreed on, as plain data that any code can follow.

Compiled code has its plan built in. A rank may have different code for the same parameters, for example because of a
graph break that the other ranks do not have, a checkpoint, or other data. That rank cannot run the other ranks' code,
but it has to take part in the same collectives. It launches them from this description (``runtime/plan_follower.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.spec import FLAT, TORCH, Kind


@dataclass(frozen=True)
class AgreedRead:
    """One read of a parameter in a region."""

    # The parameter's name, as seen from the root module.
    name: str
    # Whether backward computes the parameter's gradient.
    trainable: bool
    # How the gradient is reduced: a ``ReduceSpec`` as text.
    reduce_text: str
    # "resharded" after forward, "kept" until backward, or "full" before the region runs (for example by ``unshard()``).
    mode: str
    # The parameter's description when the plan was made, for example "float32[4, 4], resharded, float32 avg"
    # (``Unit.line_of``). The plan applies only as long as the description stays the same.
    line: str
    # How often compiled autograd's graph gathers or reduces it (``Region.times``).
    times: int = 1


@dataclass(frozen=True)
class AgreedBucket:
    """One collective of a region's plan."""

    kind: Kind
    # Indices of ``AgreedPlan.reads``, in the order in which the tensors lie in the bucket.
    reads: tuple[int, ...]
    # A key of ``transport.TRANSPORTS``.
    transport: str
    # For a gather, two numbers for each of its reads: the read's number among the graph's gathers in the order of first
    # use, and how many of these gathers are due before its last use. For example, ``c(b(c(x)))`` gathers c (number 0)
    # and b (number 1), and uses c again after b. The numbers of c are (0, 2), so a follower keeps c when it reads b.
    uses: tuple[tuple[int, int], ...] = ()
    # ``BucketSpec.form`` and ``BucketSpec.copier``. The copier is TRITON if compiled_fsdp's kernels leave gaps between
    # the tensors, because all ranks have to send the same gaps; else it is TORCH.
    form: str = FLAT
    copier: str = TORCH
    # For the first and the last gather of a fragment: whether it is the first one, and whether it is the last one. The
    # prefetcher launches these gathers, because they may be in flight before the fragment runs.
    edge: tuple[bool, bool] | None = None


@dataclass(frozen=True)
class AgreedPlan(PlainData):
    """The collectives of a region, in the order in which every rank launches them."""

    # The region's options, its kind, and a line for each read. Ranks compare signatures.
    signature: tuple[str, ...]
    reads: tuple[AgreedRead, ...]
    # By phase: "forward" and "backward", or "inference", or only "backward" (compiled autograd's graph).
    buckets: dict[str, tuple[AgreedBucket, ...]] = field(hash=False)
    # Whether prefetched gathers are compared with the shards before they are used (option ``recheck_prefetched``).
    recheck: bool = True
    # Why different code cannot follow this plan; "" if it can.
    obstacle: str = ""
    # Whether the backward's buckets begin with the forward's, because an uncompiled checkpoint runs the forward again.
    repeats_forward: bool = False
    # True for a plan of eager code, which skips gathers that no code asks for and reduces only parameters that have a
    # gradient. False for a plan of compiled code, which launches every collective: a follower sends zeros for a
    # gradient that it does not have.
    on_demand: bool = False

    def has(self, phase: str, collectives: Sequence[str]) -> bool:
        """Whether a graph of this phase with these collectives (``collective_lines``) has those of the plan."""
        return self._collectives(phase) == _without_bytes(collectives)

    def has_fewer(self, phase: str, collectives: Sequence[str]) -> bool:
        """Whether a graph of this phase has all of the plan's collectives, and more.

        A graph with a backward has more than a plan without one, and the other way around.
        """
        if not self.is_of(phase):
            return phase != "inference"
        return self._collectives(phase) < _without_bytes(collectives)

    def is_of(self, topic: str) -> bool:
        """Whether plan and topic are both about graphs without a backward ("inference"), or both about others."""
        return ("inference" in self.buckets) == (topic == "inference")

    def _collectives(self, phase: str) -> Counter[str]:
        buckets = self.buckets.get(phase, ())
        if phase == "backward" and self.repeats_forward:
            buckets = buckets[len(self.buckets.get("forward", ())) :]
        return Counter(f"{bucket.kind.value} of read {read}" for bucket in buckets for read in bucket.reads)

    def has_collectives_of(self, other: AgreedPlan) -> bool:
        """Whether both plans launch the same collectives, for parameters that may be those of different layers."""
        return (self.signature[2:], self.buckets) == (other.signature[2:], other.buckets)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, one for each read."""
        return tuple(read.name for read in self.reads)


def _without_bytes(collectives: Sequence[str]) -> Counter[str]:
    """The lines about collectives, without sizes; those about milestones are left out.

    A line may be there several times. For example, two forwards before one backward gather a parameter twice in it.
    """
    return Counter(line.partition(",")[0] for line in collectives if " of read " in line)
