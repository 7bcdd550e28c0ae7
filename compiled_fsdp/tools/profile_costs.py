"""The hardware that a plan was made for, with the costs that a profile has measured in place of the estimates.

- The time of each library kernel, by its name and shapes, and the rates of matrix products and attention, for shapes
  that have no time of their own.
- The rate of all other kernels: the time of a graph without its library kernels, beside the planned one.
- The curve of the collectives of each kind and group.

A kernel or a collective may have run beside others, and then it took longer. The planner adds that by itself, so the
shares of ``Hardware.contention`` are taken off first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from statistics import median
from typing import Any

from compiled_fsdp.buckets.spec import COALESCED, Kind
from compiled_fsdp.buckets.transport import TRANSPORTS
from compiled_fsdp.compiler.hardware import local_nodes
from compiled_fsdp.passes.cost import Curve, Hardware
from compiled_fsdp.passes.cost.compute import LibraryKernel
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.profile_kernels import KernelCall
from compiled_fsdp.tools.profile_ranks import Together
from compiled_fsdp.tools.profile_steps import BucketRun, Step, buckets_of, by_group, measured_step
from compiled_fsdp.tools.profile_times import Interval, TimedCollective, union

_ADDED = "measured in a profile"
_APART = 2.0
"""Sizes of collectives that differ by this factor tell a latency from a rate."""


def measured_costs(
    hardware: Hardware,
    steps: Sequence[Step],
    calls: Sequence[KernelCall],
    seconds: Mapping[TimedCollective, float],
    device: str,
) -> Hardware:
    """Return ``hardware``, which the graphs of these steps were planned for, with measured costs.

    Args:
        steps: the steps that count.
        calls: all library kernels of the profile.
        seconds: for which each collective had the wires (``shared_wires``).
        device: torch's name of the device.
    """
    inside = [_calls_of(step, calls) for step in steps]
    times = _alone(steps, inside, hardware)
    planned = {kernel.key: kernel for step in steps for report in _reports(step) for kernel in report.kernels}
    found = _with_rates(hardware, times, planned)
    slower = [
        ratio for step, its in zip(steps, inside, strict=True) if (ratio := _other_kernels(step, its, hardware)) > 0
    ]
    if slower:
        found = _with_slower_kernels(found, median(slower))
    known = {key: time for key, time in times.items() if key in planned}
    name = hardware.name if hardware.name.endswith(_ADDED) else f"{hardware.name}, {_ADDED}"
    return _with_curves(replace(found, name=name, kernels={**hardware.kernels, **known}, device=device), steps, seconds)


def planned_for(steps: Sequence[Step]) -> list[Hardware]:
    """Return the hardware that the graphs of these steps were planned for: usually one."""
    found: list[Hardware] = []
    for report in (report for step in steps for report in _reports(step)):
        if report.planned_for is not None and report.planned_for not in found:
            found.append(report.planned_for)
    return found


def _reports(step: Step) -> list[GraphReport]:
    return [at.span.run.report for at in step.runs if at.span.run is not None]


# ---- library kernels -------------------------------------------------------------------------------------------------
def _calls_of(step: Step, calls: Sequence[KernelCall]) -> list[KernelCall]:
    """Return the calls that the host made inside of the step's graphs."""
    return list(compress(calls, _inside(step, [call.called for call in calls])))


def _inside(step: Step, times: Sequence[int]) -> list[bool]:
    """Whether the host was inside of one of the step's graphs, at each of some times."""
    runs = sorted((at.start, at.end) for at in step.runs)
    places = [bisect_right(runs, (time, math.inf)) - 1 for time in times]
    return [place >= 0 and time < runs[place][1] for time, place in zip(times, places, strict=True)]


def _alone(steps: Sequence[Step], inside: Sequence[Sequence[KernelCall]], hardware: Hardware) -> dict[str, float]:
    """Return the median seconds of each kernel, as it would take without collectives beside it."""
    times: dict[str, list[float]] = defaultdict(list)
    kinds = {kernel.key: kernel.kind for step in steps for report in _reports(step) for kernel in report.kernels}
    for step, calls in zip(steps, inside, strict=True):
        busy = union([c.wires for c in step.collectives])
        for call in calls:
            share = hardware.contention.of(kinds.get(call.key, "memory"))
            beside = _overlap(call.ran, busy) / max(call.ran[1] - call.ran[0], 1)
            times[call.key].append(1e-9 * call.seconds_ns * _without(share, beside))
    return {key: median(its) for key, its in times.items()}


