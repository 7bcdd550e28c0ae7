"""The figures of a profile: a verdict in words, a table, plain data."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from compiled_fsdp.tools.profile_ranks import Together
from compiled_fsdp.tools.profile_steps import (
    MeasuredCollective,
    MeasuredStep,
    Step,
    collectives_of_steps,
    measured_step,
    timeline_of_step,
)
from compiled_fsdp.tools.profile_times import TimedCollective
from compiled_fsdp.tools.timeline import Timeline
from compiled_fsdp.tools.words import WIDTH, count, megabytes, milliseconds, wrapped

WORTH_A_LINE = 0.01
"""The least share of a step for which the verdict mentions a straggler, or time without a core or on an idle GPU."""

_WHAT = {"gather": "gather of", "reduce": "reduction of", "all_reduce": "all-reduce of", "question": "question"}


@dataclass(frozen=True)
class Straggler:
    """A rank that launches collectives late, and the rank that waits longest for it.

    Attributes:
        rank: the late rank; a global rank.
        waiting: the rank that loses most time by it; a global rank.
        seconds: that ``waiting`` waits in a step.
    """

    rank: int
    waiting: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """The figures of a profile. A step's figures are of the step of median length; collectives' figures are medians.

    Attributes:
        rank: the global rank that the figures are of.
        steps: each step that counts.
        left_out: how many steps do not count, because a rank compiled in them.
        collectives: of a step, in the order of launches.
        stragglers: for each late rank, the rank that waits longest for it; the longest wait comes first.
        seconds: of the whole context on the wall clock, with everything else that happened in it.
        timeline: the step of median length, planned and measured.
    """

    rank: int
    steps: tuple[MeasuredStep, ...]
    left_out: int
    collectives: tuple[MeasuredCollective, ...]
    stragglers: tuple[Straggler, ...]
    seconds: float
    timeline: Timeline

    @property
    def step(self) -> MeasuredStep:
        """The step of median length; if two are in the middle, the shorter one."""
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]

    @property
    def hidden(self) -> float:
        """The share of communication that compute hides, from 0 to 1; 1 without communication."""
        step = self.step
        return 1 - min(1.0, step.exposed_s / step.comm_s) if step.comm_s else 1.0

    @property
    def collective_error(self) -> float | None:
        """The median of ``|planned / measured - 1|`` over planned collectives' times on the wires; None without any."""
        found = [
            abs(c.planned_s / c.seconds - 1) for c in self.collectives if c.planned_s is not None and c.seconds > 0
        ]
        return median(found) if found else None

    def __str__(self) -> str:
        step = self.step
        them = "it" if self.left_out == 1 else "them"
        left_out = f", {self.left_out} left out: a graph was compiled in {them}" if self.left_out else ""
        out = [
            f"rank {self.rank}, {count(len(self.steps), 'step')}{left_out}: "
            f"{milliseconds(step.seconds)} a step{_beside(step.planned_s, step.seconds)}",
            f"    compute, copies and launches {milliseconds(step.compute_s)}"
            f"{_beside(step.planned_compute_s, step.compute_s)}",
            *self._off_core(step),
            *self._idle(step),
            self._verdict(step),
        ]
        error = self.collective_error
        if error is not None:
            out.append(f"    the plan's time of a collective is off by {error:.0%} (median)")
        worst = self.stragglers[0] if self.stragglers else None
        if worst is not None and worst.seconds > WORTH_A_LINE * step.seconds:
            out.append(
                f"a straggler: rank {worst.waiting} waits {milliseconds(worst.seconds)} a step for rank {worst.rank}, "
                "which launches later"
            )
        return "\n".join(line for text in out for line in wrapped(text, "    "))

    def _off_core(self, step: MeasuredStep) -> list[str]:
        if step.off_core_s is None or step.off_core_s <= WORTH_A_LINE * step.seconds:
            return []
        return [f"    for {milliseconds(step.off_core_s)} of it other threads had the core, gloo's among them"]

    def _idle(self, step: MeasuredStep) -> list[str]:
        if step.idle_s is None or step.idle_s <= WORTH_A_LINE * step.seconds:
            return []
        return [f"    for {milliseconds(step.idle_s)} the GPU has nothing to do: it waits for the host"]

    def _verdict(self, step: MeasuredStep) -> str:
        text = f"{self.hidden:.0%} of communication hidden"
        if step.exposed_s <= 0 or step.most_exposed is None:
            return text
        kind, name, its = step.most_exposed
        return (
            f"{text}: {milliseconds(step.exposed_s)} of {milliseconds(step.comm_s)} exposed (planned "
            f"{milliseconds(step.planned_exposed_s)}), {milliseconds(its)} of it in the {_WHAT.get(kind, kind)} {name}"
        )

    def table(self) -> str:
        """Draw a table with a line for each collective: milliseconds, planned beside measured.

        Raises:
            ImportError: rich is not installed (``pip install rich``).
        """
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError as error:
            raise ImportError(
                "profile: table() draws with rich, which is not installed: pip install rich. "
                "print(p) and p.to_dict() need no library."
            ) from error

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH)
        table.add_column("parameters", overflow="fold", ratio=1)
        for name in ("", "a step", "size", "ms", "planned", "exposed", "planned"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for c in self.collectives:
            planned = ("", "") if c.planned_s is None or c.planned_exposed_s is None else (
                f"{1e3 * c.planned_s:.3f}", f"{1e3 * c.planned_exposed_s:.3f}"
            )  # fmt: skip
            table.add_row(
                Text(c.name), c.kind, str(c.per_step), megabytes(c.bytes), f"{1e3 * c.seconds:.3f}", planned[0],
                f"{1e3 * c.exposed_s:.3f}", planned[1],
            )  # fmt: skip
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None, legacy_windows=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, for ``json.dumps``. Times are seconds.

        Returns:
            ``rank``, ``steps``, ``left_out``, ``collectives``, ``stragglers``, ``hidden``, ``collective_error``,
            ``seconds``. Entries have the attributes of ``MeasuredStep``, ``MeasuredCollective`` and ``Straggler``.
        """
        return {
            "rank": self.rank,
            "steps": [asdict(step) for step in self.steps],
            "left_out": self.left_out,
            "collectives": [asdict(collective) for collective in self.collectives],
            "stragglers": [asdict(straggler) for straggler in self.stragglers],
            "hidden": self.hidden,
            "collective_error": self.collective_error,
            "seconds": self.seconds,
        }


def _beside(planned: float, measured: float) -> str:
    if planned <= 0 or measured <= 0:
        return ""
    return f" (planned {milliseconds(planned)}: {_ratio(measured / planned)})"


def _ratio(ratio: float) -> str:
    """Say how much longer than planned something took: a percentage, or a multiple if it is at least two."""
    if ratio >= 2:
        return f"{ratio:.2g} times as long"
    if ratio <= 0.5:
        return f"{1 / ratio:.2g} times as short"
    share = f"{abs(ratio - 1):.0%}"
    return "as planned" if share == "0%" else f"{share} {'longer' if ratio > 1 else 'shorter'}"


def measurement(
    counted: Sequence[Step],
    taken: int,
    seconds: Mapping[TimedCollective, float],
    together: Together,
    ranks: Sequence[int],
    rank: int,
    wall: float,
) -> Measurement:
    """Compute the figures of a profile.

    Args:
        counted: the steps that count.
        taken: how many steps there were.
        seconds: of each collective on the wires.
        together: the result of all ranks' summaries.
        ranks: the global ranks, by their place in the group.
        rank: this rank; a global rank.
        wall: seconds of the whole profile.
    """
    steps = tuple(measured_step(step) for step in counted)
    middle = sorted(range(len(steps)), key=lambda i: steps[i].seconds)[(len(steps) - 1) // 2]
    stragglers = []
    for late, of in together.lost.items():
        waiting = max(of, key=of.__getitem__)
        stragglers.append(Straggler(ranks[late], ranks[waiting], of[waiting] / len(counted)))
    stragglers.sort(key=lambda straggler: -straggler.seconds)
    return Measurement(
        rank, steps, taken - len(counted), tuple(collectives_of_steps(counted, seconds)), tuple(stragglers), wall,
        timeline_of_step(counted[middle]),
    )  # fmt: skip
