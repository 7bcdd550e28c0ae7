"""Segments: the compute of a graph between two milestones, the places where collectives start or are waited for."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from compiled_fsdp.passes.graph import (
    ENCODES,
    argument,
    is_getitem,
    is_given,
    is_wait,
    kind_of,
    ops,
    waited_for,
)
from compiled_fsdp.passes.views import is_view


class Segments:
    """The graph, cut into segments at reads, reductions, and the launches and waits of the model's own collectives."""

    def __init__(self, gm: GraphModule) -> None:
        # The segment of each node that computes.
        self.of: dict[Node, int] = {}
        # The segment that begins at each read or reduction.
        self.start: dict[Node, int] = {}
        # The milestones at which each segment starts.
        self.milestones: list[list[str]] = [["start"]]
        # For the model's own collectives, in order: the segments that begin with the launch and with the first wait.
        self._launched: dict[Node, int] = {}
        self._waited: dict[Node, int] = {}
        # State of the segment that is being filled: whether it is empty, whether it computes, and whether it begins
        # with waits for the model's own collectives.
        empty, computes, waits = True, False, False
        late = _late(gm)
        for node in gm.graph.nodes:
            if is_given(node) or node.op == "output":
                continue
            if ENCODES in node.meta:  # runs before all launches, even if a hook has collectives of its own
                self.of[node] = 0
                continue
            if node.target in (ops.unshard.default, ops.reduce_grad.default):
                if not empty:
                    self.milestones.append([])
                    empty, computes, waits = True, False, False
                kind = "use" if node.target is ops.unshard.default else "grad"
                self.milestones[-1].append(f"{kind} {argument(node, 'read')}")
                self.start[node] = len(self.milestones) - 1
            elif node not in late:
                launched = kind_of(node) is not None
                waited = [launch for launch in waited_for(node) if launch not in self._waited]
                if (launched and (computes or waits)) or (waited and computes):
                    self.milestones.append([])
                    computes = waits = False
                self._note(node, waited, len(self.milestones) - 1)
                self.of[node] = len(self.milestones) - 1
                empty, waits = False, waits or bool(waited)
                computes = computes or not (launched or is_wait(node) or is_getitem(node) or is_view(node))
        if not empty:
            self.milestones.append([])
        self.milestones[-1].append("end")
        # The last, empty segment.
        self.end = len(self.milestones) - 1
        for node in (node for node in gm.graph.nodes if node in late):
            self.of[node] = self.end
            self._note(node, waited_for(node), self.end)

    def at(self, node: Node) -> int:
        """The segment in which a node reads its arguments; the last one for the graph's output."""
        return self.end if node.op == "output" else self.of.get(node, self.start.get(node, 0))

    def _note(self, node: Node, waited: Iterable[Node], segment: int) -> None:
        """Note that a segment begins with ``node``, if it launches or waits for the model's own collectives."""
        kind = kind_of(node)
        if kind is not None:
            self.milestones[segment].append(f"{kind} {len(self._launched)}")
            self._launched[node] = segment
        for launch in waited:
            self.milestones[segment].append(f"wait {list(self._launched).index(launch)}")
            self._waited.setdefault(launch, segment)

    def model_places(self) -> dict[Node, tuple[int, int]]:
        """The segments of launch and wait of each of the model's own collectives; without a wait it is the end."""
        return {node: (at, self._waited.get(node, self.end)) for node, at in self._launched.items()}


def _late(gm: GraphModule) -> set[Node]:
    """The nodes that depend on reductions and come after all other compute: they run at the end of the graph."""
    late: set[Node] = set()
    depends: set[Node] = set()
    for node in gm.graph.nodes:
        if node.target is ops.reduce_grad.default or any(i in depends for i in node.all_input_nodes):
            depends.add(node)
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node.target is ops.reduce_grad.default:
            continue
        if node.op != "call_function" or node not in depends:
            break
        late.add(node)
    return late
