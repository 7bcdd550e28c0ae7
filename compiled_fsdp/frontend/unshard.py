"""Full parameters outside of forwards: the gathers that ``FSDPModule.unshard()`` starts."""

# Why: docs/design/reads.md, "Kept full parameters are outputs of the graph"

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.fsdp import UnshardHandle

from compiled_fsdp.compat.dynamo import mark_static
from compiled_fsdp.runtime.in_flight import GatherInFlight
from compiled_fsdp.runtime.pieces import PiecesInFlight
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import ShardState, Unit


class Unsharding(UnshardHandle):
    """The gathers of one ``unshard()``, in flight until ``wait()``."""

    def __init__(self, unit: Unit) -> None:
        unit.raise_meta()
        self._unit: Unit | None = unit
        with torch.no_grad():
            self._buckets = [
                (members, PiecesInFlight(members) if members[0].wrapped else GatherInFlight(members))
                for members in unit.params_by_bucket().values()
            ]

    def wait(self) -> None:
        """Wait for the gathers. From then on reads give full parameters, unless the unit was resharded meanwhile."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        fulls: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for members, bucket in self._buckets:
                for parameter, full in zip(members, bucket.fulls(), strict=True):
                    mark_static(full)
                    fulls[parameter.index] = full
        self._buckets = []
        if unit.unsharding is self:
            unit.drop_retained()
            unit.unsharded_params = [fulls[index] for index in range(len(fulls))]
            unit.state = ShardState.UNSHARDED


def unshard(unit: Unit) -> UnshardHandle:
    """Start gathering all parameters of a unit, a bucket for each block.

    Returns the handle of these gathers, or of the earlier ones if the unit was not resharded since.
    """
    if unit.unsharding is None:
        unit.unsharding = Unsharding(unit)
        if unit.state is ShardState.SHARDED:
            unit.state = ShardState.UNSHARDING
    return unit.unsharding


def reshard_owned(module: torch.nn.Module, *_: object) -> None:
    """Undo ``unshard()`` for the units of the parameters that ``module`` itself owns.

    It is called before other code looks at these parameters or replaces them.
    """
    for unit in {unit_of(parameter) for parameter in cast(Any, module)._fsdp_reads.values()}:
        unit.put_back()
        unit.forget_reads()
        unit.reshard()
