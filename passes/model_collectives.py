"""The model's own collectives, and copies to host memory and back: their costs, and the links that they use.

Tensor, expert and context parallelism leave functional collectives in a graph, each as a launch and a wait. They keep
their places. The planner counts their time, and the time that they and compiled_fsdp's collectives wait for each other
on a shared link. Copies have a link of their own in each direction.
"""

# Why: docs/design/planner.md, "The model's own collectives"

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.fx import Node

from compiled_fsdp.buckets.transport import KINDS
from compiled_fsdp.compat.graphs import tensors_in
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.graph import argument, kind_of, value
from compiled_fsdp.passes.memory import tensor_bytes
from compiled_fsdp.passes.plan.channels import COPIES, CommChannel, ModelCollective

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext

_AT_ONCE = 1e18  # bytes per second
COPY_LATENCY = 10e-6
"""Seconds that every copy to host memory or back takes in addition to its bytes: assumed."""


class ModelLinks:
    """The links of the model's own collectives, and the streams that they share with compiled_fsdp's collectives."""

    def __init__(self, ctx: PassContext, links: Mapping[int, str]) -> None:
        """Take the link ("inside" or "between" nodes) of each stream of compiled_fsdp's collectives."""
        self._ctx, self._links = ctx, links
        # One more stream for each link, on which the model's own collectives run one after the other.
        above = max([*links, *ctx.groups, 0]) + 1
        self._own = {"inside": above, "between": above + 1, "offload": above + 2, "reload": above + 3}
        self.channels: dict[str, CommChannel] = {}

    def priced(self, node: Node, at: int, wait: int) -> ModelCollective:
        """Describe the collective that ``node`` launches.

        Args:
            node: the launch.
            at: the segment that begins with it.
            wait: the segment that begins with its wait.
        """
        ctx, kind = self._ctx, kind_of(node)
        assert kind is not None
        if kind in COPIES:
            return self._copy(node, kind, at, wait)
        place = ctx.place_of_group(value(argument(node, "group_name")))
        link = ctx.hardware.link(place.world, place.nodes)
        key = f"{kind} of {place.world} ranks {link}, {place.nodes or 'fewest'} nodes"
        stream = self._own[link]
        if key not in self.channels:
            curve = ctx.hardware.curve(KINDS[kind].curve, place.world, place.nodes)
            self.channels[key] = CommChannel(
                curve.latency, curve.each, curve.bytes_per_second, place.world, stream, quick=curve.quick
            )
        sent = tensors_in([value(source) for source in node.all_input_nodes])
        received = tensors_in(node.meta.get("val"))
        sizes = [sum(map(tensor_bytes, tensors)) for tensors in (sent, received)]
        ours = [number for number, of in self._links.items() if of == link or place.name in _names(ctx, number)]
        return ModelCollective(kind, key, max(sizes), max(len(received), 1), at, wait, tuple(sorted({*ours, stream})))

    def _copy(self, node: Node, kind: str, at: int, wait: int) -> ModelCollective:
        """Describe a copy to host memory or back. If the host computes, ``seconds_of_compute`` has its time."""
        hardware, stream = self._ctx.hardware, self._own[kind]
        rate = _AT_ONCE if hardware.host_computes else hardware.host_copy
        latency = 0.0 if hardware.host_computes else COPY_LATENCY
        self.channels[kind] = CommChannel(latency, 0.0, rate, 1, stream, by_copies=True)
        size = sum(map(tensor_bytes, tensors_in(node.meta["val"])))
        return ModelCollective(kind, kind, size, 1, at, wait, (stream,))


def seconds_of_compute(node: Node, hardware: Hardware) -> float:
    """Seconds that compute takes for a copy to host memory or back: to read and write it, if the host computes."""
    if not hardware.host_computes or kind_of(node) not in COPIES:
        return 0.0
    return hardware.kernel + 2 * sum(map(tensor_bytes, tensors_in(node.meta["val"]))) / hardware.copy


def _names(ctx: PassContext, stream: int) -> tuple[str, ...]:
    """The name of the process group whose collectives run on a stream of compiled_fsdp's."""
    groups = ctx.groups[stream if stream >= 0 else -1 - stream]
    return (groups.all_gather,) if stream >= 0 else (groups.reduce_scatter,)
