"""The outline of a model, which has to be the same on all ranks, and the difference between two outlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.sharding.wire_policy import EXACT
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import Unit


def outline_of(units: Iterable[Unit], group: ShardGroup) -> tuple[str, ...]:
    """The outline of ``units``: sorted lines "name: description", one for each parameter over the ranks of ``group``.

    It is the same on all ranks, and for any order of modules. Parameters over other ranks are left out, because they
    may differ: for example, experts on meshes of their own.
    """
    return tuple(
        sorted(
            f"{parameter.name}: {_line(parameter, unit)}"
            for unit in units
            for parameter in unit.parameters
            if parameter.group.ranks == group.ranks
        )
    )


def _line(parameter: ShardedParameter, unit: Unit) -> str:
    dtype, size = str(parameter.dtype).removeprefix("torch."), list(parameter.layout.largest)
    mode = "trained" if parameter.param.requires_grad else "frozen"
    reshard = unit.post_forward_world_size or unit.policy.reshard_after_forward
    sent = f", {parameter.wire}" if parameter.wire != EXACT else ""
    kind = "replicated" if parameter.layout.group.process_group is None else f"dim {parameter.dim}"
    return f"{dtype}{size} {kind}, {mode}, reshard_after_forward={reshard}{sent}"


def difference_of_outlines(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first parameter that differs between this rank's outline and another rank's: its line in each of them."""
    ours, others = [dict(line.split(": ", 1) for line in model) for model in (mine, theirs)]
    name = next((name for name in ours | others if ours.get(name) != others.get(name)), None)
    if name is None:  # two models with equal names
        extra = list((Counter(mine) - Counter(theirs)).elements()), list((Counter(theirs) - Counter(mine)).elements())
        return tuple(lines[0] if lines else "nothing more" for lines in extra)  # type: ignore[return-value]
    mine_is, theirs_is = (f"{name}: {of[name]}" if name in of else f"no {name}" for of in (ours, others))
    return mine_is, theirs_is
