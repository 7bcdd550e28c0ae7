"""Check ``compiled_fsdp.profile``: its exposed time beside the wall clock's.

    python -m bench.profile_check [--gbit 1] [--batch 256] [--rounds 5] [--systems whole,broken] [--json FILE]
        [--timeline FOLDER]

Needs root, ip and tc, like ``bench.real_link``: two ranks run in two network namespaces with a link of limited rate
between them. They train real_link's MLP, in one graph ("whole") and with a graph break after every layer ("broken").

Each round has three steps, each from a barrier to a barrier:

- a usual step;
- a step whose collectives do nothing, so that only compute, copies and launches remain;
- a step in a profile, with a stopwatch at every place where the host waits for a collective.

Two comparisons of medians over the rounds are printed:

- the profile's exposed time, and the stopwatch's time in the same step. The stopwatch gets the same figure without
  torch's profiler, names and plans.
- the profile's exposed time plus the time for which other threads had the core, and the cost of communication: the
  usual step's time minus that of the step without communication. Exposed time alone is less than this cost, because
  sockets and sums use the cores that compute runs on.

Three more steps in one profile give the table of collectives, measured beside planned, and the timeline. Then the model
is compiled again with the costs of that profile, and three steps of the new plans show how much nearer they come.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import link, tables
from bench.link_models import MODELS
from bench.link_systems import SYSTEMS, Setting, Training
from compiled_fsdp import measure_hardware, profile
from compiled_fsdp.compat.profiling import called_through, functional_collectives
from compiled_fsdp.tools.profile_steps import MeasuredStep

ROOT = Path(__file__).parent.parent
DRAWN = 3
"""Number of steps in the profile that is drawn."""
SYSTEM = {"whole": "compiled_fsdp", "broken": "broken"}


# ---- the same program without communication --------------------------------------------------------------------------
def _nothing(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for a collective: return a tensor of the right size with undefined values."""
    if name == "wait_tensor" or name.startswith("all_to_all"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if name.startswith("all_gather"):
        return args[0].new_empty(args[1] * args[0].numel())
    if name.startswith("reduce_scatter"):
        return args[0].new_empty(args[0].numel() // args[2])
    return args[0]


def without_communication(step: Callable[[], Any]) -> Any:
    """Run ``step()`` with collectives that do nothing."""
    functions = {op: partial(_nothing, op._opname) for op in functional_collectives()}
    with called_through(functions), mock.patch.object(dist, "all_reduce"):
        return step()


# ---- a stopwatch -----------------------------------------------------------------------------------------------------
class Stopwatch:
    """The seconds for which the host waited for collectives, by the wall clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``call``, add its time to ``seconds``, and return its result."""
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start

    def around(self, step: Callable[[], Any]) -> Any:
        """Run ``step()``, timed at each wait, also for eager all-reduces, by which ranks ask each other something."""
        waits = {op: self.timed for op in functional_collectives() if op._opname == "wait_tensor"}
        asks = dist.all_reduce

        def ask(*args: Any, **kwargs: Any) -> Any:
            work = asks(*args, **kwargs)
            return SimpleNamespace(wait=partial(self.timed, work.wait))

        with called_through(waits), mock.patch.object(dist, "all_reduce", ask):
            return step()


# ---- a rank ----------------------------------------------------------------------------------------------------------
def seconds_of(step: Callable[[], Any]) -> float:
    """Return the seconds until a step has ended on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def checked(system: Training, rounds: int, timeline: Path) -> dict[str, Any]:
    """Run rounds of three steps; return their figures and a further profile's text and table. Draws to ``timeline``."""
    names = ("usual", "waited", "replaced", "profiled", "exposed", "off_core")
    found: dict[str, list[float]] = {name: [] for name in names}

    def once() -> None:
        system.step()
        system.model.zero_grad()

    for _ in range(2):
        once()
    for _ in range(rounds):
        stopwatch = Stopwatch()
        found["usual"].append(seconds_of(once))
        found["replaced"].append(seconds_of(partial(without_communication, once)))
        once()  # drops the undefined values that collectives without communication left
        dist.barrier()
        with profile(system.model) as measured:
            found["profiled"].append(seconds_of(partial(stopwatch.around, once)))
        found["waited"].append(stopwatch.seconds)
        found["exposed"].append(measured.result.step.exposed_s)
        found["off_core"].append(measured.result.step.off_core_s or 0.0)
    with profile(system.model) as measured:
        for _ in range(DRAWN):
            once()
    measured.timeline(timeline)
    options: dict[str, Any] = {"hardware": measured.costs}
    system.call = torch.compile(system.model, backend="compiled_fsdp", options=options)
    for _ in range(2):
        once()
    with profile(system.model) as again:
        for _ in range(DRAWN):
            once()
    errors = {name: error_of(of.result.step) for name, of in (("before", measured), ("after", again))}
    return {
        **found, "text": str(measured), "table": measured.table(), "profile": measured.to_dict(), "errors": errors,
        "again": str(again),
    }  # fmt: skip


def error_of(step: MeasuredStep) -> tuple[float, float]:
    """Return by which share the planned time of a step is off, and that of its compute."""
    return step.planned_s / step.seconds - 1, step.planned_compute_s / step.compute_s - 1


def worker(options: argparse.Namespace) -> None:
    """Run one rank, in its network namespace."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = MODELS["mlp"]
    x = model.batch(options.batch, torch.Generator().manual_seed(dist.get_rank()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    measure_hardware(mesh, force=True)
    setting = Setting(options.gbit, model, x, mesh)
    records = {}
    for name in options.systems:
        system: Any = SYSTEMS[SYSTEM[name]].make(setting)
        records[name] = checked(system, options.rounds, options.out.with_suffix(f".{name}.html"))
    options.out.write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down


# ---- the parent process ----------------------------------------------------------------------------------------------
def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both ranks; return rank 0's records by system."""
    port = random.randrange(20000, 30000)
    with link.Link(f"{options.gbit}gbit", "4mb", 1) as network:
        workers = []
        for rank in range(2):
            command = [sys.executable, "-m", "bench.profile_check", "--out", str(folder / f"{rank}.json")]
            command += ["--gbit", str(options.gbit), "--batch", str(options.batch), "--rounds", str(options.rounds)]
            command += ["--systems", ",".join(options.systems)]
            environment = {
                **os.environ,
                **network.environment(rank, port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                "COMPILED_FSDP_CACHE_DIR": str(folder),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            }
            workers.append(subprocess.Popen(network.command(rank, command), env=environment, cwd=ROOT))
        try:
            codes = [process.wait(timeout=900) for process in workers]
        finally:
            for process in workers:
                process.kill()
    if any(codes):
        sys.exit(f"profile_check: ranks ended with {codes}")
    return json.loads((folder / "0.json").read_text())


def rows(records: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each system: medians over the rounds, in seconds."""
    found = []
    for name, record in records.items():
        by_round = {key: median(record[key]) for key in ("usual", "waited", "replaced", "exposed", "off_core")}
        costs = median(u - r for u, r in zip(record["usual"], record["replaced"], strict=True))
        both = median(e + o for e, o in zip(record["exposed"], record["off_core"], strict=True))
        found.append(
            (name, f"{by_round['usual']:.2f}", f"{by_round['replaced']:.2f}", f"{by_round['exposed']:.2f}",
             f"{by_round['waited']:.2f}", _beside(by_round["exposed"], by_round["waited"]),
             f"{both:.2f}", f"{costs:.2f}", _beside(both, costs))
        )  # fmt: skip
    return found


def _beside(says: float, clock: float) -> str:
    return f"{says / clock - 1:+.1%}" if clock > 0 else ""


HEAD = (
    "", "step, s", "without communication", "exposed, profile", "exposed, stopwatch", "",
    "exposed and off core", "communication costs", "",
)  # fmt: skip


def main() -> int:
    """Measure and print; return 2 if this machine cannot make a link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=int, default=1, help="of the link (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows on each rank (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of three steps (%(default)s)")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEM), help=",".join(SYSTEM))
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--timeline", type=Path, help="put a page for each system here, planned and measured")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.systems) - set(SYSTEM):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    if options.out is not None:
        worker(options)
    if (reason := link.why_not()) is not None:
        print(f"profile_check: no link can be made here: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        records = measure(options, Path(folder))
        for name in records if options.timeline else ():
            options.timeline.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder) / f"0.{name}.html", options.timeline / f"{name}.html")
    print(tables.table(HEAD, rows(records)))
    for name, record in records.items():
        print(f"{name}: {record['text']}\n{record['table']}\n")
        print(f"with the costs of this profile: {record['again']}\n")
        before, after = record["errors"]["before"], record["errors"]["after"]
        print(f"planned step: {before[0]:+.1%} off before, {after[0]:+.1%} with measured costs; ", end="")
        print(f"compute: {before[1]:+.1%} before, {after[1]:+.1%} with measured costs\n")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
