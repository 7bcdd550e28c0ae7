"""What is gathered and reduced in a graph, in which buckets, launched in which order."""

# Why: docs/design.md, note N17

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from compiled_fsdp.comm.reduction import ReduceSpec


@dataclass(frozen=True)
class Read:
    """One parameter that a compiled region reads.

    ``name`` is for people and is not the same for equal layers; everything else is, and on every rank. ``bucket`` numbers
    the parameter's unit or repeated block by first use in the region; ``keep``: stays full from forward to backward;
    ``full``: is full before the region runs, and not gathered. ``dtype``, ``itemsize``: as gathered; ``stored``: bytes of an element
    of the shard. ``dim``: the sharded dimension. ``reduction``: what becomes of its gradient (see ``reduction.py``), ``replicas``: how
    many ranks hold the same shard. ``again``: the mesh label and number of the ranks that gather it in backward, if not all.
    ``nested``: is first read inside of a checkpoint or the like, whose forward runs again in backward.
    ``ahead``: the buckets that are to be gathered ahead where this one's forward begins, and where its backward does, if its unit has
    prefetch lists.
    """

    index: int
    name: str
    mesh: int
    world: int
    size: tuple[int, ...]
    dtype: str
    itemsize: int
    bucket: int
    position: int
    keep: bool
    trainable: bool
    full: bool = False
    dim: int = 0
    stored: int = 4
    reduction: str = "float32 avg"
    replicas: int = 1
    again: tuple[int, int] | None = None
    nested: bool = False
    ahead: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def ahead_in(self, phase: str) -> tuple[int, ...]:
        """``ahead`` in a graph."""
        return self.ahead[phase == "backward"]

    @property
    def elements(self) -> int:
        """Of the full, padded parameter."""
        padded = self.world * -(-self.size[self.dim] // self.world)
        return padded * math.prod(n for i, n in enumerate(self.size) if i != self.dim)

    @property
    def bytes(self) -> int:
        """Bytes of the full, padded parameter, as it is gathered."""
        return self.elements * self.itemsize

    @property
    def reduced_bytes(self) -> int:
        """Bytes of its full, padded gradient, as it is reduced."""
        return self.elements * getattr(torch, self.how.dtype).itemsize

    @property
    def how(self) -> ReduceSpec:
        """``reduction``, parsed."""
        return ReduceSpec.parse(self.reduction)

    def shape_of_plan(self) -> str:
        """What has to agree between ranks."""
        mode = "full" if self.full else "kept" if self.keep else "resharded"
        mode += f", {self.reduction}" if self.trainable else ", frozen"
        mode += f", gathered again by {self.again[1]}" if self.again else ""
        mode += ", nested" if self.nested else ""
        for phase in ("forward", "backward") if any(self.ahead) else ():
            mode += f", {phase} prefetch of {list(self.ahead_in(phase))}"
        ranks = f"{self.world}" if self.replicas == 1 else f"{self.replicas} x {self.world}"
        shape = f"{self.dtype}{list(self.size)}" + (f" dim {self.dim}" if self.dim else "")
        return f"{shape} mesh {self.mesh} of {ranks}, bucket {self.bucket} position {self.position}, {mode}"


@dataclass(frozen=True)
class Bucket:
    """Parameters that share one collective, and where it stands.

    Attributes:
        kind: "gather" or "reduce".
        reads: their reads, in the order in which they lie in the bucket.
        bytes: of the full, padded tensors.
        form: "single", "flat" or "coalesced" (see ``tasks.py``).
        via: "all_to_all" for a reduction that is one, summed afterwards; else "".
        at, wait: the milestones right before which it is launched and waited for: "start", "use 3" (the first use of read 3),
            "grad 5" (read 5's gradient is complete), "end". A gather is waited for at its first use, whatever ``wait`` says.
    """

    kind: str
    reads: tuple[int, ...]
    mesh: int
    bytes: int
    form: str = "flat"
    via: str = ""
    at: str = "start"
    wait: str = "end"

    def __str__(self) -> str:
        how = f", {self.via}" if self.via else ""
        return f"{self.kind} {list(self.reads)} {self.bytes:,} bytes, mesh {self.mesh}, {self.form}{how}, at {self.at}"


@dataclass(frozen=True)
class GraphPlan:
    """The collectives of one graph in launch order: the same on every rank and for every variant of the region."""

    phase: str
    launches: tuple[Bucket, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.phase}:", *(f"  {i}: {bucket}" for i, bucket in enumerate(self.launches))])

    def to_json(self) -> str:
        """This plan as JSON; ``from_json`` reads it back."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> GraphPlan:
        """The plan that ``to_json`` wrote."""
        data = json.loads(text)
        launches = [Bucket(**{**bucket, "reads": tuple(bucket["reads"])}) for bucket in data["launches"]]
        return GraphPlan(data["phase"], tuple(launches))

    def names(self, reads: Sequence[Read]) -> list[str]:
        """One line per launch, with parameter names."""
        by_index = {read.index: read for read in reads}
        return [
            f"{bucket.kind} {', '.join(by_index[i].name for i in bucket.reads)} ({bucket.bytes:,} bytes)"
            for bucket in self.launches
        ]
