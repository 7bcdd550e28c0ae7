"""What ``real_link`` can measure: links and batches by model, ranks on two machines, and systems by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WHOLE = "compiled_fsdp"
COMPARED_TO = "fsdp2"
BROKEN = ("broken", "broken_inside", "broken_autograd", "blocks")
ACCUMULATING = ("accumulate_each", "accumulate_wait", "fsdp2_accumulate_each", "fsdp2_accumulate_wait")
CODECS = ("fsdp2_bf16", "bf16", "wire_bf16", "wire_fp8_bf16", "wire_int8", "wire_int8_feedback", "wire_int8_broken")
EXTENSIONS = ("float8", "fsdp2_float8")
"""All-gather extensions: torchao's float8 training. They need torchao."""
WIRE = (WHOLE, COMPARED_TO, *CODECS, *EXTENSIONS, "floor_compute")
"""With ``--wire``: codecs, all-gather extensions and what computes in bfloat16, beside what is exact."""
OF_ONE_GROUP = ("functional", "functional_overlap", "floor_wire", "floor_wire_fsdp2")
"""Systems that know neither replicas nor a group of their own in backward."""
NAMES = (WHOLE, COMPARED_TO, "fsdp2_compiled", "ddp", "functional", "functional_overlap",
         "floor_compute", "floor_wire", "floor_wire_fsdp2", *BROKEN)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A link and a batch, and what they are to show: FSDP2's collectives in units of compute, from low to high.

    The batch is each rank's: rows of the MLP, tokens of the others.
    """

    gbit: int
    batch: int
    name: str = ""
    low: float = 0.0
    high: float = float("inf")
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.gbit} Gb/s, batch {self.batch}" + (f" ({self.name})" if self.name else "")


CASES = {
    "mlp": (
        Case(1, 256, "communication-bound", 3.0, 5.0, quick=True),
        Case(1, 1024, "balanced", 0.9, 1.5, quick=True),
        Case(2, 256),
        Case(2, 512, "balanced", 0.9, 1.5),
        Case(4, 2048, "compute-bound", 0.0, 0.3),
    ),
    "llama": (Case(1, 256, quick=True), Case(1, 1024)),
    "embedding": (Case(1, 256, quick=True), Case(1, 1024)),
}
"""By model."""


@dataclass(frozen=True)
class Layout:
    """Ranks on two machines, numbered machine by machine, and how parameters lie on them.

    Attributes:
        text: for people.
        ranks_per_machine: how many.
        mesh: the shape of the mesh: (shards), or (replicas, shards).
        options: further arguments of ``fully_shard``, for FSDP2 and here.
    """

    text: str
    ranks_per_machine: int
    mesh: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """On both machines."""
        return 2 * self.ranks_per_machine

    @property
    def is_one_group(self) -> bool:
        """Whether all ranks gather and reduce together, in forward and backward."""
        return len(self.mesh) == 1 and not self.options


LAYOUTS = {
    "two": Layout("a rank on each machine, sharded over both", 1, (2,)),
    "four": Layout("two ranks on each machine, sharded over all four", 2, (4,)),
    "hsdp": Layout("two ranks on each machine, sharded inside of it and replicated between them", 2, (2, 2)),
    "reshard": Layout(
        "two ranks on each machine, sharded over all four; backward gathers inside of a machine",
        2,
        (4,),
        {"reshard_after_forward": 2},
    ),
}
