"""What backward computes again instead of reading what forward saved: choices from much memory to little.

Each result of forward that backward needs is saved, or computed again from results that are. With a price for each
saved byte, in seconds, the cheapest choice is a minimum cut. (Torch's partitioner cuts for bytes alone: see
https://dev-discuss.pytorch.org/t/467. With costs on both sides it is Picard's closure problem, Management Science 22,
1976.) A higher price saves less.

Backward should not have to run all of forward to compute one layer again. So forward is divided into groups, whose last
results are saved: those through which all of forward passes, such as the residual stream between two layers. Larger
groups save less, as in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

# Why: docs/design/memory.md, "What is computed again under a memory budget"

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from compiled_fsdp.compat.graphs import tensors_in
from compiled_fsdp.passes.cost.compute import Cost, node_costs
from compiled_fsdp.passes.cost.fusion import computes, is_library, is_pointwise, users_of
from compiled_fsdp.passes.graph import computed_from_parameters, draws_numbers, is_getitem, ops
from compiled_fsdp.passes.memory import storage_bytes
from compiled_fsdp.passes.min_cut import Item, cheapest
from compiled_fsdp.passes.views import is_view, memory_of, written_by

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

PRICES = tuple(2.0**power for power in range(-2, 14))
"""Prices of a saved byte, as multiples of the time that it takes to read or write it."""
NEGLIGIBLE = 8
"""A result does not count as one that passes between groups if another one there is so many times as large."""
_AGAIN, _SAVED = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
_POLICIES = {CheckpointPolicy.PREFER_RECOMPUTE: _AGAIN, CheckpointPolicy.PREFER_SAVE: _SAVED}


@dataclass(frozen=True)
class _Level:
    """A choice for all of forward: which results of each segment backward computes again, and which are saved."""

    # A group has at most so many segments, and its last result is saved. ``price`` is that of a saved byte.
    most: int
    price: float
    policies: tuple[Mapping[str, CheckpointPolicy], ...]
    saved: tuple[int, ...]
    # The most bytes that one group computes again.
    held: int
    # Seconds that backward takes to compute results again.
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(self.saved) + self.held


class Choices:
    """What backward may compute again, in steps from nothing but what torch's partitioner chooses to nearly everything.

    Between two levels there is a step for each segment of forward: the first segments save less before the last ones
    do, because their results are computed again when other memory is free.

    Args:
        joint: the joint graph, with the marks of ``reshard``.
        ctx: the context of its passes.
    """

    def __init__(self, joint: GraphModule, ctx: PassContext) -> None:
        self._segments = _Segments(joint, ctx)
        self._count = len(self._segments.items)
        self._per_byte = 1 / ctx.hardware.copy
        self._levels = tuple(self._levels_at_all_prices(self._per_byte))

    def __len__(self) -> int:
        return 1 + self._count * len(self._levels)

    def ends_of_levels(self) -> range:
        """The steps at which all segments have the same level, from the least memory to the most."""
        return range(len(self) - 1, 0, -self._count)

    def end_of_level(self, step: int) -> int:
        """The next step at which all segments have the same level, or ``step`` itself."""
        return -(-step // self._count) * self._count

    def upto_price(self, price: float) -> int:
        """The last step before any that saves more than ``price`` times the time to read or write each saved byte."""
        levels = itertools.takewhile(lambda level: level.price <= price, self._levels)
        return self._count * sum(1 for _ in levels)

    def held(self, step: int) -> int:
        """An estimate of the most bytes that backward computes again at once."""
        return max((level.held for level in self._levels_of(step) if level is not None), default=0)

    def policies(self, step: int) -> dict[str, CheckpointPolicy]:
        """Whether nodes are computed again or saved, by their names. Step 0 decides nothing."""
        found: dict[str, CheckpointPolicy] = {}
        for segment, level in enumerate(self._levels_of(step)):
            found |= {} if level is None else level.policies[segment]
        return found

    def bytes(self, step: int, saved: Mapping[str, int]) -> int:
        """Estimate the bytes that forward leaves for backward with a step's choice.

        Args:
            saved: the bytes of what step 0 saves, by the node's name.
        """
        levels = self._levels_of(step)
        places = {name: self._segments.place_of(name) for name in saved}
        unmarked = sum(size for name, size in saved.items() if (at := places[name]) is None or levels[at] is None)
        marked = sum(level.saved[segment] for segment, level in enumerate(levels) if level is not None)
        return unmarked + marked + self.held(step)

    def least_seconds(self, room: float, *, copied: float, highest_price: float) -> float:
        """A bound: with any choice, forward and backward take at least so many seconds.

        Each saved byte gets a price, and the room is worth its bytes times this price. Whatever the price, the cheapest
        cut less the worth of the room is a bound, which is the Lagrangian relaxation of the choice. See Fisher, "The
        Lagrangian Relaxation Method for Solving Integer Programming Problems", Management Science 27, 1981.

        Args:
            room: the bytes for what forward saves.
            copied: the bytes that can be copied to host memory in each second, which need no room.
            highest_price: seconds in which a byte can be freed in another way.
        """
        prices = [price for price in (0.0, *(price * self._per_byte for price in PRICES)) if price <= highest_price]
        compute = self._segments.library_seconds
        return max(
            (compute + self._segments.least_cost(price) - price * room) / (1 + price * copied) for price in prices
        )

    def _levels_of(self, step: int) -> list[_Level | None]:
        """The level of each segment; None for one without marks."""
        if step == 0:
            return [None] * self._count
        above, upto = divmod(step - 1, self._count)
        rest = self._levels[above - 1] if above else None
        return [self._levels[above] if segment <= upto else rest for segment in range(self._count)]

    def _levels_at_all_prices(self, per_byte: float) -> Iterator[_Level]:
        """Levels that save less and less.

        At first a saved byte has the least price in the last segment, because backward begins there and soon frees it.
        """
        level = functools.partial(self._segments.level, per_byte=per_byte)
        sizes = [1, 2, 3, *itertools.takewhile(lambda most: most < self._count, (2**power for power in range(2, 64)))]
        tries = [(most, price) for most in sizes for price in (PRICES if most <= 3 else PRICES[-1:])]
        levels = list(_least_costs(level(most, price, PRICES[0]) for most, price in tries))
        yield from levels
        least = levels[-1]
        for last in _least_costs(level(least.most, least.price, price) for price in PRICES):
            if sum(last.saved) < sum(least.saved):
                least = last
                yield last


def _least_costs(levels: Iterator[_Level]) -> Iterator[_Level]:
    """The Pareto front: levels that no other beats in both bytes and seconds, from most bytes to least."""
    found: list[_Level] = []
    for level in sorted(levels, key=lambda level: (level.bytes, level.seconds)):
        if not found or level.seconds < found[-1].seconds:
            found.append(level)
    return reversed(found)


class _Segments:
    """Forward in pieces, each of which ends with a result through which all of forward passes.

    Attributes:
        items: the nodes of each segment that are not computed from parameters alone.
    """

    def __init__(self, joint: GraphModule, ctx: PassContext) -> None:
        self._costs, self._ctx = node_costs(joint, fused=ctx.fused), ctx
        forward = forward_of(joint)
        from_parameters = computed_from_parameters(joint, lambda node: node.target is ops.unshard.default)
        inside = [node for node in forward if node.op == "call_function" and node not in from_parameters]
        inside = [node for node in inside if not _is_size(node)]
        self._of_forward_alone = _of_forward_alone(joint, set(forward), from_parameters)
        ends = set(_waists(inside, from_parameters))
        self.items: list[list[Node]] = [[]]
        for node in inside:
            self.items[-1].append(node)
            if node in ends:
                self.items.append([])
        self._place = {node.name: place for place, nodes in enumerate(self.items) for node in nodes}
        self._ends = {node.name for node in ends}
        self._problem = functools.cache(self._problem_of)

    def place_of(self, name: str) -> int | None:
        """The segment of a node; None for nodes that no segment has, as full parameters."""
        return self._place.get(name)

    def level(self, most: int, price: float, price_at_end: float, *, per_byte: float) -> _Level:
        """The cheapest choice for groups of at most ``most`` segments, each of which ends with a saved result.

        Args:
            price: of a saved byte, as a multiple of ``per_byte``.
            price_at_end: the same for the last segment.
            per_byte: the seconds to read or write a byte.
        """
        policies: list[dict[str, CheckpointPolicy]] = [{} for _ in self.items]
        saved, held, seconds = [0] * len(self.items), 0, 0.0
        end = len(self.items) - 1
        starts = self._groups(most, price * per_byte)
        for first, after in zip(starts, [*starts[1:], None], strict=True):
            nodes, items = self._problem(first, after)
            again, kept = cheapest(items, (price if first < end else price_at_end) * per_byte, per_byte)
            for i in again | kept:
                policies[self._place[nodes[i].name]][nodes[i].name] = _AGAIN if i in again else _SAVED
            for i in kept:
                saved[self._place[nodes[i].name]] += items[i].bytes or 0
            held = max(held, sum(items[i].bytes or 0 for i in again if items[i].seconds))
            seconds += sum(items[i].seconds or 0.0 for i in again)
        return _Level(most, price, tuple(policies), tuple(saved), held, seconds)

    def _groups(self, most: int, price: float) -> list[int]:
        """The first segments of groups, the last of which is the last segment: those whose saved ends cost least.

        An end costs its bytes at ``price``. It saves the library kernel that makes it, which can be a layer's largest.
        """
        least, before = [0.0], [0]
        for place, nodes in enumerate(self.items[:-1], 1):
            cost = storage_bytes(nodes[-1]) * price - next(
                filter(None, map(self._library_seconds, reversed(nodes))), 0.0
            )
            before.append(min(range(max(0, place - most), place), key=least.__getitem__))
            least.append(least[before[-1]] + cost)
        groups = [len(self.items) - 1]
        while groups[-1]:
            groups.append(before[groups[-1]])
        return groups[::-1]

    def _problem_of(self, first: int, after: int | None) -> tuple[list[Node], tuple[Item, ...]]:
        """The nodes of the segments from ``first`` to ``after``, which is left out, and the cut's view of them."""
        nodes = list(itertools.chain(*self.items[first:after]))
        number = {node: i for i, node in enumerate(nodes)}
        last = nodes[-1] if nodes[-1].name in self._ends else None

        def is_inside(user: Node) -> bool:
            return user in number or user.op == "output" or _is_size(user)

        return nodes, tuple(
            Item(
                tuple(number[source] for source in node.all_input_nodes if source in number),
                _bytes_to_save(node),
                None if node is last else self._seconds(node),
                node is last or not all(map(is_inside, node.users)),
                _policy(node) is _AGAIN,
            )
            for node in nodes
        )

    @functools.cached_property
    def library_seconds(self) -> float:
        """Seconds of the library kernels of the joint graph, each of which runs once at least."""
        return float(sum(self._library_seconds(node) for node in self._costs))

    def least_cost(self, price: float) -> float:
        """The least that all segments cost at ``price`` seconds for each saved byte, whatever else is saved."""
        total = 0.0
        for items in self._relaxed:
            again, saved = cheapest(items, price, 0.0)
            total += sum(items[i].seconds or 0.0 for i in again) + price * sum(items[i].bytes or 0 for i in saved)
        return total

    @functools.cached_property
    def _relaxed(self) -> list[tuple[Item, ...]]:
        """Each segment as if it had the results of others for nothing, and only library kernels took time."""
        return [self._relax(nodes) for nodes in self.items]

    def _relax(self, nodes: Sequence[Node]) -> tuple[Item, ...]:
        number = {node: i for i, node in enumerate(nodes)}

        def is_forward(user: Node) -> bool:
            return user.name in self._place or user.op == "output" or _is_size(user)

        return tuple(
            Item(
                tuple(number[source] for source in node.all_input_nodes if source in number),
                _bytes_to_save(node, views=True),
                # what the user's checkpoint computes again may not even be needed
                None if _must_be_saved(node) else self._library_seconds(node) * (_policy(node) is not _AGAIN),
                not all(map(is_forward, node.users)),
                _policy(node) is _AGAIN,
            )
            for node in nodes
        )

    def _library_seconds(self, node: Node) -> float:
        return float(self._costs[node].seconds(self._ctx.hardware)) if is_library(node) else 0.0

    def _seconds(self, node: Node) -> float | None:
        """Seconds to compute a node again; None if it must not be."""
        if _must_be_saved(node):
            return None
        if is_view(node) or is_getitem(node):
            return 0.0
        alone = [source for source in node.all_input_nodes if source in self._of_forward_alone]
        if sum(map(storage_bytes, alone)) > storage_bytes(node):
            return None  # backward would gather the parameter for this alone, or hold it until then
        cost, hardware = self._costs[node], self._ctx.hardware
        if is_library(node) or not is_pointwise(node):
            return float(cost.seconds(hardware))
        # A kernel computes it where it is read. Only for a library kernel it is written once more.
        is_written = any(computes(user) and is_library(user) for user in users_of(node))
        return float(Cost(0, storage_bytes(node) if is_written else 0, 0, cost.dtype).seconds(hardware))


