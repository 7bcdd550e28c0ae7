"""The plan of a graph: the parameters that it reads, their buckets, and the order of launches."""

# Why: docs/design/planner.md, "A plan is data with milestones"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.codec import nbytes
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import Kind


@dataclass(frozen=True)
class Read:
    """One parameter that a compiled region reads.

    Everything but ``name`` is the same for equal layers, and on every rank. More than 20 attributes: ranks compare most
    of them, and passes know nothing else about a parameter.
    """

    # Its number in the region.
    index: int
    # Its name, for reports and messages.
    name: str
    # The number of the process groups that communicate it (``PassContext.groups``).
    group_id: int
    # The number of ranks that shard it.
    world: int
    # The shape of the full parameter, without padding.
    size: tuple[int, ...]
    # The dtype in which it is gathered, as "float32".
    dtype: str
    # Bytes of an element in that dtype.
    itemsize: int
    # The number of its unit or repeated block, by first use in the region.
    block_number: int
    # Its place among the parameters of that block, in the order of registration.
    position: int
    # Whether the full parameter stays in memory from forward to backward.
    keep_for_backward: bool
    # Whether its gradient is computed.
    trainable: bool
    # Whether it is unsharded before the region runs (for example by ``unshard()``), and so not gathered.
    already_unsharded: bool = False
    # The sharded dimension.
    dim: int = 0
    # Bytes of an element of the shard, and of ``.grad``, whose dtype ``grad_dtype`` may have set.
    shard_itemsize: int = 4
    grad_itemsize: int = 4
    # How its gradient is reduced: a ``ReduceSpec`` as text.
    reduce_text: str = "float32 avg"
    # The number of ranks that hold the same shard.
    replicas: int = 1
    # If fewer ranks gather it in backward (``reshard_after_forward=8``): the number of their group, and of the ranks.
    backward_group: tuple[int, int] | None = None
    # Whether its shard is in host memory, and it is gathered on another device (CPUOffloadPolicy).
    in_host_memory: bool = False
    # If this is a piece that the parameter's all-gather extensions make of its shard: the number of the piece, and the
    # text about the extensions that ranks compare. Else "".
    piece: str = ""
    # The user's prefetch lists: the blocks to gather when this block's forward begins, and when its backward begins.
    prefetch_blocks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    # The codec with which it is gathered (``buckets/codec.py``), as text; "" for none.
    codec: str = ""

    def prefetch_blocks_in(self, phase: str) -> tuple[int, ...]:
        """The prefetch list for a graph of this phase."""
        return self.prefetch_blocks[phase == "backward"]

    @property
    def elements(self) -> int:
        """The number of elements of the full, padded parameter."""
        padded = self.world * -(-self.size[self.dim] // self.world)
        return padded * math.prod(n for i, n in enumerate(self.size) if i != self.dim)

    @property
    def bytes(self) -> int:
        """Bytes of the full, padded parameter in the dtype of compute."""
        return self.elements * self.itemsize

    @property
    def reduced_bytes(self) -> int:
        """Bytes of its full, padded gradient in the dtype of the reduction."""
        return self.elements * getattr(torch, self.reduce_spec.dtype).itemsize

    @property
    def pending_bytes(self) -> float:
        """The most bytes of pending gradients that a rank holds between backwards."""
        spec = self.reduce_spec
        if not (self.trainable and spec.adds_accumulated):
            return 0
        ranks = self.world if spec.within is None else spec.within[0]
        return self.reduced_bytes / ranks if spec.pending_in_parts else self.reduced_bytes

    def encoded_bytes(self, codec: str) -> int:
        """Bytes on the wire with ``codec``: of all shards of the parameter, or of one rank's full gradient."""
        return self.world * nbytes(codec, self.elements // self.world)

    @property
    def reduce_spec(self) -> ReduceSpec:
        """``reduce_text``, parsed."""
        return ReduceSpec.parse(self.reduce_text)

    @property
    def reduces_within(self) -> tuple[int, int] | None:
        """If a part of the ranks reduces its gradient: their number, and the number of their group."""
        return self.reduce_spec.within if self.trainable and not self.piece else None

    @property
    def reduces_again_over(self) -> int:
        """How many ranks reduce its gradient again: the replicas, or the parts of ranks that reduced it first; or 1."""
        if self.reduce_spec.sync is not GradSync.ALL:
            return 1
        return self.world // self.reduces_within[0] if self.reduces_within else self.replicas

    @property
    def is_reduced(self) -> bool:
        """Whether ranks reduce its gradient together. The gradient of a piece is reduced with its parameter's."""
        return self.trainable and not self.piece and self.reduce_spec.sync is not GradSync.NONE

    @property
    def mode(self) -> str:
        """How long the full parameter is held: "full", "kept" or "resharded" (see ``AgreedRead.mode``)."""
        return "full" if self.already_unsharded else "kept" if self.keep_for_backward else "resharded"

    def signature_line(self, *, trains: bool = True) -> str:
        """A line that must be equal on all ranks that compile the same region.

        Args:
            trains: whether the region trains; only then the line says how the gradient is reduced.
        """
        mode = self.mode
        if trains:
            mode += f", {self.reduce_text}" if self.trainable else ", frozen"
        mode += f", gathered again by {self.backward_group[1]}" if self.backward_group else ""
        mode += f", gathered as {self.codec}" if self.codec else ""
        mode += f", {self.piece}" if self.piece else ""
        for phase in ("forward", "backward") if any(self.prefetch_blocks) else ():
            mode += f", {phase} prefetch of {list(self.prefetch_blocks_in(phase))}"
        ranks = f"{self.world}" if self.replicas == 1 else f"{self.replicas} x {self.world}"
        shape = f"{self.dtype}{list(self.size)}" + (f" dim {self.dim}" if self.dim else "")
        place = f"bucket {self.block_number} position {self.position}"
        return f"{shape} mesh {self.group_id} of {ranks}, {place}, {mode}"


@dataclass(frozen=True)
class Bucket:
    """Parameters or gradients that share one collective, and the milestones of its launch and its wait.

    A milestone is "start", "use 3" (the first use of read 3), "grad 5" (read 5's gradient is complete), a launch or
    wait of the model's own collectives ("all_reduce 0", "wait 0"), or "end".
    """

    # "gather" or "reduce".
    kind: Kind
    # Indices of the parameters' reads, in the order in which they lie in the bucket.
    reads: tuple[int, ...]
    # The number of the process groups (``PassContext.groups``).
    group_id: int
    # Bytes of the full, padded tensors as they are sent.
    bytes: int
    # "single", "flat" or "coalesced" (see ``buckets/spec.py``).
    form: str = "flat"
    # How it is sent: a key of ``transport.TRANSPORTS``; "" for the usual one of its kind.
    transport: str = ""
    # The milestone right before which it is launched.
    at: str = "start"
    # The milestone right before which it is waited for. For a gather it is ignored: the wait is at the first use.
    wait: str = "end"

    def __str__(self) -> str:
        transport = f", {self.transport}" if self.transport else ""
        where = f"mesh {self.group_id}, {self.form}{transport}, at {self.at}"
        return f"{self.kind} {list(self.reads)} {self.bytes:,} bytes, {where}"


@dataclass(frozen=True)
class GraphPlan(PlainData):
    """The collectives of one graph. The plan is the same on every rank and for every variant of the region."""

    # "forward", "backward" or "inference".
    phase: str
    # The buckets in the order in which they are launched.
    launches: tuple[Bucket, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.phase}:", *(f"  {i}: {bucket}" for i, bucket in enumerate(self.launches))])
