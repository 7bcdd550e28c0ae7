"""A training step on ranks that do not exist: the model is captured on the meta device, and planned as by a compile."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from compiled_fsdp.compat.modules import fake_store
from compiled_fsdp.compiler.preview import Plan, plans_under_budgets
from compiled_fsdp.passes.context import ForBackward
from compiled_fsdp.passes.plan.bound import lower_bound
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.cli.microbatches import Microbatches, microbatches_of
from compiled_fsdp.tools.cli.parallel import PRECISIONS, mesh_of, shard
from compiled_fsdp.tools.cli.setting import NotPlannable, Setting, model_of, name_of, one_line, shape_of
from compiled_fsdp.tools.timeline import GraphTimeline, Timeline, of_report

# Dense bf16 peaks, FLOP/s, by the names of the profiles that have a data sheet. MFU is a share of them.
PEAK_FLOPS = {
    "a100": 312e12, "a100-pcie": 312e12, "l40s": 362e12, "h100": 989e12, "h100-pcie": 756e12, "h100-nvl": 835e12,
    "h200": 989e12, "gh200": 989e12, "b200": 2250e12, "gb200": 2500e12,
}  # fmt: skip
ADAMW_VALUES = 7
"""Values that fused AdamW moves for each element.

It reads the weight, the gradient and two moments, and writes all but the gradient.
"""


@dataclass(frozen=True)
class GraphEstimate:
    """One graph of the step, with all that anyone needs to price it again.

    Times are seconds, sizes are bytes on one rank.

    Attributes:
        name: "forward" or "backward"; with "first", "middle" or "last" before it if microbatches differ.
        compute_s: of compute alone.
        comm_s: of all collectives of compiled_fsdp on their links.
        step_s: planned, for the whole graph.
        exposed_s: the part of ``step_s`` in which compute waits for compiled_fsdp's collectives.
        lower_bound_s: that no plan can beat.
        peak_bytes: planned.
        peak_lower_bound_bytes: that no plan can go below.
        floor_bytes: that no plan under any budget can go below: what is held during the whole graph, and full
            parameters that are kept for backward.
        sent_bytes: that a rank sends for compiled_fsdp's collectives inside its node, and to other nodes.
        budget_bytes: None for no limit.
        timeline: the plan in time; its name has the count, too: "4 x forward".
        for_backward: of a forward under a budget: what it leaves for backward.
        count: how often a step runs it.
    """

    name: str
    compute_s: float
    comm_s: float
    step_s: float
    exposed_s: float
    lower_bound_s: float
    peak_bytes: int
    peak_lower_bound_bytes: int
    floor_bytes: int
    sent_bytes: tuple[float, float]
    budget_bytes: float | None
    timeline: GraphTimeline
    for_backward: ForBackward | None = None
    count: int = 1

    @staticmethod
    def of(report: GraphReport, microbatches: Microbatches) -> GraphEstimate:
        """Make the estimate of a planned graph of some microbatches."""
        name = f"{microbatches.name} {report.phase}".strip()
        times = f"{microbatches.count} x {name}" if microbatches.count > 1 else name
        tasks, simulation, timeline = report.tasks, report.simulation, of_report(report, times)
        assert tasks is not None
        assert simulation is not None
        assert timeline is not None
        bound = lower_bound(tasks, report.budget)
        kept = sum(task.size.full for task in tasks.gathers if task.last == tasks.end)
        sent = [(task.size.sent, tasks.channels[task.channel].sent) for task in tasks.all_collectives]
        return GraphEstimate(
            name,
            tasks.seconds_before[-1],
            sum(timing.end - timing.start for timing in simulation.timings),
            simulation.seconds,
            simulation.exposed,
            bound.seconds,
            simulation.peak,
            bound.peak,
            tasks.persistent + kept,
            (sum(size * inside for size, (inside, _) in sent), sum(size * between for size, (_, between) in sent)),
            report.budget,
            timeline,
            report.for_backward,
            microbatches.count,
        )


@dataclass(frozen=True)
class Estimate:
    """A planned step.

    Attributes:
        graphs: forward and backward; of each kind of microbatch, if they differ.
        parameters: how many elements the model's parameters have.
        optimizer_s: seconds of AdamW's step on this rank's shards.
        tokens: of this rank's microbatches; if ranks have a batch together, this rank's share of it.
        flops: of these tokens, without recomputation for checkpointing; None if they are not known.
        peak_flops: the device's peak, FLOP/s; None if it is not known.
        world_size: how many ranks there are.
        hardware: the name of the hardware.
    """

    graphs: tuple[GraphEstimate, ...]
    parameters: int
    optimizer_s: float
    tokens: float
    flops: float | None
    peak_flops: float | None
    world_size: int
    hardware: str

    @property
    def step_s(self) -> float:
        """Seconds of all forwards and backwards, and of the optimizer."""
        return sum(graph.count * graph.step_s for graph in self.graphs) + self.optimizer_s

    @property
    def bound_s(self) -> float:
        """Seconds of the same with each graph at its lower bound."""
        return sum(graph.count * graph.lower_bound_s for graph in self.graphs) + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """Seconds that compute waits for communication."""
        return sum(graph.count * graph.exposed_s for graph in self.graphs)

    @property
    def for_backward(self) -> ForBackward | None:
        """What forward leaves for backward; None without a budget."""
        found = [graph.for_backward for graph in self.graphs if graph.for_backward is not None]
        return max(found, key=lambda one: one.is_cut, default=None)  # of microbatches that differ, one that is cut

    @property
    def hidden(self) -> float:
        """The share of communication that compute hides; 1 without communication."""
        total = sum(graph.count * graph.comm_s for graph in self.graphs)
        return 1 - self.exposed_s / total if total else 1.0

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak on one rank."""
        return max(graph.peak_bytes for graph in self.graphs)

    @property
    def floor_bytes(self) -> int:
        """Bytes that no plan under any budget can go below."""
        return max(graph.floor_bytes for graph in self.graphs)

    @property
    def sent_bytes(self) -> tuple[float, float]:
        """Bytes that a rank sends for compiled_fsdp's collectives inside its node, and to other nodes."""
        inside, between = (sum(graph.count * graph.sent_bytes[i] for graph in self.graphs) for i in (0, 1))
        return inside, between

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the device's peak in bf16 (PaLM, arXiv:2204.02311, appendix B)."""
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / self.step_s / self.peak_flops

    def timeline(self) -> Timeline:
        """Return the graphs in time."""
        return Timeline.of([graph.timeline for graph in self.graphs], self.hardware)

    def to_json(self) -> str:
        """Return JSON: the step's numbers, and ``graphs``, each with its ``tasks``."""
        graphs = []
        for graph in self.graphs:
            data = asdict(graph)
            timeline = data.pop("timeline")
            graphs.append(data | {"tasks": timeline["tasks"], "memory": timeline["memory"]})
        numbers = ("step_s", "bound_s", "exposed_s", "hidden", "peak_bytes", "sent_bytes", "tokens_per_second", "mfu")
        step = {name: getattr(self, name) for name in numbers}
        known = {"parameters": self.parameters, "optimizer_s": self.optimizer_s, "world_size": self.world_size}
        return json.dumps(step | known | {"graphs": graphs})