def forward_of(joint: GraphModule) -> list[Node]:
    """The nodes that the outputs of forward depend on: those outputs of a joint graph that need no tangent."""
    after: set[Node] = set()
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in after for source in node.all_input_nodes):
            after.add(node)
    output = next(iter(reversed(joint.graph.nodes)))
    needed: set[Node] = set()
    stack = [node for node in output.all_input_nodes if node not in after]
    while stack:
        if (node := stack.pop()) not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    # also elements of tuples that only backward reads, as the sums of attention
    return [n for n in joint.graph.nodes if n in needed or (is_getitem(n) and n.all_input_nodes[0] in needed)]


def _of_forward_alone(joint: GraphModule, forward: set[Node], from_parameters: Mapping[Node, None]) -> set[Node]:
    """The parameters that backward does not read, and all results that depend on these parameters alone."""
    read = [node for node in joint.graph.nodes if node not in forward and node not in from_parameters]
    needed = set(read)
    while read:
        sources = [source for source in read.pop().all_input_nodes if source in from_parameters]
        read += [source for source in sources if source not in needed]
        needed.update(sources)
    alone: set[Node] = set()
    for node in from_parameters:
        if node not in needed and (node.target is ops.unshard.default or not alone.isdisjoint(node.all_input_nodes)):
            alone.add(node)
    return alone


