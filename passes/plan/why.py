"""What a plan's collectives are limited by, and the numbers that sum a graph's plan up."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.simulate import Simulation
from compiled_fsdp.passes.plan.tasks import Tasks


@dataclass(frozen=True)
class Numbers:
    """Of one graph's plan, seconds and bytes.

    Attributes:
        serial: compute and collectives one after the other. bound: what no plan can beat. simulated: this plan.
        exposed: seconds that compute waits. peak, budget (None: no limit), least_peak: bytes.
    """

    serial: float
    bound: float
    simulated: float
    exposed: float
    peak: int
    budget: float | None
    least_peak: int

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: what is hidden, of what could be."""
        possible = self.serial - self.bound
        return (self.serial - self.simulated) / possible if possible > 0 else 1.0

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return self.simulated / self.bound - 1 if self.bound else 0.0

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" of {self.budget / 1e6:,.1f} MB"
        return (
            f"serial {1e3 * self.serial:.3f} ms, bound {1e3 * self.bound:.3f}, planned {1e3 * self.simulated:.3f} (gap {self.gap:.1%}, overlap "
            f"efficiency {self.efficiency:.0%}), exposed {1e3 * self.exposed:.3f} ms, peak {self.peak / 1e6:,.1f} MB{budget} (least "
            f"{self.least_peak / 1e6:,.1f} MB)"
        )


def numbers(tasks: Tasks, simulation: Simulation, budget: float | None) -> Numbers:
    """The numbers of a graph's plan."""
    bound = lower_bound(tasks, budget)
    on_link = sum(flight.end - flight.start for flight in simulation.flights)
    serial = tasks.before[-1] + on_link
    return Numbers(serial, bound.seconds, simulation.seconds, simulation.exposed, simulation.peak, budget, bound.peak)


def reason(tasks: Tasks, simulation: Simulation, index: int, limit: float) -> str:
    """Why a collective is not on its way earlier: "queue" (the link is busy), "data" (the graph begins there, or its gradient is
    complete there), "memory@milestone" (no room before), or "compute-limited" (it need not be)."""
    flight = simulation.flights[index]
    if flight.start > flight.issued + 1e-9:
        return "queue"
    launch = flight.launch
    ready = 0 if launch.gathers else max(item.first for item in tasks.of(launch))
    if launch.at == ready:
        return "data"
    held = sum(item.bytes for item in tasks.of(launch))  # what one run earlier would add to that run
    if simulation.curve[launch.at - 1] + held > limit:
        return f"memory@{tasks.runs[launch.at - 1].starts[0]}"
    return "compute-limited"
