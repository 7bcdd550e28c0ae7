"""What becomes of a full gradient on its way to the shard's."""

# Why: docs/design.md, note N8

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace

import torch

from compiled_fsdp.buckets import codec as codecs

PIECE = "piece"
"""How the spec of a piece begins, which has no gradient (``ops/pieces.py``): its number follows."""


class GradSync(enum.Enum):
    """How far a gradient is reduced, and so what its gate does with it."""

    # Over all ranks that have the parameter: it becomes ``.grad``.
    ALL = "all"
    # Over the ranks that shard the parameter: it waits for the replicas.
    SHARDS_ONLY = "scatter"
    # Not at all: the full gradient waits.
    NONE = "none"


_SYNC_BY_WORD = {sync.value: sync for sync in GradSync}


@dataclass(frozen=True)
class ReduceSpec:
    """How gradients are reduced; it travels through graphs as text: "float32 avg", "float16 sum/2/1 waiting",
    "float32 avg int8/256".
    """

    # In which they are communicated, and added up while they wait.
    dtype: str = "float32"
    # By what they are divided before and after they are summed; None: the collective averages.
    divide: tuple[float, float] | None = None
    # What is not reduced over all ranks waits on its parameter.
    sync: GradSync = GradSync.ALL
    # Whether what waits from earlier backwards is added.
    adds_accumulated: bool = False
    # How gradients are encoded while they are sent to the ranks that shard them (``codec.py``), as text; "": not.
    codec: str = ""
    # Whether what the codec loses is kept and added to the next gradient.
    error_feedback: bool = False
    # Whether ``dtype`` is only what is expected, and a gradient of a wider one is communicated in that
    # (``grad_dtype=None``).
    any_dtype: bool = False

    def __str__(self) -> str:
        words = [self.dtype, "avg" if self.divide is None else f"sum/{self.divide[0]:g}/{self.divide[1]:g}"]
        if self.sync is not GradSync.ALL:
            words.append(self.sync.value)
        if self.adds_accumulated:
            words.append("waiting")
        if self.codec:
            words.append(self.codec)
        if self.error_feedback:
            words.append("feedback")
        if self.any_dtype:
            words.append("any")
        return " ".join(words)

    @staticmethod
    @functools.cache
    def parse(text: str) -> ReduceSpec:
        """What ``str`` wrote."""
        dtype, op, *rest = text.split()
        divide = None if op == "avg" else tuple(map(float, op.split("/")[1:]))
        sync = next((_SYNC_BY_WORD[word] for word in rest if word in _SYNC_BY_WORD), GradSync.ALL)
        assert divide is None or len(divide) == 2
        codec = next((word for word in rest if word.partition("/")[0] in codecs.NAMES), "")
        return ReduceSpec(dtype, divide, sync, "waiting" in rest, codec, "feedback" in rest, "any" in rest)

    def of(self, *dtypes: torch.dtype) -> ReduceSpec:
        """How gradients of these dtypes are reduced together."""
        if not self.any_dtype:
            return self
        widest = functools.reduce(torch.promote_types, dtypes, getattr(torch, self.dtype))
        return replace(self, dtype=str(widest).removeprefix("torch."), any_dtype=False)

    @property
    def takes_parameters(self) -> bool:
        """Whether sending a gradient takes what its parameter keeps."""
        return self.adds_accumulated or self.error_feedback

    @property
    def op(self) -> str:
        """The collective's operation."""
        return "avg" if self.divide is None else "sum"

    @property
    def before(self) -> float:
        return 1.0 if self.divide is None else self.divide[0]

    @property
    def after(self) -> float:
        return 1.0 if self.divide is None else self.divide[1]


def divide_factors(dtype: str, ranks: int, factor: float | None, force_sum: bool) -> tuple[float, float] | None:
    """Before and after the sum over ``ranks``, as FSDP2 divides; None where the collective averages.

    In fp16 a gradient is divided by about the root of the factor on either side, so that it neither overflows nor
    underflows. ``factor`` is the user's in place of the number of ranks. (``_get_gradient_divide_factors`` in torch's
    FSDP2; a factor of the user's is divided by after the sum here, where torch multiplies before it by PREMUL_SUM,
    which not all backends have.)
    """
    narrow = dtype not in ("float32", "bfloat16")
    if not narrow and not force_sum and factor is None:
        return None
    divisor = float(ranks) if factor is None else float(factor)
    before = 1.0
    while narrow and divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before
