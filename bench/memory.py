"""Peak memory on the CPU, counted the same way for every system: from the allocator's own events.

``torch.profiler`` reports every allocation and release of torch's CPU allocator, in all threads that run a step and in
generated code. A system's peak is the sum of

    the bytes that its setup allocated and kept: parameters, and buckets that live in C++,
    the bytes that its first step left behind, by a walk over Python's tensors that counts each storage once, and
    the running maximum of the events of one later step, gradients and activations included.

Not counted: the input, gloo's own buffers, and code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def traced(run: Callable[[], Result]) -> tuple[Result, int, int]:
    """Call ``run``; return its result, the bytes that it allocated and kept, and the most bytes that it held."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        result = run()
        gc.collect()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, now, peak


def alive() -> int:
    """Return the bytes of all CPU tensors that Python's garbage collector knows."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu" and not thing.is_sparse:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
