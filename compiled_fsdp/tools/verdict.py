"""The verdict on a compiled graph: its planned time, its longest wait for a collective, and its memory peak."""

from __future__ import annotations

from compiled_fsdp.passes.plan.simulate import MemoryParts, memory_parts
from compiled_fsdp.reporting.report import CollectiveReport, GraphReport
from compiled_fsdp.tools.words import bucket_name, megabytes, milliseconds, size_unit, why_not_earlier, wrapped


def verdict(number: int, report: GraphReport, layers: int = 1, *, of_batch: bool = False) -> list[str]:
    """Return the lines of the verdict on a graph; a graph without figures gets one line.

    Args:
        number: the graph's place in ``Explanation.graphs``.
        report: the graph's report.
        layers: how many equal layers of the model run the graph.
        of_batch: whether to say which batch the graph is for.
    """
    head = f"[{number}] {report.phase}"
    head += f" of {layers} equal layers" if layers > 1 else ""
    if of_batch and report.batch is not None:
        head += ", any batch" if report.any_batch else f", batch {report.batch}"
    head += ", from the cache" if report.from_cache else ""
    numbers, peak = report.numbers, peak_parts(report)
    if numbers is None or peak is None or report.tasks is None:
        communicates = (
            "no collectives" if not report.collectives else f"{len(report.collectives)} collectives, no figures"
        )
        return [f"{head}: {len(report.reads)} parameters read, {communicates}"]
    on_network = sum(collective.seconds for collective in report.collectives)
    above = f" (+{numbers.gap:.0%})" if 0.005 < numbers.gap < 10 else ""
    over = f" of {megabytes(numbers.budget)}" if numbers.budget is not None else ""
    unit, divisor = size_unit(sum(peak))
    parts = (
        ("shards+grads+optimizer", peak.persistent),
        ("unsharded", peak.unsharded),
        ("activations", peak.activations),
        ("buckets", peak.buckets),
    )
    compute = report.tasks.seconds_before[-1]
    other = max(0.0, numbers.simulated - compute - numbers.exposed)

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:,.1f}" if numbers.simulated >= 1e-3 else f"{1e3 * seconds:.3g}"

    held = ", ".join(f"{name} {size / divisor:,.1f}" for name, size in parts)
    left = report.for_backward
    lines = (
        f"{head} {milliseconds(numbers.simulated)} = compute {ms(compute)} + exposed {ms(numbers.exposed)} + overhead "
        f"{ms(other)}; bound {milliseconds(numbers.bound)}{above}",
        f"    exposed: {ms(numbers.exposed)} of {ms(on_network)} ms on the network{_because(report)}",
        f"    peak {sum(peak) / divisor:,.1f} {unit}{over}: {held}",
        *([f"    for backward: {left}"] if left is not None and left.is_cut else []),
        *([f"    {report.copies}"] if report.copies is not None else []),
    )
    return [part for line in lines for part in wrapped(line, "    ")]


def peak_parts(report: GraphReport) -> MemoryParts | None:
    """Return the bytes alive at a graph's peak, by kind; None for a graph without collectives of compiled_fsdp."""
    if report.tasks is None or report.simulation is None:
        return None
    schedule = tuple(timing.launch for timing in report.simulation.timings)
    return max(memory_parts(report.tasks, schedule), key=sum)


def _because(report: GraphReport) -> str:
    """Name the collective that is exposed longest, and the reason, as the end of a line; "" if none is exposed."""
    worst = max(report.collectives, key=lambda collective: collective.exposed, default=None)
    if worst is None or worst.exposed <= 0:
        return ""
    return f"; {short_name(worst)}, {why(worst)}"


def short_name(collective: CollectiveReport) -> str:
    """Name a collective by its kind and its parameters: "gather of layers.3.* (4)"."""
    kind = "gather" if collective.bucket.kind == "gather" else "reduction"
    return f"{kind} of {bucket_name(collective.names)}"


def why(collective: CollectiveReport) -> str:
    """Say in words why a collective does not start earlier."""
    return why_not_earlier(collective.reason, collective.bucket.kind)
