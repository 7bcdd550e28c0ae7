"""The microbatches of a planned step: the kinds of them, and the model's flags in each.

With replicas or a working copy, gradients are reduced between the nodes in the last microbatch only, as in
``docs/accumulation.md``. Without, all microbatches are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.state.unit import ShardState
from compiled_fsdp.tools.cli.setting import NotPlannable, Setting


@dataclass(frozen=True)
class Microbatches:
    """Microbatches of a step that have the same graphs.

    Attributes:
        name: "first", "middle" or "last"; "" if all of the step's are alike.
        count: how many there are.
    """

    name: str
    count: int

    def prepare(self, model: Any, setting: Setting) -> None:
        """Put a sharded model into the state that it has before the forward of such a microbatch."""
        if not self.name:
            return
        is_last, ranks = self.name == "last", setting.working_copy
        if ranks:
            model.set_reshard_after_backward(True if is_last else ranks)
        model.set_requires_all_reduce(is_last)
        if ranks and self.name != "first":
            _hold_working_copy(model, ranks)


def microbatches_of(setting: Setting) -> list[Microbatches]:
    """Return the kinds of microbatches of a step, in order.

    Raises:
        NotPlannable: a working copy without several microbatches, with replicas, or on all ranks or one.
    """
    count, shards = setting.microbatches, setting.world_size // setting.replicate // setting.tensor_parallel
    if setting.working_copy and (count == 1 or setting.replicate > 1):
        raise NotPlannable(
            "--working-copy is a copy that stays from microbatch to microbatch: give --microbatches 2 or more, and "
            "leave --replicate out."
        )
    if setting.working_copy and not 1 < setting.working_copy < shards:
        raise NotPlannable(
            f"--working-copy must be more than 1 and less than the {shards} ranks that hold shards, but is "
            f"{setting.working_copy}."
        )
    if count == 1 or not (setting.working_copy or setting.replicate > 1):
        return [Microbatches("", count)]
    if not setting.working_copy:
        return [Microbatches("first", count - 1), Microbatches("last", 1)]
    middle = [Microbatches("middle", count - 2)] if count > 2 else []
    return [Microbatches("first", 1), *middle, Microbatches("last", 1)]


def _hold_working_copy(model: Any, ranks: int) -> None:
    """Give each unit a working copy on the meta device, as the first forward of a step leaves one."""
    for unit in units_of(model):
        for parameter in unit.parameters:
            part = ReadSpec.parse(parameter.part_text(ranks))
            parameter.retained = torch.empty(part.shard_size, dtype=part.dtype, device="meta")
        unit.state = ShardState.RETAINED
