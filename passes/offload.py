"""Offload: copy what forward saves to host memory, and copy it back in backward.

    forward    returns offload(saved)   ->  a tensor in host memory
    backward   reload(saved, device)    ->  in the place of the saved tensor

The tensors that forward saves first are offloaded first: backward needs them last, so that compute hides the copies.
"""

# Why: docs/design/memory.md, "Activations in host memory"

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.host_copies import OFFLOAD, RELOAD
from compiled_fsdp.compat.graphs import hint, strides_of
from compiled_fsdp.passes.cost.hardware import Hardware
from compiled_fsdp.passes.edit import add_call
from compiled_fsdp.passes.graph import computed_from_parameters, ops, value
from compiled_fsdp.passes.memory import storage_bytes, tensor_bytes
from compiled_fsdp.passes.model_collectives import COPY_LATENCY
from compiled_fsdp.passes.start_copies import Clock, seconds_on_link
from compiled_fsdp.passes.views import memory_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


@dataclass(frozen=True)
class Candidate:
    """A saved tensor that may be offloaded."""

    # The name of its nodes in forward and in backward.
    name: str
    bytes: int


class Candidates:
    """What forward saves and may be offloaded.

    Attributes:
        all: the tensors in the order in which forward makes them.
        hidden: how many of them, from the first one on, can be copied to host memory and back while compute runs.
    """

    def __init__(self, forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
        """Find what may be offloaded to ``ctx.host_memory`` bytes of host memory."""
        ahead, behind = Clock(forward, ctx), Clock(backward, ctx)
        taken = {node.name: node for node in behind.nodes if node.op == "placeholder" and node.users}
        made = sorted(_may_be_offloaded(forward, taken), key=ahead.place.__getitem__)
        made = [node for node in made if _pays(node, ctx.hardware)]
        total = itertools.accumulate(tensor_bytes(value(node)) for node in made)
        made = made[: sum(size <= ctx.host_memory for size in total)]
        self.all = tuple(Candidate(node.name, tensor_bytes(value(node))) for node in made)
        self.hidden = _hidden(made, taken, ahead, behind, ctx.hardware)


def _hidden(
    made: Sequence[Node], taken: Mapping[str, Node], ahead: Clock, behind: Clock, hardware: Hardware
) -> int:  # fmt: skip
    if hardware.host_computes:
        return 0
    end, count = 0.0, 0
    back: list[tuple[float, float]] = []  # when a tensor is needed, and how long it takes to copy it
    for node in made:
        seconds = seconds_on_link(node, hardware)
        end = max(end, ahead.complete(node)) + seconds
        back.append((behind.start[behind.first_use(taken[node.name])], seconds))
        begin = float("inf")
        for needed, length in sorted(back, reverse=True):
            begin = min(begin, needed) - length
        if end > ahead.start[-1] or begin < 0:
            break
        count += 1
    return count


def _may_be_offloaded(forward: GraphModule, taken: Mapping[str, Node]) -> Iterator[Node]:
    """The saved tensors whose memory nothing else holds: neither the caller nor another saved tensor."""
    results = forward.graph.output_node().all_input_nodes
    from_parameters = computed_from_parameters(forward, lambda node: node.target is ops.unshard.default)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    times = Counter(node for node in returned if isinstance(node, Node))
    sharing = Counter(map(memory_of, results))
    for node in results:
        tensor, owner = value(node), memory_of(node)
        if node.name not in taken or not isinstance(tensor, torch.Tensor) or times[node] > 1:
            continue
        if owner.op != "call_function" or owner in from_parameters or sharing[owner] > 1:
            continue
        if _is_dense(tensor) and tensor_bytes(tensor) == storage_bytes(owner):
            yield node


def _pays(node: Node, hardware: Hardware) -> bool:
    """Whether a tensor is so large that copying takes longer than to start the copy."""
    return hardware.host_computes or storage_bytes(memory_of(node)) > COPY_LATENCY * hardware.host_copy


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a place in memory for each element, and no others."""
    expected = 1
    for stride, size in sorted(
        (hint(stride), hint(size)) for stride, size in zip(strides_of(tensor), tensor.shape, strict=True)
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def offload(forward: GraphModule, backward: GraphModule, names: Iterable[str]) -> None:
    """Change both graphs so that these saved tensors wait for backward in host memory."""
    output = forward.graph.output_node()
    given = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    saved = {node.name: node for node in output.all_input_nodes}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for name in names:
        node, place = saved[name], given[name]
        device = value(node).device
        with forward.graph.inserting_after(node):
            host = add_call(forward.graph, OFFLOAD, node)
        output.replace_input_with(node, host)
        place.meta["val"] = value(host)
        with backward.graph.inserting_before(first):
            back = add_call(backward.graph, RELOAD, place, device)
        place.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
