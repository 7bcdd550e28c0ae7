"""One rank of ``bench.real_link``: sets up all systems, then runs one step of each in turn, round after round.

``real_link`` starts it in a network namespace, with the rendezvous in its environment. It writes a JSON object to
``--out`` that maps each system to the values of its ``Record``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from bench.link import sent_bytes
from bench.link_cases import BUDGETS, LAYOUTS
from bench.link_models import MODELS
from bench.link_systems import SYSTEMS, Running, Setting, Training
from bench.memory import alive, traced
from compiled_fsdp import FSDPModule, count_communication, explain, measure_hardware
from compiled_fsdp.tools.steps import ModelCall

LEAST_ROUNDS = 3


@dataclass
class Record:
    """The measurements of one system: seconds and bytes. Lists have one entry per round.

    ``loss`` is the last step's. ``predicted_s`` is the planner's prediction for a step, if compiled_fsdp planned it.
    ``predicted_parts_s`` has the seconds of its "compute" alone, its "collectives" alone, and its "contention".
    ``budget_bytes`` is its memory budget, and ``for_backward`` says what forward leaves under it.
    """

    first_step_s: float = 0.0
    base_bytes: int = 0
    peak_bytes: int = 0
    loss: float = float("nan")
    predicted_s: float | None = None
    predicted_parts_s: dict[str, float] | None = None
    budget_bytes: float | None = None
    for_backward: str = ""
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    inside_bytes: list[int] = field(default_factory=list)
    reported_bytes: list[int] = field(default_factory=list)


def say(text: str) -> None:
    """Print ``text`` on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@dataclass(frozen=True)
class Step:
    """One step's seconds, and its bytes: those that this machine sent over the link and over its loopback device, and
    those that compiled_fsdp reports for this rank. ``cpu`` are the seconds of all threads of this rank."""

    seconds: float
    cpu: float
    forward: float
    backward: float
    over_link: int
    inside: int
    reported: int


def timed_step(system: Running) -> Step:
    """Run a step, and measure it until it has ended on all ranks."""
    dist.barrier()
    link, inside, cpu, start = sent_bytes(), sent_bytes("lo"), time.process_time(), time.perf_counter()
    with count_communication() as volume:
        forward, backward = system.step()
    dist.barrier()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    step = Step(seconds, cpu, forward, backward, sent_bytes() - link, sent_bytes("lo") - inside, volume.sent)
    system.finish()
    return step


def set_up(name: str, setting: Setting) -> tuple[Running, Record]:
    """Make a system and run its first step, in which it is compiled."""
    record = Record()
    system, kept, _ = traced(lambda: SYSTEMS[name].make(setting))
    before = alive()
    record.first_step_s = timed_step(system).seconds
    record.base_bytes = kept + alive() - before
    if calls := planned_calls(system):
        record.predicted_s = sum(call.seconds for call in calls)
        record.predicted_parts_s = parts_of(calls)
    if name in BUDGETS and isinstance(system, Training):
        forward = explain(system.model).graphs[0]
        record.budget_bytes, record.for_backward = forward.budget, str(forward.for_backward)
    say(f"  {name}: first step {record.first_step_s:.1f} s")
    return system, record


def planned_calls(system: Running) -> tuple[ModelCall, ...]:
    """Return the planned calls of a step without microbatches; none if compiled_fsdp did not compile the model."""
    if type(system) is not Training or not isinstance(system.model, FSDPModule):
        return ()
    return explain(system.model).calls


def parts_of(calls: Sequence[ModelCall]) -> dict[str, float]:
    """Return the planned seconds of compute alone, of collectives alone, and of contention between them."""
    graphs = [(step.layers, graph) for call in calls for step in call.steps for graph in step.graphs]
    return {
        "compute": sum(layers * graph.tasks.seconds_before[-1] for layers, graph in graphs),
        "collectives": sum(
            layers * graph.tasks.costs_of(of.kind, of.indices, of.form).on_channel
            for layers, graph in graphs
            for of in (timing.launch for timing in graph.simulation.timings)
        ),
        "contention": sum(layers * graph.simulation.contention for layers, graph in graphs),
    }


def measure_memory(system: Running, record: Record) -> float:
    """Set ``record.peak_bytes`` from a step with every allocation traced; return the step's approximate seconds."""

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        system.step()
        dist.barrier()
        return time.perf_counter() - start

    seconds, _, peak = traced(step)
    record.peak_bytes = record.base_bytes + peak
    system.finish()
    return seconds


def agreed(number: int) -> int:
    """Return rank 0's number on every rank."""
    box = torch.tensor(number)
    dist.broadcast(box, 0)
    return int(box)


def frames_compiled() -> int:
    """Return how many times Dynamo has compiled a frame."""
    return counters["frames"]["total"]


def run_rounds(systems: dict[str, Running], records: dict[str, Record], rounds: int) -> None:
    """Run one step of every system in each round. The system that begins changes from round to round."""
    names = list(systems)
    for i in range(rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            record = records[name]
            step = timed_step(systems[name])
            record.step_s.append(step.seconds)
            record.cpu_s.append(step.cpu)
            record.forward_s.append(step.forward)
            record.backward_s.append(step.backward)
            record.wire_bytes.append(step.over_link)
            record.inside_bytes.append(step.inside)
            record.reported_bytes.append(step.reported)
        say(f"  round {i + 1} of {rounds}: " + ", ".join(f"{name} {records[name].step_s[-1]:.2f}" for name in names))


def measure(options: argparse.Namespace) -> dict[str, Record]:
    """Measure all systems of one setting."""
    begin = time.perf_counter()
    model, layout = MODELS[options.model], LAYOUTS[options.layout]
    x = model.batch(options.batch, torch.Generator().manual_seed(dist.get_rank()))
    names = ("replicas", "shards")[-len(layout.mesh) :]
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=names)
    setting = Setting(options.gbit, model, x, mesh, layout.options)
    if not options.assumed:  # anew in each setting, because every setting has its own link
        begun = time.perf_counter()
        hardware = measure_hardware(mesh, **layout.options, force=True)
        say(f"  measured in {time.perf_counter() - begun:.0f} s: {hardware}")
    systems: dict[str, Running] = {}
    records: dict[str, Record] = {}
    for name in options.systems:
        systems[name], records[name] = set_up(name, setting)
    compiled = frames_compiled()
    a_round = sum(measure_memory(systems[name], records[name]) for name in systems)
    if frames_compiled() != compiled:
        raise RuntimeError("a system was compiled again after its first step: they share code, and one broke another's")
    left = options.seconds - (time.perf_counter() - begin)
    rounds = agreed(max(min(LEAST_ROUNDS, options.repeats), min(options.repeats, int(left / a_round))))
    say(f"  {rounds} rounds of about {a_round:.0f} s")
    run_rounds(systems, records, rounds)
    for name, system in systems.items():
        records[name].loss = getattr(system, "loss", float("nan"))
    return records


def main() -> None:
    """Measure, write the records, and end the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--gbit", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--assumed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = measure(options)
    options.out.write_text(json.dumps({name: asdict(record) for name, record in records.items()}))
    dist.barrier()
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down


if __name__ == "__main__":
    main()