def _without(share: float, beside: float) -> float:
    """The part of a measured time that remains without contention.

    Args:
        share: by how much longer something takes that runs beside others from its start to its end.
        beside: the share of the measured time in which it did.
    """
    return 1 - beside * share / (1 + share)


def _overlap(interval: Interval, busy: Sequence[Interval]) -> int:
    start, end = interval
    return sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in busy)


def _with_rates(hardware: Hardware, times: Mapping[str, float], planned: Mapping[str, LibraryKernel]) -> Hardware:
    """Return the hardware with rates of products and attention for which the measured kernels take as long."""
    model: dict[tuple[str, str], float] = defaultdict(float)
    measured: dict[tuple[str, str], float] = defaultdict(float)
    for key, kernel in planned.items():
        # a kernel whose planned time was measured before says nothing about the rates
        if key in times and key not in hardware.kernels and kernel.kind != "memory":
            model[kernel.kind, kernel.dtype] += kernel.count * kernel.seconds
            measured[kernel.kind, kernel.dtype] += kernel.count * times[key]
    quicker = {of: model[of] / measured[of] for of in model if model[of] > 0 and measured[of] > 0}
    flops, attention = dict(hardware.flops), list(hardware.attention)
    for (kind, dtype), ratio in quicker.items():
        if kind == "product":
            flops[dtype] = hardware.matmul(dtype) * ratio
    for (kind, dtype), ratio in quicker.items():
        if kind != "product":  # a share of the rate of products
            place = int(kind == "attention_backward")
            attention[place] = hardware.attention[place] * ratio / quicker.get(("product", dtype), 1.0)
    return replace(hardware, flops=flops, attention=(attention[0], attention[1]))


# ---- other kernels ---------------------------------------------------------------------------------------------------
def _other_kernels(step: Step, calls: Sequence[KernelCall], hardware: Hardware) -> float:
    """How many times as long as planned everything in graphs takes that is no library kernel; 0 if a graph has no plan.

    That is also 0 if the library kernels took all the time.
    """
    reports = _reports(step)
    if any(report.simulation is None for report in reports):
        return 0.0
    measured, computing = measured_step(step), _computing(step)
    beside = max(0.0, measured.comm_s - measured.exposed_s) / computing if computing > 0 else 1.0
    library = sum(1e-9 * call.seconds_ns for call in calls)
    took = (computing - library) * _without(hardware.contention.memory, min(1.0, beside))
    planned = measured.planned_compute_s
    for report in reports:
        planned -= report.simulation.contention if report.simulation is not None else 0.0
        planned -= sum(kernel.count * kernel.seconds for kernel in report.kernels)
    return took / planned if took > 0 and planned > 0 else 0.0


def _computing(step: Step) -> float:
    """Seconds of compute in graphs. On a GPU, kernels of other code (an optimizer) run between the graphs' kernels."""
    if not step.kernels:
        return measured_step(step).compute_s
    inside = _inside(step, step.launched)
    return 1e-9 * sum(end - start for (start, end), counts in zip(step.kernels, inside, strict=True) if counts)


def _with_slower_kernels(hardware: Hardware, ratio: float) -> Hardware:
    launch = hardware.host_collective * (ratio if hardware.host_computes else 1.0)
    return replace(hardware, copy=hardware.copy / ratio, kernel=hardware.kernel * ratio, host_collective=launch)


# ---- collectives -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Point:
    bytes: int
    further_tensors: int
    seconds: float


