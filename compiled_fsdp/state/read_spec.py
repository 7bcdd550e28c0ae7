"""What a graph is told of a parameter that it reads: plain data, the same on every rank and for equal layers."""

# Why: docs/design.md, note N4; docs/design.md, note N51

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class ReadSpec:
    """How a read gathers a parameter; it comes into graphs as text, so that Dynamo has one value to guard."""

    # The full parameter's shape (on this rank, under tensor parallelism).
    size: tuple[int, ...]
    # The number of shards.
    world: int
    # What a graph says instead of the process groups' names.
    group_id: int
    # The sharded dimension.
    dim: int
    # How many parameters the repeated block has that this parameter belongs to.
    block_size: int
    # Its place among them.
    position: int
    # In which it is gathered.
    dtype: torch.dtype
    # What becomes of its gradient (``buckets/reduction.py``).
    spec_text: str
    # Where it is gathered, if the shard is elsewhere (offloaded).
    device: torch.device | None
    # How it is encoded while it is sent (``buckets/codec.py``); "": not.
    codec: str = ""

    @functools.cache  # noqa: B019  a few: equal layers have equal ones
    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        fields = asdict(self) | {"dtype": dtype, "device": self.device and str(self.device)}
        if not self.codec:
            del fields["codec"]
        return json.dumps(fields)

    @staticmethod
    @functools.cache
    def parse(text: str) -> ReadSpec:
        """What ``str`` wrote."""
        fields = json.loads(text)
        size, dtype, device = tuple(fields["size"]), getattr(torch, fields["dtype"]), fields["device"]
        return ReadSpec(**fields | {"size": size, "dtype": dtype, "device": device and torch.device(device)})