def _waists(nodes: Sequence[Node], from_parameters: Container[Node]) -> Iterator[Node]:
    """The results through which all of forward passes: at some place nothing else that depends on parameters is alive.

    If no library kernel runs between several, only the last one counts, because backward needs the next kernel's input.
    """
    place = {node: i for i, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    depends: set[Node] = set()
    for node in nodes:
        sources = [memory_of(source) for source in node.all_input_nodes]
        if any(source in depends or source in from_parameters for source in sources):
            depends.add(node)
        last |= dict.fromkeys(sources, place[node])
    alive: dict[Node, int] = {}
    waist: Node | None = None
    for i, node in enumerate(nodes):
        if waist is not None and is_library(node):
            yield waist
            waist = None
        alive = {other: size for other, size in alive.items() if last[other] > i}
        if node in depends and memory_of(node) is node and last.get(node, 0) > i:
            alive[node] = storage_bytes(node)
        largest = [other for other, size in alive.items() if size * NEGLIGIBLE > max(alive.values())]
        if largest == [node]:
            waist = node


def _must_be_saved(node: Node) -> bool:
    if _policy(node) is _SAVED or draws_numbers(node) or written_by(node):
        return True
    if is_view(node) or is_getitem(node):
        return False
    return not computes(node) or getattr(node.target, "namespace", "") not in ("aten", "prims")


def _bytes_to_save(node: Node, *, views: bool = False) -> int | None:
    """The bytes that saving a result takes; None for tuples, and for views, which are not saved unless ``views``."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or (is_view(node) and not views):
        return None
    is_output = any(user.op == "output" for user in node.users)  # the caller holds it anyway
    return 0 if is_output else storage_bytes(node)


def _policy(node: Node) -> CheckpointPolicy | None:
    policy: CheckpointPolicy | None = node.meta.get("recompute")
    return policy if policy is None else _POLICIES.get(policy, policy)


def _is_size(node: Node) -> bool:
    """Whether a node is a number, which takes no memory: partitioners save it, or compute it again, as they like."""
    return "val" in node.meta and not tensors_in(node.meta["val"])
