"""The library kernels of a profile: matrix products, attention, convolutions, each with its time.

The profiler records an op with the shapes of its arguments, whether Python or Inductor's code calls it. On the CPU the
op's time is the kernel's; on a GPU the time is that of the kernels which the op launched. Fused kernels, which Inductor
generates, are no ops and have no shapes.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_fsdp.compat.profiling import ProfiledEvent
from compiled_fsdp.passes.cost.compute import kernel_key
from compiled_fsdp.passes.cost.fusion import is_library_op
from compiled_fsdp.tools.profile_times import Interval

_ATEN = "aten::"


@dataclass(frozen=True)
class KernelCall:
    """One call of a library kernel. Times are nanoseconds on the profiler's clock.

    Attributes:
        key: its name and shapes (``kernel_key``).
        called: when the host called it.
        ran: when it ran: on a GPU, from the start of its first kernel to the end of its last one.
        seconds_ns: for how long it ran, without gaps between its kernels.
    """

    key: str
    called: int
    ran: Interval
    seconds_ns: int


def kernel_calls(events: Sequence[ProfiledEvent]) -> list[KernelCall]:
    """Find the calls of library kernels; an op that another one calls belongs to that one.

    Args:
        events: the profiler's events, by start.
    """
    outermost: dict[int, list[ProfiledEvent]] = defaultdict(list)
    for event in events:
        its = outermost[event.thread]
        is_library = event.on_host and not event.is_range and _is_library(event.name)
        if is_library and not (its and event.start_ns < its[-1].end_ns):
            its.append(event)
    starts = {thread: [event.start_ns for event in its] for thread, its in outermost.items()}
    ops = {event.id: event for event in events if event.on_host and not event.is_range and event.id}
    on_device: dict[tuple[int, int], list[ProfiledEvent]] = defaultdict(list)
    launches = False
    for kernel in events:
        if kernel.on_host or kernel.is_range or not kernel.launched_by:
            continue
        launches = True
        op = ops.get(kernel.launched_by)
        if op is None or not starts.get(op.thread):
            continue
        place = bisect_right(starts[op.thread], op.start_ns) - 1
        if place >= 0 and op.start_ns < outermost[op.thread][place].end_ns:
            on_device[op.thread, place].append(kernel)
    found = []
    for thread, its in outermost.items():
        for place, event in enumerate(its):
            ran = on_device.get((thread, place), []) if launches else [event]
            if ran:
                when = min(k.start_ns for k in ran), max(k.end_ns for k in ran)
                seconds = sum(k.end_ns - k.start_ns for k in ran)
                key = kernel_key(event.name.removeprefix(_ATEN), event.shapes, event.dtype)
                found.append(KernelCall(key, event.start_ns, when, seconds))
    return found


@functools.cache
def _is_library(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix(_ATEN), None) if name.startswith(_ATEN) else None
    return packet is not None and is_library_op(packet)
