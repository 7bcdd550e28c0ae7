"""The collectives of a training step alone, back to back on the network, with no compute between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_fsdp.reporting.report import GraphReport


class Waitable(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Message:
    """One float32 collective: ``kind`` is "gather" or "reduce", ``numel`` counts all ranks' elements together. With
    ``exchange`` a reduction is an all-to-all, and each rank averages the parts that it receives."""

    kind: str
    numel: int
    exchange: bool = False


@dataclass(frozen=True)
class Phase:
    """Collectives in launch order, with at most ``in_flight`` of them in flight at once."""

    messages: tuple[Message, ...]
    in_flight: int = 1


class Exchange:
    """An all-to-all, and the average of its parts."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.target = target
        self.work = dist.all_to_all_single(target, source, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.target.view(dist.get_world_size(), -1).mean(0)


def run_bucket(message: Message, full: Tensor, shard: Tensor, other: Tensor) -> Waitable:
    """Start one collective. Buffers: ``full`` and ``other`` [numel], ``shard`` [numel / world]."""
    if message.kind == "gather":
        return dist.all_gather_into_tensor(full, shard, async_op=True)
    if message.exchange:
        return Exchange(full, other)
    return dist.reduce_scatter_tensor(shard, full, async_op=True)


class Wire:
    """A step that has only collectives. Buffers are allocated once, so that their pages exist in timed steps."""

    def __init__(self, forward: Phase, backward: Phase) -> None:
        self.phases = forward, backward
        self.buffers: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        for phase in self.phases:
            for i, message in enumerate(phase.messages):
                self._buffers(message, i % phase.in_flight)

    def step(self) -> tuple[float, float]:
        """Run the step; return the seconds of the forward's and of the backward's collectives."""
        seconds = []
        for phase in self.phases:
            start = time.perf_counter()
            self._run(phase)
            seconds.append(time.perf_counter() - start)
        return seconds[0], seconds[1]

    def finish(self) -> None:
        """Do nothing: there is nothing to clean up between steps."""

    def _run(self, phase: Phase) -> None:
        pending: deque[Waitable] = deque()
        for i, message in enumerate(phase.messages):
            if len(pending) == phase.in_flight:
                pending.popleft().wait()
            pending.append(run_bucket(message, *self._buffers(message, i % phase.in_flight)))
        while pending:
            pending.popleft().wait()

    def _buffers(self, message: Message, place: int) -> tuple[Tensor, Tensor, Tensor]:
        key = message.numel, place
        if key not in self.buffers:
            shard = torch.zeros(message.numel // dist.get_world_size())
            self.buffers[key] = torch.zeros(message.numel), shard, torch.zeros(message.numel if message.exchange else 0)
        elif message.exchange and not self.buffers[key][2].numel():
            full, shard, _ = self.buffers[key]
            self.buffers[key] = full, shard, torch.zeros(message.numel)
        return self.buffers[key]


def of_reports(reports: Sequence[GraphReport]) -> Wire:
    """Make a ``Wire`` of the collectives that compiled_fsdp's graphs launch, by their reports.

    Raises:
        RuntimeError: there is not exactly one forward and one backward graph, for example because of a graph break or
            a recompilation. Then no report has the whole step.
    """
    phases = {}
    for phase in ("forward", "backward"):
        found = [report for report in reports if report.phase == phase]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} {phase} graphs, but expected one")
        phases[phase] = Phase(tuple(_messages(found[0])), max(1, _in_flight(found[0])))
    return Wire(phases["forward"], phases["backward"])


def _messages(report: GraphReport) -> list[Message]:
    assert report.plan is not None
    sizes = {read.index: read.bytes for read in report.reads}
    messages = []
    for bucket in report.plan.launches:
        exchange = bucket.transport == "all_to_all"
        alone = bucket.form == "coalesced"  # gloo has no grouped call, so each tensor has its own collective
        parts = [sizes[index] for index in bucket.reads] if alone else [bucket.bytes]
        messages += [Message(bucket.kind, part // 4, exchange) for part in parts]
    return messages


def _in_flight(report: GraphReport) -> int:
    """Return the highest number of collectives in flight at once."""
    return max(
        (sum(a.launch <= b.launch < a.wait for a in report.collectives) for b in report.collectives),
        default=1,
    )


def of_fsdp2(units: Sequence[tuple[nn.Module, bool]]) -> Wire:
    """Make a ``Wire`` of FSDP2's collectives, one after another.

    Each unit gathers in forward and reduces in backward. If its flag says that it is resharded after forward, it
    gathers again in backward.
    """
    sizes = [(sum(p.numel() for p in unit.parameters()), resharded) for unit, resharded in units]
    backward: list[Message] = []
    for size, resharded in reversed(sizes):
        backward += [Message("gather", size)] if resharded else []
        backward.append(Message("reduce", size))
    return Wire(Phase(tuple(Message("gather", size) for size, _ in sizes)), Phase(tuple(backward)))
