"""Whether a profile tells the truth: exposed time as ``compiled_fsdp.profile`` has it, beside the wall clock.

    python -m bench.profile_check [--gbit 1] [--batch 256] [--rounds 5] [--systems whole,broken] [--json FILE]
        [--timeline FOLDER]

Needs root, ip and tc, like ``bench.real_link``: two ranks in two network namespaces, a link of limited rate between
them. What is trained is its MLP, in one graph ("whole") and with a graph break after every layer ("broken").

In each round there are three steps, from a barrier to a barrier: as usual; the same program with collectives replaced
by nothing, which leaves compute, copies and launches; and one in a profile. Medians of the rounds of

- what communication costs: the first less the second. Some of it is compute that is slower while data moves, as
  sockets and sums take the same cores;
- how long the rank's thread did not run in the profiled step: the wall clock less the thread's own CPU time. It waits
  for data then, or for a core;
- the exposed time that the profile says, and for how long other threads had the core: the two together are to be what
  communication costs.
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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import link
from bench.link_models import MODELS
from bench.link_systems import SYSTEMS, Setting, Training
from compiled_fsdp import measure_hardware, profile
from compiled_fsdp.compat import called_through, functional_collectives

ROOT = Path(__file__).parent.parent
SYSTEM = {"whole": "compiled_fsdp", "broken": "broken"}


# ---- the same program without communication --------------------------------------------------------------------------
def _nothing(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a collective returns, of the right size, with whatever is in that memory."""
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
    """``step()``, with collectives that do nothing."""
    functions = {op: partial(_nothing, op._opname) for op in functional_collectives()}
    with called_through(functions), mock.patch.object(dist, "all_reduce", return_value=None):
        return step()


# ---- a rank ----------------------------------------------------------------------------------------------------------
def seconds_of(step: Callable[[], Any]) -> tuple[float, float]:
    """Of a step, which ends when it has ended on all ranks; and of these, while this thread did not run."""
    dist.barrier()
    start, ran = time.perf_counter(), time.thread_time()
    step()
    idle = time.perf_counter() - start - (time.thread_time() - ran)
    dist.barrier()
    return time.perf_counter() - start, idle


def checked(system: Training, rounds: int, timeline: Path) -> dict[str, Any]:
    """Rounds of three steps, and a profile's text and table; the last step is drawn on a page."""
    names = ("usual", "replaced", "profiled", "idle", "exposed", "off_core", "step")
    found: dict[str, list[float]] = {name: [] for name in names}

    def once() -> None:
        system.step()
        system.model.zero_grad()

    for _ in range(2):
        once()
    for _ in range(rounds):
        found["usual"].append(seconds_of(once)[0])
        found["replaced"].append(seconds_of(lambda: without_communication(once))[0])
        once()  # what was gathered of nothing is gone
        dist.barrier()
        with profile(system.model) as measured:
            seconds, idle = seconds_of(once)
        found["profiled"].append(seconds)
        found["idle"].append(idle)
        found["exposed"].append(measured.result.step.exposed_s)
        found["off_core"].append(measured.result.step.off_core_s or 0.0)
        found["step"].append(measured.result.step.seconds)
    measured.timeline(timeline)
    return {**found, "text": str(measured), "table": measured.table(), "profile": measured.json()}


def worker(options: argparse.Namespace) -> None:
    """One rank, in its network namespace."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = MODELS["mlp"]
    x = model.batch(options.batch, torch.Generator().manual_seed(dist.get_rank()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    measure_hardware(mesh, again=True)
    setting = Setting(options.gbit, model, x, mesh)
    records = {}
    for name in options.systems:
        system: Any = SYSTEMS[SYSTEM[name]].make(setting)
        records[name] = checked(system, options.rounds, options.out.with_suffix(f".{name}.html"))
    options.out.write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down


# ---- both ------------------------------------------------------------------------------------------------------------
def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rank 0's records by system."""
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


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def show(name: str, record: dict[str, Any]) -> None:
    """One system's comparison."""
    usual, replaced, profiled, idle, exposed, off_core = (
        median(record[what]) for what in ("usual", "replaced", "profiled", "idle", "exposed", "off_core")
    )
    found = list(zip(*(record[what] for what in ("usual", "replaced", "exposed", "off_core", "idle")), strict=True))
    costs = median(u - r for u, r, *_ in found)
    of_costs = [(e + o) / (u - r) for u, r, e, o, _ in found]
    of_idle = [(e + o) / i for _, _, e, o, i in found]
    print(f"\n{name}: a step {usual:.3f} s, without communication {replaced:.3f} s, in a profile {profiled:.3f} s")
    print(f"communication costs {costs:.3f} s; in the profiled step the thread did not run for {idle:.3f} s")
    print(f"the profile says {exposed:.3f} s exposed, {off_core:.3f} s other threads had the core: together "
          f"{_spread(of_costs)} of the cost, {_spread(of_idle)} of not running")  # fmt: skip
    print(record["text"])
    print(record["table"])


def main() -> int:
    """Measure and print; 2 if this machine cannot."""
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
    for name, record in records.items():
        show(name, record)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
