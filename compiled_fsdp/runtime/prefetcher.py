"""Across graph breaks: a graph's first gather is in flight before the graph is called.

A graph that is one of several of a forward takes its first bucket from here, and once its last gather is launched asks for
the next graph's first one. Eager code takes its buckets in the same way. Who takes, and what follows what, is the same on
all ranks (``sequence.py``), and so is each decision to take what is in flight or to gather again:

- A run ends with a backward, or with a forward that another forward follows; nothing stays in flight behind it.
- What was launched outside of the running backward is taken only if no rank wrote to its shards meanwhile. That is decided by
  comparing values, and by one small reduction of the answer: a step of an optimizer with ``foreach`` or ``fused`` changes no
  version counter, and one rank alone may have written.
- An optimizer's step, a gradient hook, ``load_state_dict`` and ``reset_iter_state`` drop what they may have made stale.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from compiled_fsdp.comm import collectives, traffic
from compiled_fsdp.compat import at_end_of_backward, backward_id
from compiled_fsdp.runtime.exec_order import Key
from compiled_fsdp.runtime.exec_order import Sequence as Runs
from compiled_fsdp.state import registry

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter


class Forwards:
    """Set by the end of each outermost forward, in traced code too; read and cleared here."""

    ended = False


FORWARDS = Forwards()


@dataclass(eq=False)
class _InFlight:
    """A gather that was launched ahead: of which shards, what was sent of them, and in which backward (-1: none)."""

    parameters: list[weakref.ref[ShardedParameter]]
    shards: list[Tensor]
    sent: Tensor
    bucket: Tensor
    backward: int

    def is_of(self, shards: Sequence[Tensor]) -> bool:
        return len(shards) == len(self.shards) and all(
            mine.data_ptr() == given.data_ptr() for mine, given in zip(self.shards, shards, strict=True)
        )

    def stale(self, shards: Sequence[Tensor]) -> bool:
        """Whether, on any rank, ``shards`` are others than were sent, or have other values: a collective call."""
        flag = torch.zeros(1, dtype=torch.int32, device=self.sent.device)
        if not self.is_of(shards):
            flag.fill_(1)
        else:
            self._compare(shards, flag)
        parameter = self.parameters[0]()
        assert parameter is not None
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=parameter.group.process_group)
        return bool(flag.item())

    def _compare(self, shards: Sequence[Tensor], flag: Tensor) -> None:
        offset = 0
        for shard in shards:
            sent = self.sent[offset : offset + shard.numel()]
            mine, theirs = _bits(sent), _bits(collectives.to_gather(shard, sent.dtype, sent.device))
            if flag.device.type == "cpu":
                if not torch.equal(mine, theirs):
                    flag.fill_(1)
            else:  # without waiting for the device
                flag |= (mine != theirs).any()
            offset += shard.numel()

    def holds(self, params: set[int]) -> bool:
        """Whether one of the DTensors with these ids is in it."""
        return any((parameter := ref()) is not None and id(parameter.param) in params for ref in self.parameters)


class Boundary:
    """The gathers in flight between graphs.

    ``counts`` says how often a bucket was "taken" from flight, "launched" ahead, launched "late" by the graph itself, or
    dropped: as "stale" (written to meanwhile) or "unused" (something else followed).
    """

    def __init__(self) -> None:
        self.runs = Runs()
        self.counts: Counter[str] = Counter()
        self._in_flight: dict[Key, _InFlight] = {}
        self._backward = -1
        self._watches_optimizers = False

    def take(
        self,
        shards: Sequence[Tensor],
        numbers: Sequence[Tensor],
        *,
        first: bool = True,
        last: bool = True,
        recheck: bool = True,
    ) -> Tensor:
        """The flat bucket of ``shards``, ``[world * their elements]``, launched and to be waited for.

        Args:
            shards: padded shards of one dtype. numbers: their parameters' slots.
            first: it begins a graph, or is eager code's: it may be in flight already. last: the graph launches no gather behind
                it, so the next graph's first one can go out.
            recheck: compare the shards with what was sent.
        """
        parameters = [registry.parameter_of(slot) for slot in numbers]
        bucket = None
        if first:
            key = Key(self._turn(), tuple(parameter.slot_number for parameter in parameters))
            bucket = self._taken(key, shards, recheck)
            self.runs.add(key)
        if bucket is None:
            self.counts["late"] += first
            of = parameters[0]
            _count(parameters)
            bucket = collectives.launch_gather(shards, of.world, of.group.name, of.dtype, of.compute_device)
        if last:
            self._launch_next()
        return bucket

    def drop(self, params: Iterable[Tensor] | None = None) -> None:
        """Do not take what is in flight of these DTensor parameters (None: of any): they may have been written."""
        if not self._in_flight:
            return
        ids = None if params is None else {id(param) for param in params}
        for key, flight in list(self._in_flight.items()):
            if ids is None or flight.holds(ids):
                self._drop(key, "unused" if ids is None else "stale")

    def close(self) -> None:
        """Nothing is in flight any more, and what comes next is not known."""
        if self.runs.history and self.runs.history[-1] is not None:
            self.runs.add(None)
        self.drop()
        self._backward = -1
        FORWARDS.ended = False

    # ---- runs --------------------------------------------------------------------------------------------------------
    def _turn(self) -> bool:
        """End the last run if a new one begins here; whether a backward is running."""
        now = backward_id()
        if self._backward not in (-1, now):  # it ended by an exception, or another one runs inside of it
            self.close()
        if now == -1 and FORWARDS.ended:
            self.close()
        if now != -1 and self._backward == -1:
            self._backward = now
            at_end_of_backward(self._end_backward)
        return now != -1

    def _end_backward(self) -> None:
        if self._backward == backward_id():
            self.close()

    # ---- in flight ---------------------------------------------------------------------------------------------------
    def _taken(self, key: Key, shards: Sequence[Tensor], recheck: bool) -> Tensor | None:
        flight = self._in_flight.get(key)
        if flight is None:
            self.drop()  # another one was expected
            return None
        asks = recheck and (flight.backward == -1 or flight.backward != self._backward)
        if flight.stale(shards) if asks else not flight.is_of(shards):
            self._drop(key, "stale")
            return None
        self.counts["taken"] += 1
        return self._in_flight.pop(key).bucket

    def _launch_next(self) -> None:
        key = self.runs.next
        if key is None or key in self._in_flight:
            return
        parameters = [registry.find(slot) for slot in key.slots]
        found = [parameter for parameter in parameters if parameter is not None]
        if len(found) < len(parameters) or any(parameter.shard.is_meta for parameter in found):
            return
        self._watch_optimizers()
        _count(found)
        with torch.no_grad(), torch.inference_mode(False):  # autograd may save them
            sent = torch.cat([parameter.sent() for parameter in found])  # a copy, of a single shard too
            bucket = collectives.launch_gather([sent], found[0].world, found[0].group.name)
        self._in_flight[key] = _InFlight(
            [weakref.ref(p) for p in found], [p.shard for p in found], sent, bucket, self._backward
        )
        self.counts["launched"] += 1

    def _drop(self, key: Key, why: str) -> None:
        flight = self._in_flight.pop(key)
        collectives.wait(flight.bucket)
        self.counts[why] += 1

    def _watch_optimizers(self) -> None:
        if not self._watches_optimizers:
            self._watches_optimizers = True
            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_flight:
            self.drop([param for group in optimizer.param_groups for param in group["params"]])


def _count(parameters: Sequence[ShardedParameter]) -> None:
    world = parameters[0].world
    size = world * sum(p.shard.numel() for p in parameters) * parameters[0].dtype.itemsize
    traffic.gathered(len(parameters), size, world)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN equals itself, and 0.0 is not -0.0."""
    size = tensor.element_size()
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8))


BOUNDARY = Boundary()
