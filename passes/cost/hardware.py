"""Hardware as the planner knows it: rates of compute and copies, and what a collective costs in a group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compiled_fsdp.base.plain_data import Unfit, from_data, from_json

_KINDS = ("gather", "reduce", "alltoall", "all_reduce")  # of collectives, whose curves can be measured


@dataclass(frozen=True)
class Curve:
    """What a collective costs: ``latency + (tensors - 1) * each + bytes / bytes_per_second`` seconds.

    Attributes:
        latency: seconds of every collective.
        bytes_per_second: of the full tensors' bytes.
        each: seconds of every further tensor in a coalesced collective.
    """

    latency: float
    bytes_per_second: float
    each: float = 0.0


@dataclass(frozen=True)
class Wires:
    """The wires of one kind, inside a node or between nodes.

    Attributes:
        hop: seconds that a ring's step takes on them.
        bytes_per_second: a ring's bus bandwidth over them, of all rings of the group together; between nodes that of a
            group with all ranks of its nodes.
    """

    hop: float
    bytes_per_second: float


@dataclass(frozen=True)
class Hardware:
    """One rank's device and its wires. More than 20 attributes: one for each number that is measured or looked up.

    Attributes:
        name: for logs; part of compile caches' keys, with all the rest.
        flops: matrix multiplication, floating-point operations per second that it reaches, by dtype ("bfloat16");
            "tf32" is float32 where tensor cores may round it.
        copy: bytes per second, read and written, of kernels bound by memory.
        kernel: seconds that every kernel takes beside its work.
        host_kernel: seconds that the host takes to launch a kernel, where the device is not the host.
        host_collective: seconds that the host takes to launch a collective and to wait for it; where it computes,
            compute stands still for it.
        host_computes: whether the device is the host.
        memory: bytes of the device.
        ranks_per_node: how many ranks the wires inside of a node join.
        spans_hosts: whether those are of several hosts, so that LOCAL_WORLD_SIZE does not say how many they are.
        nics_per_node: between how many ranks of a node the bandwidth between nodes is divided: 1 where all share one
            link, else each has its own.
        inside: wires inside a node.
        between: wires between nodes.
        latency: seconds of a collective, beside its hops.
        each: seconds of every further tensor in a coalesced one.
        host_copy: bytes per second between the device and pinned host memory.
        contention: how much longer compute takes while a collective runs.
        reduce_moves: what a reduce-scatter moves over the wires, of an all-gather's bytes: 2 with gloo, which
            all-reduces.
        gather: measured curves of all-gathers by the number of ranks and of nodes that they are on; they go before what
            the wires would give.
        reduce: measured curves of reduce-scatters, likewise.
        alltoall: measured curves of the all-to-all that may stand in for a reduction.
        all_reduce: measured curves of all-reduces, which follow over replicas.
    """

    name: str
    flops: Mapping[str, float]
    copy: float
    kernel: float
    memory: int
    ranks_per_node: int
    inside: Wires
    between: Wires
    latency: float
    each: float
    host_kernel: float = 0.0
    host_collective: float = 0.0
    host_computes: bool = False
    contention: float = 0.0
    reduce_moves: float = 1.0
    spans_hosts: bool = False
    nics_per_node: int = 1
    host_copy: float = 25e9
    gather: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    reduce: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    alltoall: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    all_reduce: Mapping[tuple[int, int], Curve] = field(default_factory=dict)

    def nodes_of(self, ranks: Sequence[int], local_world_size: int | None) -> int:
        """How many nodes a group is on, of its global ranks and how many ranks a host has, if that is known."""
        size = self.ranks_per_node if self.spans_hosts or local_world_size is None else local_world_size
        return len({rank // size for rank in ranks})

    def curve(self, kind: str, world: int, nodes: int | None = None) -> Curve:
        """What a "gather", "reduce", "alltoall" or "all_reduce" of ``world`` ranks costs.

        As measured, or a ring: ``latency + (hops inside) * inside.hop + (hops between) * between.hop`` and
        ``bytes * (world - 1) / world`` over the narrower wires (the model of NCCL's src/graph/tuning.cc). An all-reduce
        is two of them.

        Args:
            nodes: that the ranks are on; None for as few as possible.
        """
        fewest = -(-world // self.ranks_per_node)
        nodes = fewest if nodes is None else nodes
        measured: Mapping[tuple[int, int], Curve] = getattr(self, kind)
        if (world, nodes) in measured:
            return measured[world, nodes]
        if world == 1:
            return Curve(self.latency, self.copy, self.each)
        between = nodes - 1
        inside = world - 1 - between
        slow = min(rate for rate in self._rates(world, nodes) if rate is not None)
        rings = 2 if kind == "all_reduce" else 1
        latency = rings * (self.latency + inside * self.inside.hop + between * self.between.hop)
        moves = self.reduce_moves if kind == "reduce" else rings
        return Curve(latency, slow * world / (world - 1) / moves, self.each)

    def link(self, world: int, nodes: int | None = None) -> str:
        """Which wires limit a group's collectives, "inside" of nodes or "between" them; arguments as of ``curve``."""
        nodes = -(-world // self.ranks_per_node) if nodes is None else nodes
        inside, between = self._rates(world, nodes)
        return "between" if between is not None and (inside is None or between <= inside) else "inside"

    def _rates(self, world: int, nodes: int) -> tuple[float | None, float | None]:
        """Bytes per second of a ring's wires inside of nodes and between them; None where it has no such wires."""
        between = None
        if nodes > 1:
            nics = min(-(-world // nodes), self.nics_per_node)
            between = self.between.bytes_per_second * nics / self.nics_per_node
        return self.inside.bytes_per_second if world > nodes else None, between

    def matmul(self, dtype: str) -> float:
        """Floating-point operations per second in ``dtype``; of a dtype that is not known, float32's."""
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> str:
        """This hardware as JSON; ``from_json`` reads it back."""
        data = asdict(self)
        for kind in _KINDS:
            data[kind] = [[*group, curve] for group, curve in data[kind].items()]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """The hardware that ``to_json`` wrote.

        Raises:
            Unfit: it is something else, or no hardware can be so (a ``ValueError``).
        """
        data = from_json(dict[str, Any], text)
        for kind in _KINDS:
            curves = from_data(list[tuple[int, int, Curve]], data.pop(kind, []), kind)
            data[kind] = {(ranks, nodes): curve for ranks, nodes, curve in curves}
        known = {kind: data.pop(kind) for kind in _KINDS}
        found = replace(from_data(Hardware, data, "the hardware"), **known)
        curves = [curve for kind in _KINDS for curve in known[kind].values()]
        rates = [found.copy, found.host_copy, *found.flops.values()]
        rates += [of.bytes_per_second for of in (found.inside, found.between, *curves)]
        seconds = [found.latency, found.each, found.kernel, found.host_kernel, found.host_collective, found.contention]
        seconds += [value for curve in curves for value in (curve.latency, curve.each)]
        if not (all(rate > 0 for rate in rates) and all(value >= 0 for value in seconds)):  # nor of what is no number
            raise Unfit("the hardware has a rate that is not above zero, or a time below it")
        return found
