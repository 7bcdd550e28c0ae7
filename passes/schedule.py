"""Schedule: move launches and waits to the plan's places. Compute keeps its order.

A launch goes right before the segment that the plan names, after all launches that precede it in the plan. A gather's
wait goes before its first use, followed by everything that is unpacked from it. A reduction's wait goes where the plan
has it.

The second reduction of a bucket (over replicas, or over other nodes) is launched when the next bucket's first one is
launched, or at the bucket's wait. The first one has run in the meantime.

In compiled autograd's graphs a gradient is published right after its wait: ``accumulate_grad`` adds it to ``.grad``,
and hooks run. A hook may update the shard. So a gradient is not published before its parameter's last gather was waited
for, or, if the parameter is read without a gather, before its last use.
"""

# Why: docs/design/planner.md, "A plan is data with milestones"
# Why: docs/design/gradients.md, "The second reduction comes behind the next first one"
# Why: docs/design/graph-breaks.md, "Compiled autograd's graph is a region"

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.compat.graphs import reorder
from compiled_fsdp.passes.graph import (
    COMPLETION_ORDER,
    ENCODES,
    IS_SHARD,
    argument,
    calls,
    descendants,
    is_deferred_reduction,
    is_getitem,
    is_given,
    is_launch,
    ops,
    set_argument,
    spec_of,
    waits_of,
)
from compiled_fsdp.passes.plan.tasks import Launch
from compiled_fsdp.passes.views import memory_of

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext, Planned


def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Move every launch and wait to its place in the plan."""
    launches = [node for node in calls(gm, ops.launch.default) if "bucket" in node.meta]
    if ctx.planned is None or not launches:
        ctx.changed("schedule", "nothing to order")
        return gm
    buckets = [_PlacedBucket(node, ctx.planned.schedule[node.meta["bucket"]]) for node in launches]
    buckets.sort(key=lambda bucket: bucket.launch.meta["bucket"])
    reorder(gm.graph, list(_Emitter(gm, buckets, ctx.planned).emit_all()))
    gm.graph.lint()
    order = " ".join(f"{'U' if bucket.kind.supplies else 'P'}{spec_of(bucket.launch).reads[0]}" for bucket in buckets)
    ctx.changed("schedule", f"{len(buckets)} launches in order {order}")
    return gm


@dataclass(frozen=True, eq=False)
class _PlacedBucket:
    """A bucket's launch in the graph, and its place in the plan's schedule."""

    launch: Node
    place: Launch

    @property
    def kind(self) -> Kind:
        return self.place.kind

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the bucket in order: launch, elements, waits, unpacking."""
        waits = self.last_waits
        return [*self.first_half, *self.stand_ins, *waits, *(user for wait in waits for user in wait.users)]

    @property
    def stand_ins(self) -> list[Node]:
        """The zeros that replace the gradients of a deferred reduction, which this graph does not wait for."""
        zeros = _elements(self.launch) if is_deferred_reduction(self.launch) else []
        return [*zeros, *(user for zero in zeros for user in zero.users)]

    @property
    def first_half(self) -> list[Node]:
        """The launch and its elements; with second reductions also the waits, and their launches."""
        first = [self.launch, *_elements(self.launch)]
        if not self._second:
            return first
        return [*first, *waits_of(self.launch), *(n for each in self._second for n in (each, *_elements(each)))]

    @property
    def last_waits(self) -> list[Node]:
        """The waits after which the bucket is complete."""
        return [wait for second in self._second for wait in waits_of(second)] or waits_of(self.launch)

    @property
    def _second(self) -> list[Node]:
        """The launches of the second reductions."""
        return [user for wait in waits_of(self.launch) for user in wait.users if is_launch(user)]

    @property
    def unpacked_from(self) -> dict[Node, list[Node]]:
        """The nodes that are unpacked from each wait; for a launch without a wait, the zeros in place of gradients."""
        return {self.launch: self.stand_ins} | {wait: list(wait.users) for wait in self.last_waits}


def _elements(launch: Node) -> list[Node]:
    """The tensors that a launch returns."""
    return [user for user in launch.users if is_getitem(user)]


