"""What becomes of a full gradient on its way to the shard's. No torch.fx here."""

from __future__ import annotations

import functools
from dataclasses import dataclass

ALL, SCATTER, NONE = "all", "scatter", "none"
"""How far a gradient is reduced: over all ranks; over those that shard the parameter, not over replicas; not at all."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced; it travels through graphs as text: "float32 avg", "float16 sum/2/1 waiting".

    Attributes:
        dtype: in which they are communicated, and added up while they wait.
        divide: by what they are divided before and after they are summed; None: the collective averages.
        sync: how far they are reduced. What is not reduced over all ranks waits on its parameter.
        waiting: whether what waits from earlier backwards is added.
    """

    dtype: str = "float32"
    divide: tuple[float, float] | None = None
    sync: str = ALL
    waiting: bool = False

    def __str__(self) -> str:
        op = "avg" if self.divide is None else f"sum/{self.divide[0]:g}/{self.divide[1]:g}"
        words = [self.dtype, op, *([self.sync] if self.sync != ALL else []), *(["waiting"] if self.waiting else [])]
        return " ".join(words)

    @staticmethod
    @functools.cache
    def parse(text: str) -> Reduction:
        """What ``str`` wrote."""
        dtype, op, *rest = text.split()
        divide = None if op == "avg" else tuple(map(float, op.split("/")[1:]))
        sync = next((word for word in rest if word in (SCATTER, NONE)), ALL)
        assert divide is None or len(divide) == 2
        return Reduction(dtype, divide, sync, "waiting" in rest)

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

    In fp16 a gradient is divided by about the root of the factor on either side, so that it neither overflows nor underflows.
    ``factor`` is the user's in place of the number of ranks. (``_get_gradient_divide_factors`` in torch's FSDP2; a factor of the
    user's is divided by afterwards here, where torch multiplies before by PREMUL_SUM, which not all backends have.)
    """
    narrow = dtype not in ("float32", "bfloat16")
    if not narrow and not force_sum and factor is None:
        return None
    divisor = float(ranks) if factor is None else float(factor)
    before = 1.0
    while narrow and divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before
