"""The specs that graphs carry as text: of a bucket (kind, form, transport), and of a parameter that a graph reads."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compiled_fsdp.base.text_form import TextForm
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec

SINGLE, FLAT, COALESCED = "single", "flat", "coalesced"
"""Forms of a bucket: one tensor as it is; several copied into one flat tensor; several in one call, without copies."""

TORCH, LIBRARY, TRITON = "torch", "library", "triton"
"""Copiers of tensors into a bucket: torch's operations, for which Inductor generates code; one op with torch's
operations inside, without generated code (``copies.py``); compiled_fsdp's Triton kernels (``kernels/``).
"""


class Kind(str, enum.Enum):
    """The kind of a bucket's collective. Plans, reports and JSON contain its text, for example "gather".

    The planner, the passes and the runtime ask a kind when it may be launched and when it has to be done. A new kind
    fits in if it answers these questions.
    """

    GATHER = "gather"
    """Makes full parameters from shards. It may be launched any time before the first use, and is done by then."""
    REDUCE = "reduce"
    """Makes shards of gradients from full gradients. It may be launched when these are complete, and done later."""

    @property
    def supplies(self) -> bool:
        """Whether compute needs the collective's result at a milestone; else the collective needs compute's result."""
        return self is Kind.GATHER

    @property
    def plural(self) -> str:
        """The plural for messages: "gathers" or "reductions"."""
        return "gathers" if self is Kind.GATHER else "reductions"

    @property
    def usual_transport(self) -> str:
        """The default transport: a key of ``transport.TRANSPORTS``."""
        return "all_gather" if self is Kind.GATHER else "reduce_scatter"

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # a kind equals its text, so both need one hash; Enum would hash the name


def shard_size(size: Sequence[int], world: int, dim: int = 0) -> list[int]:
    """The shape of a padded shard of a parameter of shape ``size``, sharded over ``world`` ranks on ``dim``."""
    return [-(-n // world) if i == dim else n for i, n in enumerate(size)]


@dataclass(frozen=True)
class ReadSpec(TextForm):
    """The facts about a parameter that a graph needs to read it: the same on every rank and for equal layers.

    Graphs carry it as text, so that Dynamo has one value to guard on.
    """

    # The full parameter's shape; under tensor parallelism the shape of this rank's part.
    size: tuple[int, ...]
    # The number of shards.
    world: int
    # The number of the process groups, in the order of first use. Graphs contain it because the groups' names differ
    # between ranks.
    group_id: int = 0
    # The sharded dimension.
    dim: int = 0
    # The dtype of the full parameter.
    dtype: torch.dtype = torch.float32
    # How the gradient is reduced: a ``ReduceSpec`` as text. For a piece of a parameter: ``PIECE`` and its number.
    reduce: str = ""
    # How many parameters belong to the same repeated block as this parameter.
    block_size: int = 1
    # The parameter's place among them.
    position: int = 0
    # The device on which it is gathered, if the shard lies elsewhere (offloaded).
    device: torch.device | None = None
    # The codec that encodes it for sending, as text (``codec.py``); "": none.
    codec: str = ""

    @property
    def shard_size(self) -> list[int]:
        """The padded shard's shape: ``ceil(size[dim] / world)`` along ``dim`` on every rank."""
        return shard_size(self.size, self.world, self.dim)

    @property
    def reduction(self) -> ReduceSpec:
        """How the parameter's gradient is reduced."""
        return ReduceSpec.parse(self.reduce)

    @property
    def reduced_within(self) -> ReadSpec:
        """The facts to reduce what ``by_parts`` returns in a part of the ranks first (``ReduceSpec.within``)."""
        assert self.reduction.within is not None
        world, group_id = self.reduction.within
        return replace(self, size=(self.world, *self.shard_size), world=world, group_id=group_id, dim=0)

    @property
    def reduced_size(self) -> list[int]:
        """The shape of a reduced gradient: the padded shard's; with ``reduced_within`` and SHARDS_ONLY several."""
        return self.shard_size if self.parts == 1 else self.shard_size[1:]

    @property
    def parts(self) -> int:
        """With ``reduced_within``: over how many parts of the ranks the sum is reduced again; else 1."""
        reduction = self.reduction
        return 1 if reduction.within is None or reduction.sync is not GradSync.ALL else self.shard_size[0]


@dataclass(frozen=True)
class BucketSpec(TextForm):
    """How the tensors of a bucket are sent: all that the launch needs besides the tensors and the groups' names.

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
    # Elements of each padded shard.
    numels: tuple[int, ...]
    # The number of the process groups (``ReadSpec.group_id``).
    group_id: int = 0
    # For a reduction: the sharded dimension of each tensor.
    dims: tuple[int, ...] = ()
    # Indices of the region's reads.
    reads: tuple[int, ...] = ()
    # For a gather: the dtype of the full parameters. For a deferred reduction: the dtype of the reduced gradients.
    dtype: torch.dtype = torch.float32
    # How gradients are reduced: a ``ReduceSpec`` as text.
    reduce: str = ""
    # The codec of the tensors, as text (``codec.py``); "": none. With a codec, places in a flat bucket count bytes.
    codec: str = ""
    # TORCH, LIBRARY or TRITON.
    copier: str = TORCH
    # The device on which parameters are gathered, if their shards lie elsewhere (offloaded).
    device: torch.device | None = None
    # For a second reduction: how many equal addends the bucket consists of, one from each rank of the first.
    pieces: int = 1
    # For a bucket at an edge of a fragment: whether it may be in flight before the fragment's graph, and whether a
    # collective is in flight after the graph: the next graph's first gather, or this reduction.
    edge: tuple[bool, bool] | None = None
    # Whether a gather that is in flight before the graph is compared with the shards before it is used.
    recheck: bool = True

    @property
    def coalesced(self) -> bool:
        """Whether the bucket is a list of tensors that one grouped call sends."""
        return self.form == COALESCED

    @property
    def has_gaps(self) -> bool:
        """Whether compiled_fsdp's kernels pack a flat bucket: each tensor begins at a multiple of 16 elements."""
        return self.copier == TRITON and not self.coalesced

    @property
    def crosses_graph(self) -> bool:
        """Whether a gather may be in flight before the graph, or a reduction is in flight after it."""
        return self.edge is not None and self.edge[0 if self.kind.supplies else 1]

    @property
    def reduction(self) -> ReduceSpec:
        """How gradients are reduced."""
        return ReduceSpec.parse(self.reduce)
