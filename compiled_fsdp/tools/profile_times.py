"""Times of a profile: when each span was on the host, when each collective was on the wires, when compute waited.

A span's times are those of the profiler's range with its label.

The profiler records gloo's worker threads: "gloo:all_gather" begins when a thread takes the collective up and ends when
the collective is done. On GPUs a collective is a kernel on a stream of its own, which the profiler connects with the op
that launched it. If the profiler has neither, a collective lasts from its launch to the end of its wait.

On the CPU, a collective's exposed time is the time that its wait blocks the host. On a GPU a wait stops the stream and
not the host. There the exposed time is a part of the gap in the compute stream: the part, up to the collective's end,
in which a collective ran.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_fsdp.compat.profiling import ProfiledEvent
from compiled_fsdp.tools.profile_recorder import Launched, ProfileError, Run, Span

Interval = tuple[int, int]
"""Nanoseconds on the profiler's clock."""


@dataclass(frozen=True, eq=False)
class TimedSpan:
    """A span, with its start and end on the host in nanoseconds."""

    span: Span
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class TimedCollective:
    """One collective as it ran. Times are nanoseconds on the profiler's clock.

    Attributes:
        of: the collective.
        step: as ``Span.step``.
        launch: when the host launched it.
        waits: when the host waited for it.
        wires: when it was on the wires; from the launch to the end of its wait if ``seen`` is False.
        seen: whether ``wires`` is from an event of gloo or from a kernel.
        exposed: how long compute waited for it, nanoseconds.
    """

    of: Launched
    step: int
    launch: Interval
    waits: tuple[Interval, ...]
    wires: Interval
    seen: bool
    exposed: int = 0


@dataclass(frozen=True)
class Times:
    """All recorded spans and collectives, with their times.

    Attributes:
        spans: in the order in which they began.
        collectives: in the order of their launches.
        kernels: when the kernels of compute ran; empty on the CPU.
        launched: when the host launched each of these kernels.
    """

    spans: tuple[TimedSpan, ...]
    collectives: tuple[TimedCollective, ...]
    kernels: tuple[Interval, ...]
    launched: tuple[int, ...] = ()


def times_of(spans: Sequence[Span], events: Sequence[ProfiledEvent]) -> Times:
    """Find the times of recorded spans.

    Args:
        spans: in the order in which they began.
        events: the profiler's events, by start.

    Raises:
        ProfileError: the profiler's ranges do not match the spans.
    """
    timed = _timed(spans, events)
    waits: dict[Launched, list[Interval]] = defaultdict(list)
    for at in timed:
        if at.span.what in ("wait", "blocking") and at.span.launched is not None:
            waits[at.span.launched].append((at.start, at.end))
    launches = [at for at in timed if at.span.what in ("launch", "blocking")]
    on_device = _Device(events, launches)
    wires = on_device.wires if on_device.wires else _gloo(events, launches)
    collectives = []
    for at in launches:
        assert at.span.launched is not None
        its_waits = tuple(waits[at.span.launched])
        end = its_waits[-1][1] if its_waits else at.end
        known = wires.get(at.span.launched)
        collectives.append(
            TimedCollective(
                at.span.launched, at.span.step, (at.start, at.end), its_waits, known or (at.start, end),
                known is not None,
            )
        )  # fmt: skip
    if on_device.wires:
        exposed = on_device.exposed(collectives)
    else:
        exposed = [_blocked(collective) for collective in collectives]
    done = tuple(replace(c, exposed=e) for c, e in zip(collectives, exposed, strict=True))
    if not on_device.wires:
        return Times(timed, done, ())
    return Times(timed, done, tuple(on_device.compute), tuple(on_device.launched))


def _timed(spans: Sequence[Span], events: Sequence[ProfiledEvent]) -> tuple[TimedSpan, ...]:
    """Match spans with the profiler's ranges of the same labels, in order."""
    ranges: dict[str, list[ProfiledEvent]] = defaultdict(list)
    labels = Counter(span.label for span in spans)
    for event in events:
        if event.is_range and event.on_host and event.name in labels:
            ranges[event.name].append(event)
    wrong = [label for label, count in labels.items() if len(ranges[label]) != count]
    if wrong:
        raise ProfileError(
            f"profile: torch's profiler recorded {len(ranges[wrong[0]])} of {labels[wrong[0]]} ranges "
            f"{wrong[0]!r}; was it stopped inside of the profile?"
        )
    next_of = {label: iter(found) for label, found in ranges.items()}
    return tuple(TimedSpan(span, e.start_ns, e.end_ns) for span in spans for e in [next(next_of[span.label])])


