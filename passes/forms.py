"""Calls as plain data: two calls with equal forms compute the same if their tensors are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

_ALIGNED = 16  # bytes: Inductor's code depends on whether a tensor begins at a multiple of them


def form_of_arguments(node: Node, of_node: Callable[[Node], Any]) -> tuple[Any, ...]:
    """Return the target and the arguments of a call as plain data, in which ``of_node`` describes the nodes."""

    def describe(argument: Any) -> Any:
        if isinstance(argument, Node):
            return of_node(argument)
        if isinstance(argument, (tuple, list)):
            return (type(argument).__name__, *map(describe, argument))
        if isinstance(argument, slice):
            return ("slice", *map(describe, (argument.start, argument.stop, argument.step)))
        # 1, 1.0 and True are different constants, and so are 0.0 and -0.0
        return (type(argument).__name__, repr(argument) if isinstance(argument, float) else argument)

    named = tuple((name, describe(argument)) for name, argument in sorted(node.kwargs.items()))
    return node.target, tuple(map(describe, node.args)), named


def form_of_value(value: Any) -> Any:
    """Return the sizes, strides and types of the tensors in a value; other values as they are."""
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of_value, value))
    if isinstance(value, Tensor):
        is_aligned = value.storage_offset() * value.element_size() % _ALIGNED == 0
        return tuple(value.shape), value.stride(), value.dtype, value.device, is_aligned
    return value


@dataclass(frozen=True)
class Run:
    """Calls of a graph, one after another, which one function can replace.

    Attributes:
        calls: in the order of the graph.
        given: the nodes from outside, in the order of their first use.
        results: the nodes that are used outside.
        form: what makes two runs equal.
    """

    calls: tuple[Node, ...]
    given: tuple[Node, ...]
    results: tuple[Node, ...]
    form: tuple[Any, ...]
