"""Hardware as the planner knows it: rates of compute and copies, and the cost of a collective in a group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compiled_fsdp.base.plain_data import Unfit, from_data, from_json

_KINDS = ("gather", "reduce", "alltoall", "all_reduce")  # the kinds of collectives whose curves can be measured


@dataclass(frozen=True)
class Curve:
    """The cost of a collective: ``latency + (tensors - 1) * each + bytes / bytes_per_second`` seconds.

    Attributes:
        latency: seconds that every collective takes.
        bytes_per_second: the rate at which bytes of the full tensors are gathered or reduced.
        each: seconds for every further tensor of a coalesced collective.
        quick: latency and rate of another protocol, which counts where it is quicker: for small messages.
    """

    latency: float
    bytes_per_second: float
    each: float = 0.0
    quick: tuple[float, float] | None = None

    def seconds(self, size: float, tensors: int = 1) -> float:
        """Seconds of a collective of ``size`` bytes of full tensors."""
        usual = self.latency + size / self.bytes_per_second
        if self.quick is not None:
            usual = min(usual, self.quick[0] + size / self.quick[1])
        return usual + (tensors - 1) * self.each


@dataclass(frozen=True)
class Wires:
    """The wires of one kind, inside a node or between nodes.

    Attributes:
        hop: seconds that one step of a ring takes on them.
        bytes_per_second: the bus bandwidth of all rings of a group together. Between nodes it is that of a group with
            all ranks of its nodes.
    """

    hop: float
    bytes_per_second: float


@dataclass(frozen=True)
class LowLatency:
    """A protocol for small messages, which sends a flag with each word, so that it waits for no fence (NCCL's LL).

    Attributes:
        latency: seconds of a collective, in addition to its hops.
        inside, between: seconds of a hop inside a node and between nodes.
        share: the share of the wires' rate that it reaches.
        most: the most bytes per second: on one node, on two, on more.
    """

    latency: float
    inside: float
    between: float
    share: float
    most: tuple[float, float, float]


@dataclass(frozen=True)
class Contention:
    """How much compute and collectives slow each other down while both run.

    For example, with ``product=0.35`` a matrix product that takes 1 ms alone takes 1.35 ms beside a collective.

    Attributes:
        product: the share by which matrix products and convolutions take longer beside a collective.
        attention: the same for fused attention kernels.
        memory: the same for all other kernels, which are bound by memory.
        collective: the share by which a collective takes longer beside compute.
    """

    product: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    collective: float = 0.0

    def of(self, kind: str) -> float:
        """The share for a kind of kernel: "product", "attention", "attention_backward" or "memory"."""
        share: float = getattr(self, kind.removesuffix("_backward"))
        return share


@dataclass(frozen=True)
class CopyEngines:
    """The costs of collectives whose bytes the GPUs' copy engines move over the wires inside a node.

    The defaults are of 8 H100s. ``contention``: a product of 8192 x 8192 matrices and an all-gather of 64 MiB from each
    rank, which takes 1.3 ms, take 2.96 ms one after the other, 2.02 ms at once by NCCL, and 1.77 ms at once by copy
    engines (pytorch/pytorch#172714). So the product takes 38 % longer beside NCCL, and 10 % beside copy engines.
    Kernels that are bound by memory lose the bytes that copies read and write: 2 x 360 GB/s of 3.35 TB/s. ``host``:
    gathers of 1 and of 4 MiB a shard took 0.6 ms longer than NCCL's, whatever their size (pytorch/pytorch#182850),
    because the host launches a copy for each rank. ``latency`` is assumed: two barriers, each a hop to every rank.

    Attributes:
        latency: seconds of a collective.
        host: seconds that the host takes to launch a collective, in addition to ``Hardware.host_collective``.
        contention: how much compute and these collectives slow each other down.
    """

    latency: float = 20e-6
    host: float = 600e-6
    contention: Contention = Contention(0.1, 0.1, 0.2)


@dataclass(frozen=True)
class Hardware:
    """One rank's device and its wires. More than 20 attributes: one for each number that is measured or looked up.

    For example, to plan for H100s with a slower network between nodes::

        from compiled_fsdp import PROFILES, Wires
        hardware = dataclasses.replace(PROFILES["h100"], between=Wires(hop=10e-6, bytes_per_second=100e9))
        model = torch.compile(model, backend="compiled_fsdp", options={"hardware": hardware})

    Attributes:
        name: the name in logs. Like all other attributes it is part of the keys of compile caches.
        flops: floating-point operations per second that large matrix products reach, by dtype ("bfloat16"). "tf32" is
            the rate of float32 if tensor cores may round it.
        multiprocessors: the number of multiprocessors, over which the tiles of a matrix product are divided; 0 if the
            rate does not depend on the shape.
        attention: the shares of ``flops`` that fused attention kernels reach in forward and in backward, counting the
            operations inside the mask only.
        copy: bytes per second, read plus written, of kernels that are bound by memory.
        kernel: seconds that every kernel takes in addition to its work.
        host_kernel: seconds that the host takes to launch a kernel, if the device is not the host.
        host_collective: seconds that the host takes to launch a collective and to wait for it. If the host computes,
            compute stops for that time.
        host_computes: whether the device is the host, as on CPUs.
        memory: bytes of the device's memory.
        ranks_per_node: the number of ranks that the wires inside a node join.
        spans_hosts: whether such a node consists of several hosts, so that LOCAL_WORLD_SIZE is not its number of ranks.
        nics_per_node: the number of network cards of a node, one for each rank, so that a group with few ranks on each
            node reaches only a share of ``between``. 1 if all ranks of a node share one link.
        inside: wires inside a node.
        between: wires between nodes.
        latency: seconds of a collective, in addition to its hops.
        each: seconds for every further tensor of a coalesced collective.
        low_latency: a second protocol of collectives, for small messages; None if there is none.
        host_copy: bytes per second between the device and pinned host memory.
        contention: how much compute and collectives slow each other down.
        copy_engines: the costs of collectives by copy engines (the option ``transport="symm_mem"``).
        reduce_moves: the bytes that a reduce-scatter moves over the wires, as a multiple of an all-gather's bytes: 2
            with gloo, whose reduce-scatter is an all-reduce inside.
        gather: measured curves of all-gathers, by (number of ranks, number of nodes). A measured curve takes precedence
            over the estimate from the wires.
        reduce: measured curves of reduce-scatters, likewise.
        alltoall: measured curves of all-to-alls, which may replace reduce-scatters.
        all_reduce: measured curves of all-reduces, which average gradients over replicas.
        kernels: measured seconds of library kernels, by name and shapes (``cost.compute.kernel_key``). They take
            precedence over the estimate from the rates. ``compiled_fsdp.profile`` measures them.
        device: torch's name of the device that was measured; "" if it is not known.
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
    contention: Contention = Contention()
    copy_engines: CopyEngines = CopyEngines()
    low_latency: LowLatency | None = None
    multiprocessors: int = 0
    attention: tuple[float, float] = (0.5, 0.5)
    reduce_moves: float = 1.0
    spans_hosts: bool = False
    nics_per_node: int = 1
    host_copy: float = 25e9
    gather: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    reduce: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    alltoall: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    all_reduce: Mapping[tuple[int, int], Curve] = field(default_factory=dict)
    kernels: Mapping[str, float] = field(default_factory=dict)
    device: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.contention, Contention):
            raise TypeError(
                "Hardware: contention must be a Contention, for example Contention(product=0.35, memory=0.35), but is "
                f"{self.contention!r}."
            )

    def nodes_of(self, ranks: Sequence[int], local_world_size: int | None) -> int:
        """The number of nodes that a group is on.

        Args:
            ranks: the group's global ranks.
            local_world_size: the number of ranks on a host (LOCAL_WORLD_SIZE), if it is known.
        """
        size = self.ranks_per_node if self.spans_hosts or local_world_size is None else local_world_size
        return len({rank // size for rank in ranks})

    def curve(self, kind: str, world: int, nodes: int | None = None) -> Curve:
        """The cost of a "gather", "reduce", "alltoall" or "all_reduce" of ``world`` ranks.

        It is the measured curve, or else the estimate for a ring (the model of NCCL's src/graph/tuning.cc): latency
        ``latency + (hops inside) * inside.hop + (hops between) * between.hop``, and ``bytes * (world - 1) / world``
        over the narrower wires. An all-reduce is two rings, one after the other.

        Args:
            nodes: the number of nodes that the ranks are on. None: as few nodes as the ranks fit on.
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
        share = world / (world - 1) / moves
        quick = None
        if (low := self.low_latency) is not None:
            hop = low.inside * (1.8 if nodes > 1 else 1.0)  # as NCCL has it
            quick = (
                rings * (low.latency + inside * hop + between * low.between),
                min(low.share * slow, low.most[min(nodes, 3) - 1]) * share,
            )
        return Curve(latency, slow * share, self.each, quick)

    def curve_by_copies(self, kind: str, world: int) -> Curve:
        """The cost of a "gather" or "reduce" of ``world`` ranks by copy engines.

        This rank's part is copied twice on the device, into the memory of all ranks and out of it. A reduction then
        reads what all ranks have sent and writes the sum. The rest is ``(world - 1) / world`` of the bytes over the
        wires inside a node. Every further tensor is a collective of its own.
        """
        device = 4 / world if kind == "gather" else 4 / world + 1 + 1 / world
        seconds = (world - 1) / world / self.inside.bytes_per_second + device / self.copy
        return Curve(self.copy_engines.latency, 1 / seconds, self.copy_engines.latency)

    def by_copies(self) -> Hardware:
        """This hardware for a graph all of whose collectives are moved by copy engines."""
        host = self.host_collective + self.copy_engines.host
        return replace(self, contention=self.copy_engines.contention, host_collective=host)

    def link(self, world: int, nodes: int | None = None) -> str:
        """The wires that limit a group's collectives: "inside" nodes or "between" them; arguments as for ``curve``."""
        nodes = -(-world // self.ranks_per_node) if nodes is None else nodes
        inside, between = self._rates(world, nodes)
        return "between" if between is not None and (inside is None or between <= inside) else "inside"

    def sent(self, kind: str, world: int, nodes: int | None = None) -> tuple[float, float]:
        """Bytes that a rank sends inside its node, and to other nodes, for each byte of the full tensors.

        It is the mean over the ranks; arguments as for ``curve``. For example, in a ring of 16 ranks on two nodes, 14
        ranks send to a neighbour inside their node, and two to the other node. In an all-to-all each rank sends an
        equal part to every other rank.
        """
        nodes = -(-world // self.ranks_per_node) if nodes is None else nodes
        if kind == "alltoall":
            between = (nodes - 1) / nodes
            return (world - 1) / world - between, between
        moves = {"all_reduce": 2.0, "reduce": self.reduce_moves}.get(kind, 1.0) * (world - 1) / world
        between = moves * nodes / world if nodes > 1 else 0.0
        return moves - between, between

    def _rates(self, world: int, nodes: int) -> tuple[float | None, float | None]:
        """Bytes per second of a ring's wires inside nodes and between nodes; None if the ring has no such wires."""
        between = None
        if nodes > 1:
            nics = min(-(-world // nodes), self.nics_per_node)
            between = self.between.bytes_per_second * nics / self.nics_per_node
        return self.inside.bytes_per_second if world > nodes else None, between

    def matmul(self, dtype: str) -> float:
        """Floating-point operations per second in ``dtype``; for an unknown dtype the rate of float32."""
        return self.flops.get(dtype, self.flops["float32"])

    def share_of_multiprocessors(self, tiles: int, most_splits: int) -> float:
        """The share of the multiprocessors that work during a matrix product of so many output tiles.

        Tiles run in waves of one for each multiprocessor, and the last wave may be partly empty (NVIDIA, Matrix
        Multiplication Background User's Guide, "wave quantization"). If there are few tiles, each is split along the
        inner dimension.

        Args:
            tiles: the number of output tiles.
            most_splits: into how many parts a tile can be split.
        """
        if not self.multiprocessors or not tiles:
            return 1.0
        tiles *= max(1, min(self.multiprocessors // tiles, most_splits))
        waves = -(-tiles // self.multiprocessors)
        return tiles / (waves * self.multiprocessors)

    def to_json(self) -> str:
        """This hardware as JSON; ``from_json`` reads it back."""
        data = asdict(self)
        for kind in _KINDS:
            data[kind] = [[*group, curve] for group, curve in data[kind].items()]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read the hardware that ``to_json`` wrote.

        Raises:
            Unfit: the text is something else, or has impossible values such as negative times (a ``ValueError``).
        """
        data = from_json(dict[str, Any], text)
        for kind in _KINDS:
            curves = from_data(list[tuple[int, int, Curve]], data.pop(kind, []), kind)
            data[kind] = {(ranks, nodes): curve for ranks, nodes, curve in curves}
        known = {kind: data.pop(kind) for kind in _KINDS}
        found = replace(from_data(Hardware, data, "the hardware"), **known)
        curves = [curve for kind in _KINDS for curve in known[kind].values()]
        rates = [found.copy, found.host_copy, *found.flops.values()]
        rates += [of.bytes_per_second for of in (found.inside, found.between, *curves)] + [*found.attention]
        seconds = [found.latency, found.each, found.kernel, found.host_kernel, found.host_collective]
        seconds += [*asdict(found.contention).values(), *found.kernels.values()]
        copies = found.copy_engines
        seconds += [copies.latency, copies.host, *asdict(copies.contention).values()]
        seconds += [value for curve in curves for value in (curve.latency, curve.each)]
        if (low := found.low_latency) is not None:
            rates += [low.share, *low.most]
            seconds += [low.latency, low.inside, low.between]
        if not (all(rate > 0 for rate in rates) and all(value >= 0 for value in seconds)):  # NaN fails, too
            raise Unfit("the hardware has a rate that is not above zero, or a time below it")
        return found
