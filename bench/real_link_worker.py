"""One rank of ``bench.real_link``: sets all systems up, then runs one step of each in turn, round after round.

Started by ``real_link`` in a network namespace, with the rendezvous in its environment. Writes JSON to ``--out``: for
each system what ``Record`` holds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.link import sent_bytes
from bench.link_systems import SYSTEMS, WIDTH, Running, Setting
from bench.memory import alive, traced
from compiled_fsdp import communication, measure_hardware
from compiled_fsdp.reporting.compile_log import COMPILE_LOG

LEAST_ROUNDS = 3


@dataclass
class Record:
    """What was measured of one system: seconds and bytes, in lists one entry a round.

    ``loss`` is that of the last step, ``predicted_s`` what the planner thinks that a step of compiled_fsdp takes.
    """

    first_step_s: float = 0.0
    base_bytes: int = 0
    peak_bytes: int = 0
    loss: float = float("nan")
    predicted_s: float | None = None
    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    reported_bytes: list[int] = field(default_factory=list)


def say(text: str) -> None:
    """Tell the user, once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def timed_step(system: Running) -> tuple[float, float, float, int, int]:
    """Step, forward and backward seconds, bytes sent, and those of them that compiled_fsdp says it sends.

    A step ends when it has ended on both ranks.
    """
    dist.barrier()
    sent, start = sent_bytes(), time.perf_counter()
    with communication() as volume:
        forward, backward = system.step()
    dist.barrier()
    seconds, sent = time.perf_counter() - start, sent_bytes() - sent
    system.finish()
    return seconds, forward, backward, sent, volume.sent


def set_up(name: str, setting: Setting) -> tuple[Running, Record]:
    """Make a system and take its first step, in which it is compiled."""
    record = Record()
    system, kept, _ = traced(lambda: SYSTEMS[name].make(setting))
    before = alive()
    record.first_step_s = timed_step(system)[0]
    record.base_bytes = kept + alive() - before
    if name == "compiled_fsdp":
        simulations = [report.simulation for report in COMPILE_LOG.graphs]
        record.predicted_s = sum(simulation.seconds for simulation in simulations if simulation is not None)
    say(f"  {name}: first step {record.first_step_s:.1f} s")
    return system, record


def measure_memory(system: Running, record: Record) -> float:
    """A step that is not timed for the table, with every allocation traced; its seconds, about."""

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
    """Rank 0's number, on every rank."""
    box = torch.tensor(number)
    dist.broadcast(box, 0)
    return int(box)


def run_rounds(systems: dict[str, Running], records: dict[str, Record], rounds: int) -> None:
    """Each round is one step of every system; each round begins with the next one."""
    names = list(systems)
    for i in range(rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            record = records[name]
            step, forward, backward, sent, reported = timed_step(systems[name])
            record.step_s.append(step)
            record.forward_s.append(forward)
            record.backward_s.append(backward)
            record.wire_bytes.append(sent)
            record.reported_bytes.append(reported)
        say(f"  round {i + 1} of {rounds}: " + ", ".join(f"{name} {records[name].step_s[-1]:.2f}" for name in names))


def measure(options: argparse.Namespace) -> dict[str, Record]:
    """All systems of one setting."""
    begin = time.perf_counter()
    x = torch.randn(options.batch, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    if not options.assumed:  # every setting has its own link
        measure_hardware(init_device_mesh("cpu", (dist.get_world_size(),)), again=True)
    systems: dict[str, Running] = {}
    records: dict[str, Record] = {}
    for name in options.systems:
        systems[name], records[name] = set_up(name, Setting(options.gbit, x))
    a_round = sum(measure_memory(systems[name], records[name]) for name in systems)
    left = options.seconds - (time.perf_counter() - begin)
    rounds = agreed(max(LEAST_ROUNDS, min(options.repeats, int(left / a_round))))
    say(f"  {rounds} rounds of about {a_round:.0f} s")
    run_rounds(systems, records, rounds)
    for name, system in systems.items():
        records[name].loss = getattr(system, "loss", float("nan"))
    return records


def main() -> None:
    """Measure, write, end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
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
