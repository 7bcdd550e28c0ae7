"""What travels on the wire: how a unit's parameters are gathered and its gradients reduced, by the user's choice."""

# Why: docs/design.md, note N68

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_fsdp.buckets.codec import BLOCK, NAMES, Codec


@dataclass(frozen=True)
class WirePolicy:
    """Codecs of one ``fully_shard`` call: what parameters and gradients are while they are sent.

    A codec is "int8" or "float8_e4m3fn" (blocks of elements, each with a scale of its own), "bfloat16", or such a
    ``torch.dtype``; None sends exactly what there is. Shards, gradients and optimizer state keep their dtypes, and all
    ranks compute with the same full parameters: what they have decoded. Gradients are added up in float32.

    Attributes:
        gather: the codec of full parameters.
        reduce: the codec of gradients; each is encoded once, sent by an all-to-all, and decoded before it is added.
        block: how many elements share a scale: a multiple of 16.
        error_feedback: keep what the codec has lost of each gradient, and add it to the next one; it takes a full
            gradient in float32 on each rank.

    Raises:
        ValueError: an unknown codec, a block that cannot be, or feedback without a codec of gradients.
    """

    gather: str | torch.dtype | None = None
    reduce: str | torch.dtype | None = None
    block: int = BLOCK
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for field in ("gather", "reduce"):
            value = getattr(self, field)
            name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            if name is not None and name not in NAMES:
                raise ValueError(f"WirePolicy: {field} must be one of {', '.join(NAMES)} or None, but is {value!r}.")
            object.__setattr__(self, field, name)
        if type(self.block) is not int or self.block < 16 or self.block % 16:
            raise ValueError(f"WirePolicy: block must be a positive multiple of 16, but is {self.block!r}.")
        if self.error_feedback and self.reduce is None:
            raise ValueError(
                "WirePolicy: error_feedback=True keeps what a codec loses of gradients, so it needs reduce=."
            )

    def gather_codec(self, dtype: torch.dtype) -> str:
        """The codec of a parameter of this dtype, as text; "" where it is sent as it is."""
        return self._codec(self.gather, dtype)

    def reduce_codec(self, dtype: torch.dtype) -> str:
        """The codec of a gradient that is reduced in this dtype, as text; "" where it is sent as it is."""
        return self._codec(self.reduce, dtype)

    def _codec(self, name: str | torch.dtype | None, dtype: torch.dtype) -> str:
        if name is None or not dtype.is_floating_point:
            return ""
        return str(Codec.of(str(name), self.block))


EXACT = WirePolicy()


def check_wire_policy(policy: object) -> WirePolicy:
    """The policy; None is the exact one.

    Raises:
        ValueError: it is something else.
    """
    if policy is None:
        return EXACT
    if not isinstance(policy, WirePolicy):
        raise ValueError(f"fully_shard: wire_policy must be a WirePolicy, but got {type(policy).__name__}.")
    return policy