class _Emitter:
    """Lists the graph's nodes in their new order: it emits node after node."""

    def __init__(self, gm: GraphModule, buckets: list[_PlacedBucket], planned: Planned) -> None:
        self.gm, self.buckets, self.segment_of = gm, buckets, planned.segment_of
        self.end = planned.end
        self.number = {bucket: i for i, bucket in enumerate(buckets)}
        self.of_buckets = {node for bucket in buckets for node in bucket.nodes}
        self.by_launch = {bucket.launch: bucket for bucket in buckets}
        self.unpacked_with = {node: users for bucket in buckets for node, users in bucket.unpacked_from.items()}
        # All waits of a grouped call are at the first one's place, because what it sends is held until the last one.
        self.waits_with = {
            wait: waits for bucket in buckets if bucket.kind.supplies and len(waits := bucket.last_waits) > 1
            for wait in waits
        }  # fmt: skip
        self.launched_at: dict[int, list[_PlacedBucket]] = defaultdict(list)
        self.waited_at: dict[int, list[_PlacedBucket]] = defaultdict(list)
        for bucket in buckets:
            self.launched_at[bucket.place.at].append(bucket)
            if not bucket.kind.supplies:
                self.waited_at[bucket.place.wait].append(bucket)
        publishes = calls(gm, ops.accumulate_grad.default)
        self.publishes_of = _publishes_of(buckets) if publishes else {}
        self.gathers_of = {
            read: [bucket for bucket in buckets if bucket.kind.supplies and read in spec_of(bucket.launch).reads]
            for read in {argument(node, "read") for node in publishes}
        }
        self.readers_of = _readers_without_gathers(gm, publishes)
        self.to_publish: dict[Node, None] = {}
        self.order: dict[Node, None] = {}
        self.segment_now = -1

    def emit_all(self) -> dict[Node, None]:
        """Return all nodes in their new order."""
        for node in self.gm.graph.nodes:
            if is_given(node):
                self.order[node] = None
        for node in self.gm.graph.nodes:
            if ENCODES in node.meta:
                self.emit(node)
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._enter(max([*self.launched_at, *self.waited_at, self.segment_now]))
                for bucket in self.buckets:  # a gather needs a wait even if nothing uses it
                    self._wait(bucket)
            if node not in self.of_buckets:
                self._enter(self.segment_of.get(node, self.segment_now))
                self.emit(node)
        return self.order

    def _enter(self, segment: int) -> None:
        """Emit the launches and waits at the starts of all segments up to ``segment``, waits that free memory first."""
        while self.segment_now < segment:
            self.segment_now += 1
            due = self.waited_at.get(self.segment_now, [])
            for bucket in (b for b in due if b.launch in self.order):
                self._wait(bucket)
            for bucket in self.launched_at.get(self.segment_now, []):
                self.emit(bucket.launch)
            for bucket in due:
                self._wait(bucket)
            self._publish()

    def _publish(self) -> None:
        """Emit the ``accumulate_grad`` calls of gradients that are reduced and whose parameters have no later reads."""
        published = [node for node in self.to_publish if node not in self.order and self._complete(node)]
        published.sort(key=lambda node: node.meta.get(COMPLETION_ORDER, 0))  # as gradients became complete
        for node in published:
            self.emit(node)
        if published:
            set_argument(published[-1], "last", True)
        self.to_publish = {node: None for node in self.to_publish if node not in self.order}

    def _complete(self, publish: Node) -> bool:
        """Whether everything that an ``accumulate_grad`` call has to follow is emitted already, or runs at the end."""
        gathers = self.gathers_of[argument(publish, "read")]
        if any(node not in self.order for bucket in gathers for node in bucket.nodes):
            return False
        if any(node not in self.order for node in self.readers_of.get(publish, ())):
            return False
        stack = list(publish.all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in self.order:
                # another reduction that is added to this one, or compute that depends on no reduction
                if node in self.of_buckets or self.segment_of.get(node, self.end) < self.end:
                    return False
                stack += node.all_input_nodes
        return True

    def _wait(self, bucket: _PlacedBucket) -> None:
        for node in bucket.nodes:
            self.emit(node)
        for node in self.publishes_of.get(bucket, ()):
            self.to_publish[node] = None

    def emit(self, node: Node) -> None:
        """Put ``node`` here, after its inputs; put a launch after the launches that precede it in the plan."""
        if node in self.order:
            return
        bucket = self.by_launch.get(node)
        if bucket is not None:
            for earlier in self.buckets[: self.number[bucket]]:
                if earlier.launch not in self.order:
                    self.emit(earlier.launch)
                if not bucket.kind.supplies and not earlier.kind.supplies:
                    for half in earlier.first_half:
                        self.emit(half)
        for i in (*node.all_input_nodes, *self.readers_of.get(node, ())):
            self.emit(i)
        self.order[node] = None
        for unpacked in self.unpacked_with.get(node, ()):
            self.emit(unpacked)
        for wait in (waits := self.waits_with.get(node, [])):
            self.waits_with.pop(wait, None)
        for wait in waits:
            self.emit(wait)


def _publishes_of(buckets: list[_PlacedBucket]) -> dict[_PlacedBucket, list[Node]]:
    """The ``accumulate_grad`` calls that depend on each reduction."""
    reductions = [bucket for bucket in buckets if not bucket.kind.supplies]
    publish = ops.accumulate_grad.default
    return {bucket: [node for node in descendants(bucket.nodes) if node.target is publish] for bucket in reductions}


def _readers_without_gathers(gm: GraphModule, publishes: list[Node]) -> dict[Node, list[Node]]:
    """For each ``accumulate_grad`` call, the earlier nodes that compute with the memory of its parameter's shard."""
    found: dict[Node, list[Node]] = {}
    readers: dict[int, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes if publishes else ():
        if node in publishes:
            found[node] = list(readers[argument(node, "read")])
        elif node.op == "call_function":
            for used in node.all_input_nodes:
                for read in memory_of(used).meta.get(IS_SHARD, ()):
                    readers[read].append(node)
    return found