# ---- on the CPU ------------------------------------------------------------------------------------------------------
def _gloo(events: Sequence[ProfiledEvent], launches: Sequence[TimedSpan]) -> dict[Launched, Interval]:
    """Return when gloo's threads worked at each collective.

    That is the first event of gloo's with as many elements that begins after the launch and belongs to no earlier
    launch.
    """
    by_numel: dict[int, list[ProfiledEvent]] = defaultdict(list)
    for event in events:
        if event.on_host and event.name.startswith("gloo:"):
            by_numel[event.numel].append(event)
    found: dict[Launched, Interval] = {}
    for at in launches:
        launched = at.span.launched
        assert launched is not None
        candidates = by_numel[launched.numel]
        place = next((i for i, event in enumerate(candidates) if event.start_ns >= at.start), None)
        if place is not None:
            event = candidates.pop(place)
            found[launched] = event.start_ns, event.end_ns
    return found


def _blocked(collective: TimedCollective) -> int:
    """Return the nanoseconds that waits blocked the host; waits that begin after the collective's end do not count."""
    waits = collective.waits
    if collective.seen:
        waits = tuple(wait for wait in waits if wait[0] < collective.wires[1])
    return sum(end - start for start, end in waits)


# ---- on GPUs ---------------------------------------------------------------------------------------------------------
class _Device:
    """The kernels of collectives, and those of compute.

    Attributes:
        wires: when each collective's kernels ran; empty without kernels.
        compute: when the kernels of the compute stream ran, by start. The compute stream is the busiest one.
        launched: when the host launched each of them.
    """

    def __init__(self, events: Sequence[ProfiledEvent], launches: Sequence[TimedSpan]) -> None:
        kernels = [event for event in events if not event.on_host and not event.is_range and event.launched_by]
        ops = {event.id: event for event in events if event.on_host and not event.is_range and event.id}
        starts = sorted((at.start, i) for i, at in enumerate(launches))
        of_launch: dict[int, list[ProfiledEvent]] = defaultdict(list)
        others: dict[tuple[int, int], list[tuple[ProfiledEvent, int]]] = defaultdict(list)
        for kernel in kernels:
            op = ops.get(kernel.launched_by)
            if op is None:
                continue
            place = bisect_left(starts, (op.start_ns, len(launches))) - 1
            number = starts[place][1] if place >= 0 else -1
            if number >= 0 and op.start_ns < launches[number].end:
                of_launch[number].append(kernel)
            else:
                others[kernel.device_stream].append((kernel, op.start_ns))
        busiest = max(others.values(), key=_busy, default=[])
        stream = busiest[0][0].device_stream if busiest else None
        self._compute = sorted((k.start_ns, k.end_ns, launched) for k, launched in busiest)
        self.compute: list[Interval] = [(start, end) for start, end, _ in self._compute]
        self.launched = [launched for _, _, launched in self._compute]
        self.wires: dict[Launched, Interval] = {}
        for number, its in of_launch.items():
            apart = [kernel for kernel in its if kernel.device_stream != stream]
            launched = launches[number].span.launched
            if apart and launched is not None:
                self.wires[launched] = min(k.start_ns for k in apart), max(k.end_ns for k in apart)

    def exposed(self, collectives: Sequence[TimedCollective]) -> list[int]:
        """Return the exposed nanoseconds of each collective.

        That is the part of the gap in compute at the collective's wait, up to its end, in which it or a collective
        before it ran. In the rest of the gap the GPU has nothing to do, because the host is behind. If several
        collectives are waited for in one gap, each is exposed from the end of the one before it.
        """
        found = [0] * len(collectives)
        busy = in_line([c.wires for c in collectives if c.seen])
        waits = sorted((wait[0], i) for i, c in enumerate(collectives) if c.seen for wait in c.waits[:1])
        covered = 0
        for wait, i in waits:
            before = [end for _, end, launched in self._compute if launched < wait]
            after = [start for start, _, launched in self._compute if launched > wait]
            if not before:  # nothing computes yet: the gap begins when the host waits
                before = [wait]
            begin = max(max(before), covered)
            end = min([collectives[i].wires[1], *after])
            found[i] = sum(max(0, min(stop, end) - max(start, begin)) for start, stop in busy)
            covered = max(covered, end)
        return found


def _busy(kernels: Sequence[tuple[ProfiledEvent, int]]) -> int:
    return sum(kernel.end_ns - kernel.start_ns for kernel, _ in kernels)


def in_line(intervals: Sequence[Interval]) -> list[Interval]:
    """Put collectives of one group one after the other, in the order of their ends.

    If two run at once, the second begins when the first ends. So the sum of the intervals is the time in which any of
    them ran.
    """
    order = sorted(range(len(intervals)), key=lambda i: intervals[i][1])
    found, free = list(intervals), 0
    for i in order:
        start, end = intervals[i]
        found[i] = max(start, min(free, end)), end
        free = max(free, end)
    return found


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the times in which any of the intervals runs, by start."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def of_run(run: Run, times: Times) -> TimedSpan:
    """Return the span of a graph's call."""
    return next(at for at in times.spans if at.span.what == "run" and at.span.run is run)