def estimate(setting: Setting) -> Estimate:
    """Plan a step of ``setting``; no device and no other process is needed.

    Raises:
        NotPlannable: sizes do not divide, the model cannot be imported, sharded or captured, or it has a graph break.
        OverBudget: no plan fits into the budget.
    """
    [found] = estimates(setting, [setting.budget])
    if isinstance(found, OverBudget):
        raise found
    return found


def estimates(setting: Setting, budgets: Sequence[float | None]) -> list[Estimate | OverBudget]:
    """Plan a step under several budgets, for which its model is captured only once.

    Args:
        setting: the step; its budget is ignored.
        budgets: bytes on each rank; None for no limit.

    Returns:
        The plan under each budget, or the error that no plan fits.

    Raises:
        NotPlannable: as for ``estimate``.
    """
    shards, rest = divmod(setting.world_size, setting.replicate * setting.tensor_parallel)
    if rest:
        raise NotPlannable(
            f"--replicate {setting.replicate} times --tensor-parallel {setting.tensor_parallel} does not divide "
            f"--world-size {setting.world_size}."
        )
    kinds = microbatches_of(setting)
    tokens = setting.microbatches * setting.batch * setting.sequence / setting.tensor_parallel
    with _among_fake_ranks(setting.world_size):
        mesh = mesh_of(setting.replicate, shards, setting.tensor_parallel)
        model, args = model_of(setting, mesh["tensor"])
        parameters = sum(param.numel() for param in model.parameters())
        weights = PRECISIONS[setting.precision].weights
        if weights != torch.float32:
            model.to(weights)
        shape = shape_of(setting)
        flops = None
        if shape is not None:
            flops = shape.flops_per_token(model, setting.sequence) * tokens
        captured: list[tuple[Microbatches, list[Plan]]] = []
        try:
            shard(model, mesh, setting.precision, setting.reshard_after_forward, setting.wire)
            for kind in kinds:
                kind.prepare(model, setting)
                plans, breaks = plans_under_budgets(model, args, options=_options(setting), budgets=budgets)
                if breaks:
                    break
                captured.append((kind, plans))
        except Exception as error:  # the model may raise anything
            raise NotPlannable(f"{name_of(setting)} cannot be sharded and captured: {one_line(error)}") from error
        if breaks:
            reason, where = breaks[0]
            raise NotPlannable(f"the model's graph breaks, and only a whole graph can be planned: {reason}, at {where}")
        found: list[list[GraphEstimate] | OverBudget] = [[] for _ in budgets]
        for kind, plans in captured:
            found = [_with(before, plan, kind) for before, plan in zip(found, plans, strict=True)]
    if [] in found:
        raise NotPlannable(f"{name_of(setting)} has no graph with collectives: is --world-size 1?")
    elements = math.ceil(parameters / shards / setting.tensor_parallel)
    step = functools.partial(
        Estimate,
        parameters=parameters,
        optimizer_s=ADAMW_VALUES * weights.itemsize * elements / setting.hardware.copy,
        tokens=tokens,
        flops=flops,
        peak_flops=PEAK_FLOPS.get(setting.hardware.name),
        world_size=setting.world_size,
        hardware=setting.hardware.name,
    )
    return [plan if isinstance(plan, OverBudget) else step(tuple(plan)) for plan in found]


