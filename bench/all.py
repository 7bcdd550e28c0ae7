"""Run all measurements of docs/benchmarks.md, one after another: `make bench`, or

    python -m bench.all [--quick] [--only NAME ...] [--no-link] [--list] [--out FOLDER]

After each measurement FOLDER (build/bench) has NAME.md, its tables as docs/benchmarks.md shows them; NAME.log, the
command's output; and NAME.json, if the command writes records. At the end results.md has all tables. ``--quick`` runs
all commands at small sizes, to see that they work: its numbers mean nothing. Commands with a slow link need root;
``--no-link`` leaves them out.

Nothing else should run on the machine. If a measurement fails, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import link, tables

ROOT = Path(__file__).parent.parent
PYTHON = "python"  # the word that commands begin with; they run by this process's interpreter


@dataclass(frozen=True)
class Measurement:
    """One command of docs/benchmarks.md.

    Attributes:
        name: the name of its files, without suffix.
        command: the command line as docs/benchmarks.md shows it.
        minutes: its approximate duration on two idle cores.
        quick: options that are added to the command for a quick run; a later option overrides an earlier one.
        table: makes the tables from the records that the command writes to ``--json FILE``. None: the command writes
            no records, and its output is the result.
    """

    name: str
    command: str
    minutes: float
    quick: str
    table: Callable[[Any], str] | None = None

    @property
    def needs_link(self) -> bool:
        """Whether the command makes network namespaces, which needs root."""
        return any(f"bench.{name}" in self.command for name in ("real_link", "profile_check", "muon"))


def _link(
    name: str, options: str, minutes: float, quick: str = "", table: Callable[[Any], str] = tables.slow_link
) -> Measurement:
    quick = quick or "--rates 1 --batches 256 --systems compiled_fsdp,fsdp2 --repeats 1"
    return Measurement(name, f"python -m bench.real_link {options}", minutes, quick, table)


OF_MODELS = (
    "compiled_fsdp,fsdp2,fsdp2_compiled,functional,floor_compute,floor_wire,floor_wire_fsdp2,"
    "broken,broken_autograd,blocks"
)
OF_TWO_MACHINES = "compiled_fsdp,fsdp2,fsdp2_compiled,broken,broken_autograd,blocks"
OF_BUDGETS = "compiled_fsdp,budget_80,budget_60,budget_45"
MEASUREMENTS = (
    Measurement("host-time", "python -m bench.gpu --only host", 2, "--quick --codegen aot_eager", tables.host_time),
    Measurement(
        "compile-time", "python -m bench.compile_time --layers 8 32", 11, "--layers 1 --repeats 1", tables.compile_time
    ),
    Measurement(
        "compile-time-cold",
        "python -m bench.compile_time --layers 8 32 --cold --repeats 1",
        6,
        "--layers 1",
        tables.compile_time,
    ),
    Measurement("import-time", "python bench/import_time.py", 1, "--runs 2"),
    Measurement("warm-start", "python bench/warm_start.py --runs 3", 5, "--runs 1 --layers 1 --dim 64"),
    Measurement("plans", "python -m bench.plan_quality --jobs 2", 10, "--quick"),
    Measurement("plan-time", "python -m bench.plan_time", 2, "--layers 2"),
    _link("slow-link", "--quick", 15),
    _link(
        "slow-link-compute-bound",
        "--rates 4 --batches 2048 --systems "
        "compiled_fsdp,fsdp2,fsdp2_compiled,functional_overlap,floor_compute,floor_wire_fsdp2 --minutes 8",
        8,
    ),
    _link("slow-link-2", "--rates 2 --batches 512 --systems compiled_fsdp,fsdp2 --repeats 7", 3),
    _link(
        "slow-link-predicted",
        "--rates 1,2,4 --batches 64,256,1024,2048 --repeats 5 --systems compiled_fsdp,broken,floor_compute,floor_wire",
        45,
        "--rates 4 --batches 64 --systems compiled_fsdp,broken,floor_compute,floor_wire --repeats 1",
        tables.predictions,
    ),
    *(
        _link(
            f"memory-budgets{name}",
            f"--budgets --systems {OF_BUDGETS} {model}--rates 1 --batches 2048 --repeats 3",
            6,
            "--rates 1 --batches 256 --systems compiled_fsdp,budget_80 --repeats 1",
        )
        for name, model in (("", ""), ("-llama", "--model llama "))
    ),
    _link(
        "slow-link-llama",
        f"--model llama --rates 1 --batches 256 --repeats 5 --systems {OF_MODELS}",
        5,
    ),
    _link(
        "slow-link-embedding",
        f"--model embedding --rates 1 --batches 256 --repeats 5 --systems {OF_MODELS}",
        4,
    ),
    _link(
        "two-machines-hsdp",
        f"--model llama --layout hsdp --rates 1 --batches 256 --repeats 5 --systems {OF_TWO_MACHINES}",
        5,
    ),
    _link(
        "two-machines-reshard",
        f"--model llama --layout reshard --rates 1 --batches 256 --repeats 5 --systems {OF_TWO_MACHINES}",
        5,
    ),
    _link(
        "graph-breaks",
        "--rates 1 --batches 256 --systems compiled_fsdp,fsdp2,broken,broken_autograd --repeats 4",
        4,
    ),
    _link(
        "graph-breaks-quick-link",
        "--assumed --rates 2,40 --batches 256 --repeats 7 --systems "
        "compiled_fsdp,fsdp2,broken,broken_inside,broken_autograd,blocks,floor_compute",
        8,
    ),
    _link(
        "replicas",
        "--rates 1 --batches 256,1024 --repeats 7 --minutes 7 --systems compiled_fsdp,ddp,replicated,kept",
        5,
    ),
    _link("training-step", "--rates 1 --batches 256,1024 --repeats 7 --minutes 7 --systems loop,train_step", 5),
    Measurement("muon", "python -m bench.muon", 3, "--layers 1 --width 64 --rounds 1"),
    Measurement("profile", "python -m bench.profile_check", 5, "--rounds 1 --systems whole"),
    Measurement("graph-breaks-depth", "python -m bench.broken_depth --repeats 3", 3, "--repeats 1"),
    _link(
        "accumulation",
        "--accumulate --minutes 8",
        8,
        "--rates 1 --batches 64 --systems accumulate_wait,fsdp2_accumulate_wait --repeats 1",
    ),
)


def run(measurement: Measurement, folder: Path, quick: bool) -> bool:
    """Run one measurement and write its files; return whether it ended well."""
    records, log = folder / f"{measurement.name}.json", folder / f"{measurement.name}.log"
    command = [sys.executable, *shlex.split(measurement.command)[1:]]
    command += shlex.split(measurement.quick) if quick else []
    command += ["--json", str(records)] if measurement.table is not None else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        return False
    text = measurement.table(json.loads(records.read_text())) if measurement.table else f"```\n{log.read_text()}```\n"
    shown = measurement.command + (f" {measurement.quick}" if quick else "")
    (folder / f"{measurement.name}.md").write_text(f"## {measurement.name}\n`{shown}`\n\n{text}")
    return True


def chosen(options: argparse.Namespace) -> list[Measurement]:
    """Return the measurements to run.

    Raises:
        PermissionError: some of them need a link, and this machine cannot make one.
    """
    some = [m for m in MEASUREMENTS if not options.only or m.name in options.only]
    if options.no_link:
        return [m for m in some if not m.needs_link]
    of_link = [m.name for m in some if m.needs_link]
    if of_link and (reason := link.why_not()) is not None:
        raise PermissionError(
            f"{reason}, and {', '.join(of_link)} run over a slow link. Run as root (with iproute2's ip and tc), or "
            "leave them out with --no-link."
        )
    return some


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and one run each, to see that all works")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in MEASUREMENTS])
    parser.add_argument("--no-link", action="store_true", help="not what needs root")
    parser.add_argument("--list", action="store_true", help="say what there is, and how long it takes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a measurement failed, 2 if this machine cannot make the links that are needed."""
    options = parse(arguments)
    if options.list:
        for m in MEASUREMENTS:
            print(f"{m.name:24} {m.minutes:3.0f} min{'  root' if m.needs_link else '      '}  {m.command}")
        return 0
    try:
        measurements = chosen(options)
    except PermissionError as error:
        print(f"bench.all: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for m in measurements:
        start = time.monotonic()
        about = "" if options.quick else f" (about {m.minutes:.0f} minutes)"
        print(f"{m.name}{about}: {m.command}", flush=True)
        if not run(m, options.out, options.quick):
            failed.append(m.name)
            print(f"  FAILED: see {options.out / m.name}.log", flush=True)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    parts = [options.out / f"{m.name}.md" for m in measurements if m.name not in failed]
    (options.out / "results.md").write_text("\n".join(part.read_text() for part in parts))
    print(f"{options.out / 'results.md'}: {len(parts)} of {len(measurements)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
