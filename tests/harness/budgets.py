"""Memory budgets that a model's plans have to do something for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from compiled_fsdp import explain
from compiled_fsdp.passes.plan.search import OverBudget

GIVEN: list[int] = []
"""The budgets that `tight_for` gave in this process."""


def tight_for(model: nn.Module, *args: Any, **options: Any) -> Callable[[float], int]:
    """Return a function that gives a budget in bytes, the same on all ranks.

    0 is the least that a plan for `model(*args)` needs with these options, 1 what the plan without a budget needs. If
    nothing is planned, for example because of a graph break, there is room for everything.
    """
    peak = _peak(model, args, options)
    try:
        _peak(model, args, options | {"memory_budget": 120})
        least = peak
    except OverBudget as error:
        least = error.least
    limits = torch.tensor([least, peak])
    dist.broadcast(limits, 0)
    least, peak = limits.tolist()

    def tight(share: float) -> int:
        GIVEN.append(round(least + share * (peak - least)))
        return GIVEN[-1]

    return tight


def _peak(model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    graphs = explain(model, args, options=options).graphs
    return max((graph.numbers.peak for graph in graphs if graph.numbers), default=10**9)
