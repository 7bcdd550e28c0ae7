"""The user's choice of codecs: how a unit's parameters and gradients are encoded while they are sent."""

# Why: docs/design/communication.md, "Codecs are part of the read's text"

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_fsdp.buckets.codec import BLOCK, NAMES, Codec


@dataclass(frozen=True)
class WirePolicy:
    """The codecs of one ``fully_shard`` call: how parameters and gradients are encoded while they are sent.

    A codec is "int8" or "float8_e4m3fn" (blocks of elements, each block with its own scale), "bfloat16", or such a
    ``torch.dtype``; None sends tensors without a codec. Shards, gradients and optimizer state keep their dtypes. All
    ranks compute with the same full parameters, because each rank also decodes its own shard from the encoded bytes.
    Gradients are added up in float32. For example::

        fully_shard(model, wire_policy=WirePolicy(gather="float8_e4m3fn", reduce="int8"))

    Attributes:
        gather: the codec of parameters in gathers.
        reduce: the codec of gradients in reductions. Each gradient is encoded once, sent by an all-to-all, and decoded
            before it is added.
        block: the number of elements that share a scale, a multiple of 16.
        error_feedback: keep the part of each gradient that the codec loses, and add it to the next gradient. On each
            rank this takes the memory of a full gradient in float32.

    Raises:
        ValueError: a codec is unknown, ``block`` is not a positive multiple of 16, or ``error_feedback`` is set without
            a codec of gradients.
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
        """The codec of a parameter of this dtype, as text; "" if it is sent without a codec."""
        return self._codec(self.gather, dtype)

    def reduce_codec(self, dtype: torch.dtype) -> str:
        """The codec of a gradient that is reduced in this dtype, as text; "" if it is sent without a codec."""
        return self._codec(self.reduce, dtype)

    def _codec(self, name: str | torch.dtype | None, dtype: torch.dtype) -> str:
        if name is None or not dtype.is_floating_point:
            return ""
        return str(Codec.of(str(name), self.block))


EXACT = WirePolicy()


def check_wire_policy(policy: object, *, replicates: bool = False) -> WirePolicy:
    """Return the policy; None becomes ``EXACT``, which has no codecs.

    Args:
        policy: the user's value.
        replicates: whether the unit's parameters are replicated only.

    Raises:
        ValueError: ``policy`` is something else.
        NotImplementedError: it has a codec, and parameters are replicated only.
    """
    if policy is None:
        return EXACT
    if not isinstance(policy, WirePolicy):
        raise ValueError(f"fully_shard: wire_policy must be a WirePolicy, but got {type(policy).__name__}.")
    if replicates and policy.gather is not None:
        raise NotImplementedError(
            f"replicate: WirePolicy(gather={policy.gather!r}): every rank has whole parameters, so no gather can be "
            "encoded. Leave gather out."
        )
    if replicates and policy.reduce is not None:
        raise NotImplementedError(
            f"replicate: WirePolicy(reduce={policy.reduce!r}): a codec encodes gradients for the ranks that shard a "
            "parameter, and all-reduces over replicas are not encoded. Use fully_shard with "
            "reshard_after_forward=False, or send bfloat16: MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
        )
    return policy
