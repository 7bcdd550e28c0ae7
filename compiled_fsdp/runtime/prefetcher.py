"""Prefetched gathers across graph breaks: a graph's first gather is in flight before the graph is called.

If a forward has several graphs, each graph gets its first bucket here (``get_or_launch``). Once its last gather is
launched, the next graph's first gather is launched too. Eager code gets its buckets in the same way. All ranks ask for
the same sets in the same order (``exec_order.py``), so they decide alike whether to take a gather in flight or to
gather again:

- A run ends with a backward, or with a forward that another forward follows. No gather stays in flight after it, but
  for the one that ``TrainStep`` launches for its next step.
- A gather that was launched outside of the running backward is taken only if no rank wrote to its shards meanwhile.
  Each rank compares values, and one small reduction combines the answers, because an optimizer's step with ``foreach``
  or ``fused`` changes no version counter, and one rank alone may have written.
- An optimizer's step, a gradient hook, ``load_state_dict`` and ``reset_iter_state`` drop the gathers that they may have
  made stale.
"""

# Why: docs/design/graph-breaks.md, "The next gather is predicted from parameter sets"
# Why: docs/design/graph-breaks.md, "Prefetched gathers are checked by value"

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.base import watch
from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.spec import COALESCED, FLAT, BucketSpec
from compiled_fsdp.buckets.transport import TRANSPORTS
from compiled_fsdp.compat.autograd import at_end_of_backward, backward_id, outside_of_autocast, storage_id
from compiled_fsdp.ranks import failures
from compiled_fsdp.runtime.exec_order import ExecOrder, GatherKey
from compiled_fsdp.runtime.in_flight import launch_all_gather, spec_of
from compiled_fsdp.state import registry
from compiled_fsdp.state.parameter import ShardedParameter

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PrefetchedGather:
    """A gather that was launched ahead."""

    parameters: list[weakref.ref[ShardedParameter]]
    # The parameters' shards at the launch.
    shards: list[Tensor]
    # The values that were sent of each shard (``ShardedParameter.all_gather_input``), where nobody else writes.
    sent: list[Tensor]
    # The flat bucket, or a tensor for each parameter; to be waited for.
    buckets: list[Tensor]
    # The number of the backward that launched it; -1 outside of a backward.
    backward: int
    # Whether it was launched for the next training step, so that it outlives runs of other models and evaluations.
    for_next_step: bool = False

    def is_of(self, shards: Sequence[Tensor]) -> bool:
        """Whether these shards have the same memory as at the launch, whatever values they have now."""
        return len(shards) == len(self.shards) and all(
            mine.data_ptr() == given.data_ptr() for mine, given in zip(self.shards, shards, strict=True)
        )

    def ask_if_stale(self, shards: Sequence[Tensor]) -> Callable[[], bool]:
        """Start asking whether, on any rank, ``shards`` are other tensors than at the launch or have other values.

        This launches a collective. Returns a function that waits for it and gives the answer.
        """
        first = self.parameters[0]()
        assert first is not None
        same = torch.ones(1, dtype=torch.int32, device=self.buckets[0].device)
        if not self.is_of(shards):
            same.zero_()
        else:
            for shard, sent in zip(shards, self.sent, strict=True):
                same &= _same_bits(sent, collectives.to_gather(shard, first.dtype, sent.device, first.codec))
        with failures.naming_ended_ranks:
            work = dist.all_reduce(same, dist.ReduceOp.MIN, group=first.group.process_group, async_op=True)

        def answer() -> bool:
            watcher = watch.current()
            why = "whether shards were written to"
            with failures.naming_ended_ranks, contextlib.nullcontext() if watcher is None else watcher.blocking(why):
                work.wait()
                return not same.item()

        return answer

    def holds(self, params: set[int]) -> bool:
        """Whether the gather has one of the DTensors with these ids."""
        return any((parameter := ref()) is not None and id(parameter.param) in params for ref in self.parameters)


