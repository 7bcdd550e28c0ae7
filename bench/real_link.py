"""Measure training steps over a real, slow network between two processes on one machine.

    python -m bench.real_link [--model mlp|llama|embedding] [--layout two|four|hsdp|reshard] [--quick] [--json FILE]
                              [--rates 1,2,4] [--batches 256,1024] [--repeats N] [--systems A,B]

Needs root, ip and tc. The program makes two network namespaces, which act as machines, and joins them by a link of
limited rate. One gloo rank runs in each namespace. With the layouts "four", "hsdp" and "reshard" two ranks run in each,
and reach each other by loopback. During communication a rank mostly waits for the link, as on a real network, and
leaves the CPU to compute: overlap is measured, not simulated. Models are in float32, with one thread per rank: an
8-layer MLP of 67 M parameters, a Llama of 30 M, or a Llama of 40 M with most of them in embedding and head.

For each setting all systems run in the same processes, and each round has one step of each system in turn. A step is
forward and backward, from a barrier to a barrier. The program prints medians with their 95 % intervals (order
statistics: see ``medians.py``), and ratios between steps of the same round. "cpu" are the seconds of all threads of
rank 0: where they are close to the step, collectives take cores from compute. ``memory.py`` measures peak memory. Bytes
are those that the network card of rank 0's machine sent ("sent") and those that its loopback device sent ("inside").

"broken" is the model with a graph break after every layer, "broken_inside" with one in the middle of every layer.
"broken_autograd" breaks after every layer and uses compiled autograd. "blocks" compiles each layer alone.

With ``--accumulate`` a step has four microbatches of the whole batch size each. "accumulate_each" reduces and reshards
in every microbatch. "accumulate_wait" reduces in the last one only, and keeps parameters unsharded up to it. FSDP2 and
compiled_fsdp get the same calls. With ``--layout reshard``, "accumulate_hsdp" and "accumulate_hfsdp" run beside
"accumulate_each" instead: replicas on the two machines, and a working copy on each machine with state that is sharded
over both. Both reduce between the machines in the last microbatch.

With ``--budgets`` the systems have memory budgets: "budget_60" has 60 % of the planned peak of compiled_fsdp, or the
least that fits, if that is more.

Two further systems send as many bytes as DDP: "replicated" is ``replicate``, and "kept" shards parameters, but leaves
them unsharded from forward to backward.

"loop", "train_step" and "compiled_update" are steps with clipping and AdamW, which are timed, too: the usual loop
around a compiled model and its loss, and ``TrainStep`` without and with ``compile_update``.

With ``--wire`` the systems differ in the codecs of gathers and reductions (for example "wire_int8" has
``WirePolicy("int8", "int8")``). Beside them run the exact systems, mixed precision in bfloat16 ("bf16", "fsdp2_bf16"),
and torchao's float8 training, which gathers weights in float8 ("float8", "fsdp2_float8").

Three systems are floors. "floor_compute" is the model alone, unsharded and compiled. "floor_wire" runs the collectives
of compiled_fsdp's step without compute, with as many in flight at once as in that step. "floor_wire_fsdp2" runs FSDP2's
collectives without compute, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import link
from bench.link_cases import (
    ACCUMULATING,
    BROKEN,
    BUDGETS,
    CASES,
    COMPARED_TO,
    LAYOUTS,
    NAMES,
    OF_ONE_GROUP,
    ON_MACHINES,
    STEPS,
    UNSHARDED,
    WHOLE,
    WIRE,
    Case,
)
from bench.medians import interval_of_median, median_and_interval

ROOT = Path(__file__).parent.parent
COMPARISONS = {
    WHOLE: ("ratio_to_whole", "ratio_to_whole_ci"),
    COMPARED_TO: ("ratio_to_fsdp2", "ratio_ci"),
    "accumulate_each": ("ratio_to_each", "ratio_to_each_ci"),
    "fsdp2_accumulate_wait": ("ratio_to_theirs", "ratio_to_theirs_ci"),
}
"""By baseline system: the keys of a record for the ratio to that baseline and for the ratio's interval."""
FLOORS = {"compute": "floor_compute", "collectives": "floor_wire"}
"""By part of a planned step: the system that measures this part alone."""
GRACE = 900  # seconds beyond their budget after which the workers count as hung


class WorkerFailed(Exception):
    """A rank ended with an error, or the ranks hang."""


