"""The collectives that all ranks have agreed on for one region, as plain data that code of any shape can follow.

Compiled code has its plan built in. A rank whose code for the same parameters is different (a graph break that the
other ranks do not have, a checkpoint, other data) cannot use that code, but it has to take part in the same
collectives. It executes the plan from this description (``runtime/plan_follower.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.spec import FLAT, TORCH, Kind


@dataclass(frozen=True)
class AgreedRead:
    """One parameter of a region."""

    # The parameter's name, as seen from the root module.
    name: str
    # Whether its gradient is computed, and how that is reduced (``ReduceSpec`` as text).
    trainable: bool
    reduce_text: str
    # "resharded" after forward, "kept" until backward, or "full" before the region runs, as after ``unshard()``.
    mode: str
    # What it was at that time (``Unit.line_of``): the plan is for parameters that are still so.
    line: str


@dataclass(frozen=True)
class AgreedBucket:
    """One collective of a region's plan."""

    kind: Kind
    # Indices of ``AgreedPlan.reads``, in the order in which they lie in the bucket.
    reads: tuple[int, ...]
    # How it is sent: a key of ``transport.TRANSPORTS``.
    transport: str
    # Of a gather, for each of its reads: the read's number among the graph's gathers in the order of first use, and how
    # many of them are due before its last use. For example, ``c(b(c(x)))`` reads c (number 0) and b (number 1), and
    # uses c until 2, so c must not be dropped when b is read.
    uses: tuple[tuple[int, int], ...] = ()
    # As ``BucketSpec`` has them. What copies is TRITON where our kernels leave gaps between tensors, which are sent.
    form: str = FLAT
    copier: str = TORCH
    # For the first and the last gather of one of several graphs of a forward: whether it is the first, and the last.
    # The prefetcher launches such gathers, because they may be in flight before the graph runs.
    edge: tuple[bool, bool] | None = None


@dataclass(frozen=True)
class AgreedPlan(PlainData):
    """The collectives of a region, in the order in which every rank launches them."""

    # The region's options, its kind, and a line for each read; what ranks compare.
    signature: tuple[str, ...]
    reads: tuple[AgreedRead, ...]
    # By phase: "forward" and "backward", or "inference", or "backward" alone (compiled autograd's graph).
    buckets: dict[str, tuple[AgreedBucket, ...]] = field(hash=False)
    # Whether prefetched gathers are compared with the shards before they are used (option ``recheck_prefetched``).
    recheck: bool = True
    # Why code of another shape cannot follow this plan; "" if it can.
    obstacle: str = ""
    # Whether reductions leave out parameters without a gradient, and gathers that nobody asks for are left out, as in
    # eager code. Otherwise compiled code of other ranks launches everything, and zeros stand for missing gradients.
    on_demand: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(read.name for read in self.reads)