class AllGatherPrefetcher:
    """The gathers in flight between graphs.

    Attributes:
        counts: how often a bucket was "taken" from flight, "launched" ahead, launched "late" by the graph itself, or
            dropped: as "stale" (a shard was written to meanwhile) or "unused" (another set came next).
    """

    def __init__(self) -> None:
        self.order = ExecOrder()
        self.counts: Counter[str] = Counter()
        # The end of each outermost forward sets this, in traced code too. It is read and cleared here.
        self.forward_ended = False
        # How often it was cleared. If the number has changed since a forward began, that forward is over.
        self.forwards_over = 0
        self._in_flight: dict[GatherKey, PrefetchedGather] = {}
        self._ends_at_exit = False
        self._backward = -1

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def get_or_launch(
        self, parameters: Sequence[ShardedParameter], shards: Sequence[Tensor], spec: BucketSpec
    ) -> list[Tensor]:
        """Return the launched bucket of these padded ``shards``, to be waited for.

        The bucket may be in flight already if it is the first one of a graph, or one of eager code. If it is the
        graph's last gather, the next graph's first gather is launched, too (``BucketSpec.edge``).
        """
        assert spec.edge is not None
        first, last = spec.edge
        flight: PrefetchedGather | None = None
        is_stale: Callable[[], bool] = bool
        if first:
            ids = tuple(p.param_id for p in parameters)
            key = GatherKey(self._begin_phase(), ids, spec.coalesced, spec.transport)
            flight = self._in_flight.pop(key, None)
            if flight is None:
                self.drop()  # another set was expected
            else:
                is_stale = self._ask(flight, shards, spec.recheck)
            self.order.add(key)
        buckets = launch_all_gather(parameters, shards, spec) if flight is None else flight.buckets
        if last:
            self._launch_next()  # before the answer is waited for, because the link would be idle until then
        if flight is not None and is_stale():
            self._end(flight, "stale")
            buckets, flight = launch_all_gather(parameters, shards, spec), None
        if first:
            self.counts["late" if flight is None else "taken"] += 1
        return buckets

    def next_forward(self) -> list[ShardedParameter]:
        """The parameters that the next forward is expected to gather first; none if it is not known.

        As long as no two forwards have run, they are those that the last forward gathered first. Call it between a
        backward and the next forward. It ends the run.
        """
        self.close()
        key = self.order.next or self.order.latest_beginning
        found = [] if key is None or key.backward else [registry.find(param_id) for param_id in key.param_ids]
        return [parameter for parameter in found if parameter is not None]

    def launch_next_forward(self) -> None:
        """Launch the first gather of the next forward, if it is known. It ends the run."""
        self.close()
        if self.order.next is not None and not self.order.next.backward:
            if not self._ends_at_exit:
                self._ends_at_exit = True
                atexit.register(self._end_at_exit)
            self._launch_next(for_next_step=True)

    def wait(self) -> None:
        """Wait for the gathers in flight, and leave them to the next forward."""
        for flight in self._in_flight.values():
            for bucket in flight.buckets:
                failures.wait(bucket)

    def _end_at_exit(self) -> None:
        """Wait for the gather that the last step has launched, or torch would warn of it."""
        try:
            self.drop()
        except RuntimeError as error:  # another rank has failed, and says why
            log.debug("a gather was in flight at exit: %s", error)

    def drop(self, params: Iterable[Tensor] | None = None) -> None:
        """Drop the gathers in flight that have one of these DTensors (None: all), because it may have been written."""
        if not self._in_flight:
            return
        ids = None if params is None else {id(param) for param in params}
        for key, flight in list(self._in_flight.items()):
            if ids is None or flight.holds(ids):
                self._end(self._in_flight.pop(key), "unused" if ids is None else "stale")

    def close(self) -> None:
        """End the run: drop the gathers in flight that were launched in it, and expect no set next."""
        self.order.end_run()
        for key, flight in list(self._in_flight.items()):
            if not flight.for_next_step:
                self._end(self._in_flight.pop(key), "unused")
        self._backward = -1
        self.forwards_over += self.forward_ended
        self.forward_ended = False

    # ---- phases ------------------------------------------------------------------------------------------------------
    def _begin_phase(self) -> bool:
        """End the last run if a new one begins here. Returns whether a backward is running."""
        now = backward_id()
        if self._backward not in (-1, now):  # the last backward raised, or another backward runs inside of it
            self.close()
        if now == -1 and self.forward_ended:
            self.close()
        if now != -1 and self._backward == -1:
            self._backward = now
            at_end_of_backward(self._end_backward)
        return now != -1

    def _end_backward(self) -> None:
        if self._backward == backward_id():
            self.close()

    # ---- in flight ---------------------------------------------------------------------------------------------------
    def _ask(self, flight: PrefetchedGather, shards: Sequence[Tensor], recheck: bool) -> Callable[[], bool]:
        if recheck and (flight.backward == -1 or flight.backward != self._backward):
            return flight.ask_if_stale(shards)
        same = flight.is_of(shards)
        return lambda: not same

    @outside_of_autocast
    def _launch_next(self, *, for_next_step: bool = False) -> None:
        key = self.order.next
        if key is None or key in self._in_flight:
            return
        found = [parameter for param_id in key.param_ids if (parameter := registry.find(param_id)) is not None]
        if len(found) < len(key.param_ids) or any(parameter.shard.is_meta for parameter in found):
            return
        spec, group = spec_of(found, COALESCED if key.coalesced else FLAT, key.transport), found[0].group
        with torch.no_grad(), torch.inference_mode(False):  # autograd may save the full parameters
            given = [parameter.all_gather_input() for parameter in found]
            if spec.coalesced:
                by_gloo = group.backend_of(given[0].device.type) == "gloo"
                if by_gloo and not TRANSPORTS[key.transport].copy_engines:  # it would copy into the buckets itself
                    buckets = [tensor.new_empty(group.size * tensor.numel()) for tensor in given]
                    sent = [bucket.view(group.size, -1)[group.rank] for bucket in buckets]
                    for part, tensor in zip(sent, given, strict=True):
                        part.copy_(tensor)
                    buckets = launch_all_gather(found, sent, spec, out=buckets)
                else:  # tensors in a shard's own memory are copied
                    own = [storage_id(parameter.shard) for parameter in found]
                    sent = [t.clone() if storage_id(t) == memory else t for t, memory in zip(given, own, strict=True)]
                    buckets = launch_all_gather(found, sent, spec, prepared=True)
            else:
                packed = torch.cat(given)  # a copy, also if there is a single shard
                buckets = launch_all_gather(found, [packed], spec, prepared=True)
                sent = list(packed.split([tensor.numel() for tensor in given]))
        self._in_flight[key] = PrefetchedGather(
            [weakref.ref(p) for p in found], [p.shard for p in found], sent, buckets, self._backward, for_next_step
        )
        self.counts["launched"] += 1

    def _end(self, flight: PrefetchedGather, why: str) -> None:
        for bucket in flight.buckets:
            failures.wait(bucket)
        self.counts[why] += 1


def _same_bits(a: Tensor, b: Tensor) -> Tensor | bool:
    """Whether two tensors of one dtype and one dimension have the same bits: NaN equals NaN, and 0.0 differs from -0.0.

    On an accelerator the result is a tensor, for which the host does not wait.
    """
    width = a.element_size()
    if a.device.type == "cpu" and not any(n * width % 8 for t in (a, b) for n in (t.numel(), t.storage_offset())):
        width = 8  # quicker, because torch compares number by number on the CPU
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(width, torch.uint8)
    mine, theirs = a.view(integers), b.view(integers)
    return torch.equal(mine, theirs) if a.device.type == "cpu" else (mine == theirs).all()
