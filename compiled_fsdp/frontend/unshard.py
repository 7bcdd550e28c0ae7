"""Parameters that are full outside of forwards: what ``FSDPModule.unshard()`` starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import UnshardHandle

from compiled_fsdp.comm import collectives, traffic
from compiled_fsdp.compat import mark_static

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter
    from compiled_fsdp.state.unit import Unit


class Unsharding(UnshardHandle):
    """The gathers of one ``unshard()``, in flight until ``wait()``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit
        with torch.no_grad():
            self._buckets = [(members, self._launch(members)) for members in unit.gathered_together().values()]

    def _launch(self, members: list[ShardedParameter]) -> torch.Tensor | None:
        first = members[0]
        if first.world == 1:
            return None
        size = first.world * sum(p.shard.numel() for p in members) * first.dtype.itemsize
        traffic.gathered(len(members), size, first.world)
        return collectives.launch_gather(
            [p.shard for p in members], first.world, first.group.name, first.dtype, first.compute_device
        )

    def wait(self) -> None:
        """Wait for the gathers; from then on the unit's parameters read in full. Nothing if it was resharded meanwhile."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        full: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for members, launched in self._buckets:
                bucket = None if launched is None else collectives.wait(launched)
                offset = 0
                for p in members:
                    tensor = (
                        p.sent().view(p.size)
                        if bucket is None
                        else collectives.unpack_gather(bucket, offset, p.size, p.world, p.dim)
                    )
                    mark_static(tensor)
                    full[p.number] = tensor
                    offset += p.shard.numel()
        self._buckets = []
        if unit.pending is self:
            unit.kept = [full[number] for number in range(len(full))]