def _with_curves(hardware: Hardware, steps: Sequence[Step], seconds: Mapping[TimedCollective, float]) -> Hardware:
    """Return the hardware with curves on which the measured collectives lie."""
    points: dict[tuple[str, int, int], dict[object, list[_Point]]] = defaultdict(lambda: defaultdict(list))
    for bucket in (bucket for step in steps for bucket in buckets_of(step)):
        kind = _curve_of(bucket)
        if kind is None or len(bucket.of.ranks) < 2:
            continue
        group = kind, len(bucket.of.ranks), local_nodes(hardware, bucket.of.ranks)
        coalesced = bucket.planned is not None and bucket.planned.bucket.form == COALESCED
        exposed = sum(c.exposed for c in bucket.collectives)
        beside = max(0.0, 1 - exposed / bucket.in_flight) if bucket.in_flight > 0 else 0.0
        took = sum(seconds[c] for c in bucket.collectives) * _without(hardware.contention.collective, beside)
        if took > 0:
            further = len(bucket.of.names) - 1 if coalesced else 0
            points[group][bucket.key].append(_Point(bucket.bytes, further, took))
    curves: dict[str, Any] = {}  # by the attribute of ``Hardware``
    for (kind, world, nodes), by_bucket in points.items():
        medians = [replace(its[0], seconds=median(point.seconds for point in its)) for its in by_bucket.values()]
        known = curves.setdefault(kind, dict(getattr(hardware, kind)))
        known[world, nodes] = fitted(hardware.curve(kind, world, nodes), medians)
    return replace(hardware, **curves)


def shared_wires(steps: Sequence[Step], together: Together) -> dict[TimedCollective, float]:
    """Return the seconds for which each collective had the wires of its group, on the rank that launched it last.

    Collectives of a group that run at once share the time in proportion to their sizes. For example, a small one that
    waits behind a large one counts for next to nothing.
    """
    fastest = {group: iter(seconds) for group, seconds in together.fastest.items()}
    found: dict[TimedCollective, float] = {}
    for step in steps:
        for group, its in by_group(step.collectives).items():
            begins = [c.wires[1] - 1e9 * next(fastest[group]) if group else c.wires[0] for c in its]
            ran = [(max(begin, c.wires[0]), c.wires[1]) for begin, c in zip(begins, its, strict=True)]
            found |= zip(its, _shares(ran, [max(c.of.numel, 1) for c in its]), strict=True)
    return found


def _shares(intervals: Sequence[tuple[float, float]], weights: Sequence[int]) -> list[float]:
    """Divide each moment between the intervals that contain it, in proportion to their weights; nanoseconds in."""
    seconds = [0.0] * len(intervals)
    times = sorted({time for interval in intervals for time in interval})
    for begin, end in pairwise(times):
        running = [i for i, (start, stop) in enumerate(intervals) if start <= begin and end <= stop]
        total = sum(weights[i] for i in running)
        for i in running:
            seconds[i] += 1e-9 * (end - begin) * weights[i] / total
    return seconds


def _curve_of(bucket: BucketRun) -> str | None:
    """The attribute of ``Hardware`` with the curves of such collectives; None if there is none.

    That is so for questions, broadcasts, and collectives by copy engines.
    """
    if bucket.of.kind == "all_reduce":
        return "all_reduce"
    if bucket.of.kind not in ("gather", "reduce"):
        return None
    name = bucket.planned.bucket.transport if bucket.planned is not None else ""
    transport = TRANSPORTS[name or Kind(bucket.of.kind).usual_transport]
    return None if transport.copy_engines else transport.curve


def fitted(curve: Curve, points: Sequence[_Point]) -> Curve:
    """Return a curve with another latency and another rate, on which the points lie as closely as can be.

    Both are found by least squares. If all collectives have about the same size, or a straight line would need a
    negative latency or rate, both change by the same factor, so that the sum of all is right.
    """
    usual = curve.latency, curve.bytes_per_second
    latencies, sending = [], []
    for point in points:
        protocols = ((latency, point.bytes / rate) for latency, rate in (usual, curve.quick or usual))
        latency, sent = min(protocols, key=sum)
        latencies.append(latency + curve.each * point.further_tensors)
        sending.append(sent)
    measured = [point.seconds for point in points]
    both = sum(measured) / (sum(latencies) + sum(sending))
    factors = both, both
    sizes = [point.bytes for point in points]
    ll, ls, ss = _dot(latencies, latencies), _dot(latencies, sending), _dot(sending, sending)
    if max(sizes) >= _APART * max(min(sizes), 1) and (determinant := ll * ss - ls * ls) > 0:
        slower, longer = _dot(latencies, measured), _dot(sending, measured)
        solved = (slower * ss - longer * ls) / determinant, (longer * ll - slower * ls) / determinant
        factors = solved if min(solved) > 0 else factors
    quick = None if curve.quick is None else (curve.quick[0] * factors[0], curve.quick[1] / factors[1])
    return Curve(curve.latency * factors[0], curve.bytes_per_second / factors[1], curve.each * factors[0], quick)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
