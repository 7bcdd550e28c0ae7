"""The spec of a reduction: dtype, divisors, codec, and how far a full gradient is reduced."""

# Why: docs/design/gradients.md, "The reduction is text in the graph"

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace

import torch

from compiled_fsdp.buckets import codec as codecs

PIECE = "piece"
"""The first word of ``ReadSpec.reduce`` for a piece of a parameter with all-gather extensions (``ops/pieces.py``).

The piece's number follows. A piece has no gradient.
"""


class GradSync(enum.Enum):
    """How far a gradient is reduced, which decides the action of the gradient's gate."""

    # Over all ranks that have the parameter. The gate adds the gradient to ``.grad``.
    ALL = "all"
    # Over the ranks that shard the parameter, or over a part of them (``ReduceSpec.within``). The gradient is pending
    # until it is reduced over the replicas, or over the other parts.
    SHARDS_ONLY = "scatter"
    # Not at all. The full gradient is pending until a later reduction.
    NONE = "none"


_SYNC_BY_WORD = {sync.value: sync for sync in GradSync}


@dataclass(frozen=True)
class ReduceSpec:
    """How gradients are reduced. Graphs carry it as text.

    For example "float32 avg", "float16 sum/2/1 waiting" (adds pending gradients), or "float32 avg int8/256".
    """

    # The dtype in which gradients are communicated, and added up while they are pending.
    dtype: str = "float32"
    # The divisors before and after the sum; None: the collective averages.
    divide: tuple[float, float] | None = None
    # How far gradients are reduced.
    sync: GradSync = GradSync.ALL
    # Whether the pending gradients of earlier backwards are added.
    adds_accumulated: bool = False
    # The codec of gradients while they are sent to the ranks that shard them, as text (``codec.py``); "": none.
    codec: str = ""
    # Whether the codec's rounding errors are kept and added to the next gradient.
    error_feedback: bool = False
    # Whether a gradient of a dtype wider than ``dtype`` is communicated in its own dtype (``grad_dtype=None``).
    any_dtype: bool = False
    # The number of neighbouring ranks that reduce it first, and the number of their group. With ALL, the ranks at the
    # same place in the other groups reduce it then. None: all ranks that shard it reduce it together.
    within: tuple[int, int] | None = None
    # Whether all pending gradients are reduced over the shards, or ``within``. Else a full one may be pending. The plan
    # counts their memory.
    pending_in_parts: bool = False

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
        if self.within is not None:
            words.append(f"within/{self.within[0]}/{self.within[1]}")
        if self.pending_in_parts:
            words.append("parts")
        return " ".join(words)

    @staticmethod
    @functools.cache
    def parse(text: str) -> ReduceSpec:
        """The spec with this text: the inverse of ``str``."""
        dtype, op, *rest = text.split()
        divide = None if op == "avg" else tuple(map(float, op.split("/")[1:]))
        sync = next((_SYNC_BY_WORD[word] for word in rest if word in _SYNC_BY_WORD), GradSync.ALL)
        assert divide is None or len(divide) == 2
        codec = next((word for word in rest if word.partition("/")[0] in codecs.NAMES), "")
        parts = next((word.split("/")[1:] for word in rest if word.startswith("within/")), None)
        within = None if parts is None else (int(parts[0]), int(parts[1]))
        flags = "waiting" in rest, codec, "feedback" in rest, "any" in rest, within, "parts" in rest
        return ReduceSpec(dtype, divide, sync, *flags)

    def of(self, *dtypes: torch.dtype) -> ReduceSpec:
        """The spec for reducing gradients of these dtypes together: with ``any_dtype`` in the widest dtype."""
        if not self.any_dtype:
            return self
        widest = functools.reduce(torch.promote_types, dtypes, getattr(torch, self.dtype))
        return replace(self, dtype=str(widest).removeprefix("torch."), any_dtype=False)

    @property
    def takes_parameters(self) -> bool:
        """Whether packing a gradient reads its parameter's pending gradient or residual."""
        return self.adds_accumulated or self.error_feedback

    @property
    def op(self) -> str:
        """The collective's operation: "avg" or "sum"."""
        return "avg" if self.divide is None else "sum"

    @property
    def before(self) -> float:
        return 1.0 if self.divide is None else self.divide[0]

    @property
    def after(self) -> float:
        return 1.0 if self.divide is None else self.divide[1]


def divide_factors(dtype: str, ranks: int, factor: float | None, force_sum: bool) -> tuple[float, float] | None:
    """The divisors before and after the sum over the ranks, as FSDP2 chooses them; None if the collective averages.

    In fp16 a gradient is divided by about the root of the divisor before the sum and again after it, so that it neither
    overflows nor underflows. FSDP2's function is ``_get_gradient_divide_factors``. There is one difference: for
    ``factor`` FSDP2 multiplies before the sum with PREMUL_SUM, but compiled_fsdp divides after the sum, because not all
    backends have PREMUL_SUM.

    Args:
        dtype: the name of the dtype in which gradients are communicated.
        ranks: the number of ranks.
        factor: the user's divisor, used instead of the number of ranks; None: there is none.
        force_sum: whether the collective has to sum instead of average.
    """
    narrow = dtype not in ("float32", "bfloat16")
    if not narrow and not force_sum and factor is None:
        return None
    divisor = float(ranks) if factor is None else float(factor)
    before = 1.0
    while narrow and divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before
