"""The settings of ``real_link``: links and batches by model, layouts of ranks on two machines, and names of systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WHOLE = "compiled_fsdp"
COMPARED_TO = "fsdp2"
BROKEN = ("broken", "broken_inside", "broken_autograd", "blocks")
ACCUMULATING = ("accumulate_each", "accumulate_wait", "fsdp2_accumulate_each", "fsdp2_accumulate_wait")
ON_MACHINES = ("accumulate_each", "accumulate_hsdp", "accumulate_hfsdp")
"""Systems with ``--accumulate --layout reshard``: shards over all ranks, HSDP, and a working copy on each machine."""
CODECS = ("fsdp2_bf16", "bf16", "wire_bf16", "wire_fp8_bf16", "wire_int8", "wire_int8_feedback", "wire_int8_broken")
EXTENSIONS = ("float8", "fsdp2_float8")
"""Systems with all-gather extensions: torchao's float8 training. They need torchao."""
WIRE = (WHOLE, COMPARED_TO, *CODECS, *EXTENSIONS, "floor_compute")
"""Systems with ``--wire``: codecs, all-gather extensions and compute in bfloat16, beside the exact systems."""
BUDGETS = ("budget_100", "budget_80", "budget_60", "budget_45")
"""Systems with a memory budget, in percent of the planned peak of compiled_fsdp without one."""
UNSHARDED = ("replicated", "kept")
"""Systems with as many bytes as DDP: ``replicate``, and parameters that stay unsharded from forward to backward."""
STEPS = ("loop", "train_step", "compiled_update")
"""Systems whose step has clipping and AdamW: the usual loop, and ``TrainStep``. Their model and loss are compiled."""
OF_ONE_GROUP = ("functional", "functional_overlap", "floor_wire", "floor_wire_fsdp2")
"""Systems that support neither replicas nor another group for backward's gathers."""
NAMES = (WHOLE, COMPARED_TO, "fsdp2_compiled", "ddp", "functional", "functional_overlap",
         "floor_compute", "floor_wire", "floor_wire_fsdp2", *BROKEN)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A link's rate and a batch, and how communication-bound the setting claims to be.

    The claim is that FSDP2's collectives alone take between ``low`` and ``high`` times compute alone. For example, a
    "balanced" setting claims 0.9 to 1.5. The batch is each rank's: rows for the MLP, tokens for the other models.
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
"""Settings by the model's name."""


@dataclass(frozen=True)
class Layout:
    """Ranks on two machines, numbered machine by machine, and how parameters lie on them.

    Attributes:
        text: a description for people.
        ranks_per_machine: the number of ranks on each machine.
        mesh: the shape of the mesh: (shards), or (replicas, shards).
        options: further arguments of ``fully_shard``, for FSDP2's and for compiled_fsdp's.
    """

    text: str
    ranks_per_machine: int
    mesh: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks on both machines."""
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
