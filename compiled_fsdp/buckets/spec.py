"""What a bucket is: its kind, its form, and how it is sent; and what a graph is told of a parameter that it reads."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_fsdp.base.text_form import TextForm
from compiled_fsdp.buckets.reduction import ReduceSpec

SINGLE, FLAT, COALESCED = "single", "flat", "coalesced"
"""Forms of a bucket: one tensor as it is; several, copied into one flat tensor; several in one call, without copies."""

TORCH, LIBRARY, TRITON = "torch", "library", "triton"
"""What copies into a bucket: torch's operations, which Inductor generates code for; the same without generated code,
as one call (``copies.py``); our kernels (``kernels/``).
"""


class Kind(str, enum.Enum):
    """What a bucket's collective does. In plans, reports and JSON it is its text: "gather".

    Planner, passes and runtime ask when a kind may be launched, and when it has to be done; so another kind finds its
    place among them by answering.
    """

    GATHER = "gather"
    """Full parameters from shards. It supplies compute: launched at any time before, done at the first use."""
    REDUCE = "reduce"
    """Shards of gradients from full ones. Ready when they are complete; compute does not need the result at once."""

    @property
    def supplies(self) -> bool:
        """Whether compute needs at a milestone what the collective brings; else it takes what is complete there."""
        return self is Kind.GATHER

    @property
    def plural(self) -> str:
        """For messages: "gathers", "reductions"."""
        return "gathers" if self is Kind.GATHER else "reductions"

    @property
    def usual_transport(self) -> str:
        """How it is sent where nothing else is chosen: a key of ``transport.TRANSPORTS``."""
        return "all_gather" if self is Kind.GATHER else "reduce_scatter"

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # of the text that it is equal to; Enum's is the name's


def shard_size(size: Sequence[int], world: int, dim: int = 0) -> list[int]:
    """The shape of a padded shard of a parameter of shape ``size``."""
    return [-(-n // world) if i == dim else n for i, n in enumerate(size)]


@dataclass(frozen=True)
class ReadSpec(TextForm):
    """What a graph is told of a parameter: the same on every rank and for equal layers.

    It comes into graphs as text, so that Dynamo has one value to guard.
    """

    # The full parameter's shape (on this rank, under tensor parallelism).
    size: tuple[int, ...]
    # The number of shards.
    world: int
    # What a graph says instead of the process groups' names: they are numbered by use.
    group_id: int = 0
    # The sharded dimension.
    dim: int = 0
    # In which it is gathered.
    dtype: torch.dtype = torch.float32
    # What becomes of its gradient: a ``ReduceSpec`` as text, or which piece of a parameter this is (``PIECE``).
    reduce: str = ""
    # How many parameters the repeated block has that this parameter belongs to.
    block_size: int = 1
    # Its place among them.
    position: int = 0
    # Where it is gathered, if the shard is elsewhere (offloaded).
    device: torch.device | None = None
    # How it is encoded while it is sent (``codec.py``); "": not.
    codec: str = ""

    @property
    def shard_size(self) -> list[int]:
        """The padded shard's shape: ``ceil(size[dim] / world)`` along dim on every rank."""
        return shard_size(self.size, self.world, self.dim)

    @property
    def reduction(self) -> ReduceSpec:
        """How its gradient is reduced."""
        return ReduceSpec.parse(self.reduce)


@dataclass(frozen=True)
class BucketSpec(TextForm):
    """How the tensors of a bucket are sent: all that its launch needs besides them.

    >>> str(BucketSpec(Kind.GATHER, FLAT, "all_gather", world=2, numels=(4, 32), reads=(0, 1)))
    'gather flat all_gather; world 2; numels 4 32; reads 0 1'
    """

    kind: Kind
    # SINGLE, FLAT or COALESCED.
    form: str
    # A key of ``transport.TRANSPORTS``.
    transport: str
    # The number of shards.
    world: int
    # Of the padded shards: elements.
    numels: tuple[int, ...]
    # The number of the process groups.
    group_id: int = 0
    # The sharded dimensions, of a reduction.
    dims: tuple[int, ...] = ()
    # Indices of the region's reads.
    reads: tuple[int, ...] = ()
    # Of full parameters that are gathered; of reduced gradients, where they are handed out outside of the graph.
    dtype: torch.dtype = torch.float32
    # How gradients are reduced: a ``ReduceSpec`` as text.
    reduce: str = ""
    # How the tensors are encoded (``codec.py``); "": not. With a codec, places in a flat bucket count bytes.
    codec: str = ""
    # TORCH, LIBRARY or TRITON.
    copier: str = TORCH
    # Where parameters are gathered, if their shards are elsewhere (offloaded).
    device: torch.device | None = None
    # In how many equal pieces, one from each rank, a bucket comes that goes on over replicas.
    pieces: int = 1
    # Of a bucket at an edge of one of several graphs of a forward: whether it may be in flight before the graph, and
    # whether something is in flight after it: the next graph's first gather, or this reduction.
    edge: tuple[bool, bool] | None = None
    # Whether a gather that is in flight before the graph is compared with the shards before it is used.
    recheck: bool = True

    @property
    def coalesced(self) -> bool:
        """Whether each tensor is sent by itself."""
        return self.form == COALESCED

    @property
    def has_gaps(self) -> bool:
        """Whether our kernels pack a flat bucket: each tensor begins at a multiple of 16 elements."""
        return self.copier == TRITON and not self.coalesced

    @property
    def crosses_graph(self) -> bool:
        """Whether it is in flight before the graph, or after it."""
        return self.edge is not None and self.edge[0 if self.kind.supplies else 1]

    @property
    def reduction(self) -> ReduceSpec:
        """How gradients are reduced."""
        return ReduceSpec.parse(self.reduce)
