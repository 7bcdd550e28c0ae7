"""The size from which compute hides communication, solved from the symbolic costs of a graph with dynamic shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from compiled_fsdp.compat.graphs import UNKNOWN_SIZE, hints_of
from compiled_fsdp.passes.cost.compute import node_costs, total_seconds
from compiled_fsdp.passes.cost.hardware import Hardware

LARGEST_SIZE_TRIED = 2**40
"""If compute hides communication at no size up to this one, we assume that no size is enough."""


@dataclass(frozen=True)
class Balance:
    """The size from which compute takes as long as the collectives.

    For example, a batch of 12 or more: symbol "s0", traced with hint 4, size 12.
    """

    # The name of the symbolic size that is solved for.
    symbol: str
    # Its value when the graph was traced.
    hint: int
    # The smallest value at which compute takes at least as long; None if no size is enough.
    size: int | None

    def __str__(self) -> str:
        found = "at no size" if self.size is None else f"from {self.symbol} = {self.size:,} on"
        return f"compute can hide communication {found} (planned at {self.symbol} = {self.hint:,})"


def balance(gm: GraphModule, hardware: Hardware, communication: float, *, fused: bool) -> Balance | None:
    """Find the size at which compute takes ``communication`` seconds; None for a graph without symbolic sizes.

    If there are several symbols, the one that compute depends on most is solved for, and the others are at their hints.
    """
    hints: dict[Any, int] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            hints |= hints_of(node.meta.get("val"))
    if not hints:
        return None
    total = total_seconds(node_costs(gm, fused=fused, symbolic=True), hardware)
    used = [symbol for symbol in hints if symbol in getattr(total, "free_symbols", ())]
    if not used:
        return None

    known: dict[Any, int] = (
        dict.fromkeys(total.free_symbols, UNKNOWN_SIZE) | hints
    )  # sizes that depend on data have no hint

    def at(symbol: Any) -> Callable[[int], float]:
        rest = total.subs({other: hint for other, hint in known.items() if other != symbol})
        return lambda size: float(rest.subs(symbol, size))  # sympy's lambdify does not know torch's own functions

    symbol = max(used, key=lambda s: at(s)(2 * hints[s]) - at(s)(hints[s]))
    seconds = at(symbol)
    if seconds(LARGEST_SIZE_TRIED) < communication:
        return Balance(str(symbol), hints[symbol], None)
    low, high = 0, 1
    while seconds(high) < communication:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) < communication else (low, middle)
    return Balance(str(symbol), hints[symbol], high)
