"""The verdict on a compiled graph: what it takes and why, and what its peak consists of."""

from __future__ import annotations

from compiled_fsdp.passes.plan.simulate import MemoryParts, memory_parts
from compiled_fsdp.reporting.report import CollectiveReport, GraphReport
from compiled_fsdp.reporting.words import WIDTH, bucket_name, megabytes, milliseconds, size_unit, wrapped

_WHY = {
    "data": {"gather": "needed first", "reduce": "complete last"},
    "queue": {"gather": "others are on the wires", "reduce": "others are on the wires"},
    "memory": {"gather": "no memory before", "reduce": "no memory before"},
    "compute-limited": {"gather": "too little compute beside it", "reduce": "too little compute beside it"},
}


def verdict(number: int, report: GraphReport) -> list[str]:
    """Two lines about a graph, three where the first has no room for a name; one of a graph without figures."""
    cached = ", from the cache" if report.from_cache else ""
    head = f"[{number}] {report.phase}{cached}"
    numbers, peak = report.numbers, peak_parts(report)
    if numbers is None or peak is None:
        communicates = (
            "no collectives" if not report.collectives else f"{len(report.collectives)} collectives, no figures"
        )
        return [f"{head}: {len(report.reads)} parameters read, {communicates}"]
    on_wires = sum(collective.seconds for collective in report.collectives)
    above = f", +{numbers.gap:.0%}" if 0.005 < numbers.gap < 10 else ""
    over = f" of {megabytes(numbers.budget)}" if numbers.budget is not None else ""
    unit, divisor = size_unit(sum(peak))
    parts = (
        ("shards+grads+optimizer", peak.persistent),
        ("unsharded", peak.unsharded),
        ("activations", peak.activations),
        ("buckets", peak.buckets),
    )
    takes = (
        f"{head} {milliseconds(numbers.simulated)} (bound {milliseconds(numbers.bound)}{above}); exposed "
        f"{milliseconds(numbers.exposed)} of {milliseconds(on_wires)}"
    )
    because = _because(report)
    first = [f"{takes}: {because}" if because else takes]
    if len(first[0]) > WIDTH:
        first = [f"{takes}:", *wrapped(f"    {because}", "    ")]
    held = ", ".join(f"{name} {size / divisor:,.1f}" for name, size in parts)
    return [*first, *wrapped(f"    peak {sum(peak) / divisor:,.1f} {unit}{over}: {held}", "    ")]


def peak_parts(report: GraphReport) -> MemoryParts | None:
    """What is alive at a graph's peak, in bytes; None for a graph without collectives of ours."""
    if report.tasks is None or report.simulation is None:
        return None
    schedule = tuple(timing.launch for timing in report.simulation.timings)
    return max(memory_parts(report.tasks, schedule), key=sum)


def _because(report: GraphReport) -> str:
    """The collective that is exposed longest, and why it is."""
    worst = max(report.collectives, key=lambda collective: collective.exposed, default=None)
    if worst is None or worst.exposed <= 0:
        return ""
    return f"{short_name(worst)}, {why(worst)}"


def short_name(collective: CollectiveReport) -> str:
    """A collective by its parameters."""
    kind = "gather" if collective.bucket.kind == "gather" else "reduction"
    return f"{kind} of {bucket_name(collective.names)}"


def why(collective: CollectiveReport) -> str:
    """Why a collective does not start earlier, in words."""
    reason, _, where = collective.reason.partition("@")
    text = _WHY[reason][collective.bucket.kind]
    return f"{text} ({where})" if where else text