def _with(
    before: list[GraphEstimate] | OverBudget, plan: Plan, microbatches: Microbatches
) -> list[GraphEstimate] | OverBudget:
    """Add the graphs of some microbatches to those of others; if some do not fit, the error of those that need most."""
    errors = [one for one in (before, plan) if isinstance(one, OverBudget)]
    if errors:
        return max(errors, key=lambda error: error.least)
    assert not isinstance(before, OverBudget)
    assert not isinstance(plan, OverBudget)
    return before + [GraphEstimate.of(report, microbatches) for report in plan if report.tasks and report.simulation]


def _options(setting: Setting) -> dict[str, Any]:
    options: dict[str, Any] = {"hardware": setting.hardware, "kernels": not setting.hardware.host_computes}
    options["transport"] = setting.transport
    options["optimizer_bytes_per_element"] = 2 * PRECISIONS[setting.precision].weights.itemsize
    if setting.reshard_after_forward == "auto":
        options["reshard_after_forward"] = "auto"
    return options | dict(setting.options)


@contextlib.contextmanager
def _among_fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that do not exist.

    ``LOCAL_WORLD_SIZE`` is unset meanwhile, so that the hardware says how many ranks are on a node.
    """
    if dist.is_initialized():
        raise NotPlannable("there is a process group already: plan outside of a training program.")
    local = os.environ.pop("LOCAL_WORLD_SIZE", None)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
        if local is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local
