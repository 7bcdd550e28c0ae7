"""Seconds of device work, by CUDA events around graphs of many calls; without a GPU by the host's clock."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
COLD_BYTES = 512 * 2**20
"""The bytes that calls touch before they use the same buffers again: more than any L2 cache."""


@dataclass(frozen=True)
class Timing:
    """The time of a call, in seconds.

    Attributes:
        seconds: the median time on the device.
        quartiles: the quartiles of the times on the device.
        host: the median time that the host takes to launch the call.
    """

    seconds: float
    quartiles: tuple[float, float]
    host: float


def rotations(nbytes: int, device: torch.device) -> int:
    """Return how many sets of buffers a call of ``nbytes`` bytes needs so that it never finds its own in the cache."""
    return max(2, min(256, COLD_BYTES // max(nbytes, 1))) if device.type == "cuda" else 1


def timings(systems: dict[str, Sequence[Call]], device: torch.device, repeats: int) -> dict[str, Timing]:
    """Time several systems. In each repeat every system's calls run once in a row, and the systems' order is shuffled.

    On a GPU the calls of a system are captured into one CUDA graph, so that kernels are timed and not their launches.
    Every call has its own memory for its results.
    """
    runs = {name: _captured(calls) if device.type == "cuda" else _all(calls) for name, calls in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    shuffle = random.Random(0)
    for repeat in range(repeats + 2):
        for name in shuffle.sample(list(runs), len(runs)):
            taken = once(runs[name], device) / len(systems[name])
            if repeat >= 2:
                seconds[name].append(taken)
    return {
        name: Timing(statistics.median(taken), _quartiles(taken), host_seconds(systems[name], device))
        for name, taken in seconds.items()
    }


def host_seconds(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median seconds that the host takes to launch one call."""
    taken = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for call in calls:
            call()
        taken.append((time.perf_counter() - start) / len(calls))
    synchronize(device)
    return statistics.median(taken)


def once(run: Call, device: torch.device) -> float:
    """Return the device's seconds for one run."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _captured(calls: Sequence[Call]) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels compile, and fill their tables, on the stream that captures
        for _ in range(3):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results = []  # kept, so that no two calls write to the same memory
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            results.append(call())

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def _all(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    run()
    return run


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