def measure(case: Case, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one setting with one worker per rank; return rank 0's records by system."""
    layout = LAYOUTS[options.layout]
    network = link.Link(f"{case.gbit}gbit", options.burst, layout.ranks_per_machine)
    with tempfile.TemporaryDirectory() as folder, network:
        workers = [_start(rank, network, case, options, seconds, Path(folder)) for rank in range(layout.ranks)]
        try:
            _wait(workers, Path(folder), seconds + GRACE)
        finally:
            for worker in workers:
                _end(worker)
        return json.loads((Path(folder) / "0.json").read_text())


def _start(
    rank: int, network: link.Link, case: Case, options: argparse.Namespace, seconds: float, folder: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.real_link_worker", "--out", str(folder / f"{rank}.json")]
    command += ["--model", options.model, "--layout", options.layout]
    command += ["--gbit", str(case.gbit), "--batch", str(case.batch), "--systems", *options.systems]
    command += ["--repeats", str(options.repeats), "--seconds", str(seconds)]
    command += ["--assumed"] * options.assumed
    environment = {
        **os.environ,
        **network.environment(rank, options.port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # each machine begins with an empty cache, so that compile times are those of a cold start
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{rank // network.ranks_per_machine}"),
        # a folder of its own, because the measured rates are true for this link only
        "COMPILED_FSDP_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if options.assumed:  # the planner then assumes the rates inside one machine, which are closer to a quick link's
        environment["LOCAL_WORLD_SIZE"] = environment["WORLD_SIZE"]
    with open(folder / f"{rank}.log", "wb") as log:
        output = None if rank == 0 else log
        return subprocess.Popen(
            network.command(rank, command), env=environment, cwd=ROOT, stdout=output, stderr=log, start_new_session=True
        )


def _wait(workers: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Wait until all workers ended well.

    Raises:
        WorkerFailed: a worker ended with an error, or they take more than ``seconds``. The message has the ends of
            their logs.
    """
    deadline = time.monotonic() + seconds
    while any(codes := [worker.poll() for worker in workers]) or None in codes:
        failed = [rank for rank, code in enumerate(codes) if code]
        late = time.monotonic() > deadline
        if failed or late:
            time.sleep(2)  # we may see the second failure before the first one: wait for both
            codes = [worker.poll() for worker in workers]
            failed = [rank for rank, code in enumerate(codes) if code]
            why = f"rank {failed[0]} ended with {codes[failed[0]]}" if failed else f"not done after {seconds:.0f} s"
            logs = [f"rank {rank}:\n{_tail(folder / f'{rank}.log')}" for rank in failed or range(len(workers))]
            raise WorkerFailed("\n".join([why, *logs]))
        time.sleep(0.2)


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its child processes, if it still runs."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def summary(
    case: Case, records: dict[str, Any], systems: dict[str, Any], model: str = "mlp", layout: str = "two"
) -> list[dict[str, Any]]:
    """Return one record per system: medians, intervals, ratios."""
    rows = []
    for name, record in records.items():
        step, around = median_and_interval(record["step_s"])
        row = {
            "link": f"{case.gbit}gbit",
            "model": model,
            "layout": layout,
            "batch": case.batch,
            "system": name,
            "sharded": systems[name].sharded,
            "reshard": systems[name].reshard,
            "step_s": step,
            "step_ci_s": around,
            "ci_coverage": interval_of_median(record["step_s"])[2],
            "rounds": len(record["step_s"]),
            "cpu_s": median(record["cpu_s"]),
            "forward_s": median(record["forward_s"]),
            "backward_s": median(record["backward_s"]),
            "peak_bytes": record["peak_bytes"] if name != "floor_wire" and name != "floor_wire_fsdp2" else None,
            "wire_bytes": int(median(record["wire_bytes"])),
            "inside_bytes": int(median(record["inside_bytes"])),
            "reported_bytes": LAYOUTS[layout].ranks_per_machine * int(median(record["reported_bytes"])) or None,
            "compile_s": max(0.0, record["first_step_s"] - step) if systems[name].compiles else None,
            "loss": record["loss"] if systems[name].trains else None,
            "predicted_s": record.get("predicted_s"),
            "predicted_parts_s": record.get("predicted_parts_s"),
            "budget_bytes": record.get("budget_bytes"),
            "for_backward": record.get("for_backward"),
        }
        for other, (ratio, interval) in COMPARISONS.items():
            if other in records:
                pairs = zip(record["step_s"], records[other]["step_s"], strict=True)
                row[ratio], row[interval] = median_and_interval([mine / theirs for mine, theirs in pairs])
        rows.append(row)
    return rows


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print the table of one setting."""
    first = rows[0]
    print(f"\n{case}: medians of {first['rounds']} rounds, intervals hold the median with {first['ci_coverage']:.1%}")
    print(f"{'system':19} {'step, s':>7} {'interval':>15} {'of fsdp2':>8} {'interval':>15} "
          f"{'cpu, s':>7} {'fwd, s':>7} {'bwd, s':>7} {'peak, MB':>8} {'sent, MB':>8} "
          f"{'inside, MB':>10} {'compile, s':>10}")  # fmt: skip
    for row in rows:
        ratio = f"{row['ratio_to_fsdp2']:8.3f} {_range(row['ratio_ci'])}" if "ratio_to_fsdp2" in row else " " * 24
        peak = f"{row['peak_bytes'] / 1e6:8.0f}" if row["peak_bytes"] is not None else " " * 8
        compiling = f"{row['compile_s']:10.1f}" if row["compile_s"] is not None else ""
        print(f"{row['system']:19} {row['step_s']:7.3f} {_range(row['step_ci_s'])} {ratio} {row['cpu_s']:7.3f} "
              f"{row['forward_s']:7.3f} {row['backward_s']:7.3f} {peak} {row['wire_bytes'] / 1e6:8.1f} "
              f"{row['inside_bytes'] / 1e6:10.1f} {compiling}")  # fmt: skip


def _range(interval: list[float]) -> str:
    return f"{interval[0]:6.3f} - {interval[1]:6.3f}"


def check(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print whether the setting's ratio of communication to compute is as claimed, and whether all losses are equal.

    Also prints measured times beside predicted ones, and sent bytes beside reported ones.
    """
    by_name = {row["system"]: row for row in rows}
    for name, row in by_name.items():
        if (predicted := row["predicted_s"]) is not None:
            print(
                f"the planner predicted {predicted:.3f} s for a step of {name}: measured / predicted is "
                f"{row['step_s'] / predicted:.3f}"
            )
            for part, floor in FLOORS.items():
                if name == WHOLE and floor in by_name:
                    alone, measured = row["predicted_parts_s"][part], by_name[floor]["step_s"]
                    print(
                        f"  its {part} alone: {alone:.3f} s predicted, {measured:.3f} measured ({measured / alone:.3f})"
                    )
        if (budget := row["budget_bytes"]) is not None:
            print(f"  within {budget / 1e6:.0f} MB, {row['peak_bytes'] / 1e6:.0f} used: {row['for_backward']}")
    for name in BROKEN:
        if name in by_name and WHOLE in by_name:
            row = by_name[name]
            print(f"{name} / {WHOLE} = {row['ratio_to_whole']:.3f} {_range(row['ratio_to_whole_ci'])}")
    for row in rows:
        if row["reported_bytes"]:
            reported, sent = row["reported_bytes"], row["wire_bytes"] + row["inside_bytes"]
            print(
                f"{row['system']}: {reported / 1e6:.1f} MB reported by this machine's ranks, {sent / 1e6:.1f} sent: "
                f"{sent / reported:.3f}"
            )
    for name in (*ACCUMULATING[1:], *ON_MACHINES[1:]):
        if {name, ACCUMULATING[0]} <= by_name.keys():
            row = by_name[name]
            print(f"{name} / {ACCUMULATING[0]} = {row['ratio_to_each']:.3f} {_range(row['ratio_to_each_ci'])}")
    if {"accumulate_wait", "fsdp2_accumulate_wait"} <= by_name.keys():
        row = by_name["accumulate_wait"]
        ratio = f"{row['ratio_to_theirs']:.3f} {_range(row['ratio_to_theirs_ci'])}"
        print(f"accumulate_wait / fsdp2_accumulate_wait = {ratio}")
    if {WHOLE, "floor_wire", "floor_compute"} <= by_name.keys():
        step, compute, wire = (by_name[name] for name in (WHOLE, "floor_compute", "floor_wire"))
        floor = max(compute["step_s"], wire["step_s"])
        print(
            f"{WHOLE} / the larger of compute and its collectives = {step['step_s'] / floor:.3f}; together these take "
            f"{compute['cpu_s'] + wire['cpu_s']:.3f} s of a rank's CPU"
        )
    if {"floor_wire_fsdp2", "floor_compute"} <= by_name.keys():
        ratio = by_name["floor_wire_fsdp2"]["step_s"] / by_name["floor_compute"]["step_s"]
        verdict = ""
        if case.name:
            held = "as claimed" if case.low <= ratio <= case.high else "NOT what is claimed"
            verdict = f": {case.name} ({case.low} to {case.high}), {held}"
        print(f"FSDP2's collectives alone / compute alone = {ratio:.2f}{verdict}")
    losses = {row["system"]: row["loss"] for row in rows if row["loss"] is not None}
    if losses:
        spread = max(losses.values()) - min(losses.values())
        alike = spread <= 1e-3 * abs(max(losses.values()))
        print(f"last loss {'equal' if alike else 'NOT EQUAL'}: " + ", ".join(f"{k} {v:.7f}" for k, v in losses.items()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two settings at 1 Gb/s, 15 minutes; not the broken systems"
    )
    parser.add_argument("--json", type=Path, help="write all records to this file")
    parser.add_argument("--model", choices=CASES, default="mlp", help="(%(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="two", help="of ranks on two machines (%(default)s)")
    parser.add_argument("--rates", type=_numbers, help="Gb/s; only settings with these rates")
    parser.add_argument("--batches", type=_numbers, help="these batches at each of the rates, instead of the settings")
    parser.add_argument("--repeats", type=int, default=15, help="rounds at most (%(default)s)")
    parser.add_argument("--minutes", type=float, help="for all settings; rounds are left out to keep it")
    parser.add_argument("--systems", type=lambda text: text.split(","), help=",".join(NAMES))
    parser.add_argument("--assumed", action="store_true", help="plan without measuring the hardware first")
    parser.add_argument("--burst", default="4mb", help="of the rate limit, as tc takes it (%(default)s)")
    parser.add_argument(
        "--accumulate", action="store_true", help=f"compare {', '.join(ACCUMULATING)}, communication-bound"
    )
    parser.add_argument("--budgets", action="store_true", help=f"compare {', '.join((WHOLE, *BUDGETS))}")
    parser.add_argument("--wire", action="store_true", help=f"compare {', '.join(WIRE)}, communication-bound")
    options = parser.parse_args(arguments)
    # with --quick no systems with graph breaks, because they would need more than its 15 minutes
    usual = [name for name in NAMES if not (options.quick and name in BROKEN)]
    accumulating = ON_MACHINES if options.layout == "reshard" else ACCUMULATING
    chosen = accumulating if options.accumulate else WIRE if options.wire else None
    chosen = (WHOLE, *BUDGETS) if options.budgets else chosen
    known = chosen or (*NAMES, *UNSHARDED, *STEPS)
    if not LAYOUTS[options.layout].is_one_group:
        if several := set(options.systems or ()) & set(OF_ONE_GROUP):
            parser.error(
                f"{', '.join(sorted(several))}: not with --layout {options.layout}, all ranks are one group there"
            )
        usual = [name for name in usual if name not in OF_ONE_GROUP]
    options.systems = options.systems or list(chosen or usual)
    if unknown := set(options.systems) - set(known):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    options.systems = [name for name in known if name in options.systems]
    if "floor_wire" in options.systems and "compiled_fsdp" not in options.systems:
        parser.error("floor_wire needs compiled_fsdp, whose collectives it runs")
    options.minutes = options.minutes or (14 if options.quick else 60)
    options.port = random.randrange(20000, 30000)
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the settings to measure."""
    settings = CASES[options.model]
    if options.batches:
        known = {(case.gbit, case.batch): case for case in settings}
        pairs = [(rate, batch) for rate in options.rates or [1] for batch in options.batches]
        return [known.get(pair, Case(*pair)) for pair in pairs]
    if (options.accumulate or options.wire) and not options.rates:
        return [next(case for case in settings if case.quick)]
    cases = [case for case in settings if case.quick or not options.quick]
    return [case for case in cases if not options.rates or case.gbit in options.rates]


def main() -> int:
    """Measure and print; return 2 if this machine cannot make a link."""
    options = parse()
    if (reason := link.why_not()) is not None:
        print(f"real_link: no link can be made here: {reason}", file=sys.stderr)
        return 2
    from bench.link_systems import SYSTEMS

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the link is removed
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"Something else runs here (load average {load:.1f}): these times will be too long.", file=sys.stderr)
    cases = cases_of(options)
    end = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    for i, case in enumerate(cases):
        weights = [3 + other.batch / 512 for other in cases[i:]]  # 3 for compiling; larger batches take longer
        print(f"{options.model}, {LAYOUTS[options.layout].text}; {case}: setting up", flush=True)
        records = measure(case, options, (end - time.monotonic()) * weights[0] / sum(weights))
        rows += (found := summary(case, records, SYSTEMS, options.model, options.layout))
        show(case, found)
        check(case, found)
        if options.json:  # after each setting, so that a later failure does not lose its records
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkerFailed as error:
        sys.exit(f"real_link: {error}")
