"""Numbers that summarize the plan of a graph, and the reasons why its collectives do not start earlier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.channels import ModelCollective
from compiled_fsdp.passes.plan.simulate import ModelTiming, Simulation
from compiled_fsdp.passes.plan.tasks import Tasks


@dataclass(frozen=True)
class Numbers:
    """The numbers that summarize the plan of one graph."""

    # Seconds of this plan if nothing were hidden: compute, copies, launches, gathers and reductions one after another.
    serial: float
    # No plan takes fewer seconds than this.
    bound: float
    # Seconds of this plan, as simulated.
    simulated: float
    # Seconds that compute waits for gathers and reductions.
    exposed: float
    # Seconds by which compute and copies take longer because collectives run beside them.
    contention: float
    # Bytes at the peak of this plan.
    peak: int
    # The memory budget in bytes; None for no budget.
    budget: float | None
    # No plan has a peak of fewer bytes than this.
    least_peak: int

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: the time that this plan hides, as a share of the time that could be hidden."""
        possible = self.serial - self.bound
        return (self.serial - self.simulated) / possible if possible > 0 else 1.0

    @property
    def gap(self) -> float:
        """The time by which this plan is above the bound, as a share of the bound."""
        return self.simulated / self.bound - 1 if self.bound else 0.0

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" of {self.budget / 1e6:,.1f} MB"
        return (
            f"serial {1e3 * self.serial:.3f} ms, bound {1e3 * self.bound:.3f}, planned {1e3 * self.simulated:.3f} "
            f"(gap {self.gap:.1%}, overlap efficiency {self.efficiency:.0%}), exposed {1e3 * self.exposed:.3f} ms, "
            f"contention {1e3 * self.contention:.3f} ms, "
            f"peak {self.peak / 1e6:,.1f} MB{budget} (least {self.least_peak / 1e6:,.1f} MB)"
        )


def numbers(tasks: Tasks, simulation: Simulation, budget: float | None) -> Numbers:
    """Compute the numbers that summarize a graph's plan."""
    bound = lower_bound(tasks, budget)
    launches = [timing.launch for timing in simulation.timings]
    on_channel = sum(tasks.costs_of(of.kind, of.indices, of.form).on_channel for of in launches)
    return Numbers(
        serial=simulation.seconds - simulation.exposed - simulation.contention + on_channel,
        bound=bound.seconds,
        simulated=simulation.seconds,
        exposed=simulation.exposed,
        contention=simulation.contention,
        peak=simulation.peak,
        budget=budget,
        least_peak=bound.peak,
    )


def model_line(tasks: Tasks, simulation: Simulation) -> str | None:
    """A line about the model's own collectives and their waits for gathers and reductions; None if there are none."""
    own = _own(tasks, simulation, copies=False)
    if not own:
        return None
    kinds = Counter(of.kind for of, _, _ in own)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    timings = [timing for _, _, timing in own]
    queued = sum(timing.start - timing.issued for timing in timings)
    links = "over a link of ours" if tasks.shares_links else "over other links than ours"
    return (
        f"the model's own collectives: {listed} of {sum(of.bytes for of, _, _ in own) / 1e6:.3f} MB "
        f"{links}, {1e3 * sum(seconds for _, seconds, _ in own):.3f} ms, "
        f"{1e3 * sum(timing.exposed for timing in timings):.3f} exposed, of which {1e3 * queued:.3f} queued"
    )


def copies_line(tasks: Tasks, simulation: Simulation) -> str | None:
    """A line about activations that are copied to host memory or back; None if there are none."""
    own = _own(tasks, simulation, copies=True)
    if not own:
        return None
    where = {"offload": "to host memory", "reload": "back from host memory"}
    ways = " and ".join(dict.fromkeys(where[of.kind] for of, _, _ in own))
    return (
        f"activations copied {ways}: {len(own)} of {sum(of.bytes for of, _, _ in own) / 1e6:.3f} MB, "
        f"{1e3 * sum(seconds for _, seconds, _ in own):.3f} ms, "
        f"{1e3 * sum(timing.exposed for _, _, timing in own):.3f} exposed"
    )


def _own(tasks: Tasks, simulation: Simulation, *, copies: bool) -> list[tuple[ModelCollective, float, ModelTiming]]:
    """The copies to host memory and back, or the model's own collectives, each with its seconds and its timing."""
    both = zip(tasks.model_collectives, tasks.model_seconds, simulation.model_timings, strict=True)
    return [(of, seconds, timing) for of, seconds, timing in both if of.is_copy == copies]


def why_not_earlier(tasks: Tasks, simulation: Simulation, index: int, limit: float) -> str:
    """Say why the collective of the schedule's launch ``index`` does not start earlier.

    Returns:
        "queue": its channel is busy. "data": a gather is launched at the start of the graph, or a reduction when its
        gradients are complete. "memory@<milestone>": one segment earlier, at that milestone, it does not fit into
        ``limit`` bytes. "compute-limited": it does not have to start earlier.
    """
    timing = simulation.timings[index]
    if timing.start > timing.issued + 1e-9:
        return "queue"
    launch = timing.launch
    ready, _ = tasks.window(launch.kind, launch.indices)
    if launch.at == ready:
        return "data"
    held = sum(
        task.size.full for task in tasks.members_of(launch)
    )  # bytes that an earlier launch would add to the segment before
    if simulation.curve[launch.at - 1] + held > limit:
        return f"memory@{tasks.segments[launch.at - 1].milestones[0]}"
    return "compute-limited"
